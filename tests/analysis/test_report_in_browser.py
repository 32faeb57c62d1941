"""The report in a real browser: nothing is requested, nothing fails, hostile tokens do not run, keys work."""

import shutil

import pytest
import torch
from small_models import HOSTILE, HostileTokenizer, small_model

from analysis.report import report
from analysis.report.sections import SECTIONS
from circuits import load

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `browser`)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    model = small_model(d_vocab=len(HOSTILE))
    model.tokenizer = HostileTokenizer()
    model.card = {"note": "<img src=x onerror=\"document.title='owned'\">"}
    path = tmp_path_factory.mktemp("report") / "report.html"
    report(model, torch.arange(len(HOSTILE))[None], "hostile").save(path)
    return path.as_uri()


@pytest.fixture(params=["light", "dark"])
def view(chromium, address, request):
    """The loaded page, with every request and every complaint of the chromium in lists."""
    context = chromium.new_context(color_scheme=request.param, viewport={"width": 1200, "height": 900})
    view = context.new_page()
    view.requests, view.complaints = [], []
    view.on("request", lambda r: view.requests.append(r.url))
    view.on("console", lambda message: view.complaints.append(message.text))
    view.on("pageerror", lambda error: view.complaints.append(str(error)))
    view.goto(address)
    view.locator("#large").wait_for(state="visible")
    yield view
    context.close()


def test_nothing_is_requested_and_nothing_fails(view, address):
    for button in view.locator("button:visible").all():
        button.click()
    outside = [url for url in view.requests if url != address and not url.startswith("data:")]
    assert outside == []
    assert view.complaints == []


def test_hostile_tokens_are_seen_and_do_not_run(view):
    assert view.title() == "Circuits of hostile"
    first = view.locator(".prompt button").first
    assert first.inner_text() == HOSTILE[0]
    view.locator(".prompt button").nth(2).hover()
    assert HOSTILE[2].replace(" ", "·") in view.locator("#guesses").inner_text()
    assert view.locator("main script:not([type='application/json'])").count() == 0
    assert view.evaluate("document.querySelectorAll('[onerror], [onload]').length") == 0


def test_content_policy_stops_a_script_that_got_in(view):
    view.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title='owned'\">`)")
    view.wait_for_timeout(100)
    assert view.title() == "Circuits of hostile"


def test_a_head_is_enlarged_and_its_weights_are_read_with_keys(view):
    view.locator(".tiles button").nth(4).click()
    assert view.locator("#pattern-title").inner_text() == "L1H1"
    assert view.locator(".tiles button[aria-pressed=true]").count() == 1
    view.locator("#pattern").focus()
    view.keyboard.press("ArrowUp")
    assert f"query {len(HOSTILE) - 2}" in view.locator("#readout").inner_text()
    assert "weight 0." in view.locator("#readout").inner_text()
    view.keyboard.press("Escape")
    assert view.locator("#readout").inner_text().startswith("Rows are queries")
    view.locator(".tiles button").nth(4).focus()
    view.keyboard.press("ArrowUp")
    assert view.locator("#pattern-title").inner_text() == "L0H1"


def test_enlarged_pattern_has_the_colour_of_its_weights(view):
    """The first query can only look at itself: weight 1, the accent itself."""
    accent = view.evaluate(
        """() => { const box = document.createElement('i');
        box.style.color = 'var(--accent)'; document.body.append(box);
        return getComputedStyle(box).color.match(/\\d+/g).map(Number) }"""
    )
    drawn = view.evaluate(
        """() => { const c = document.getElementById('pattern'), g = c.getContext('2d'), n = 9;
        const d = g.getImageData(0, 0, c.width, c.height).data;
        const count = {}; for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) {
          const key = `${d[i]},${d[i + 1]},${d[i + 2]}`; count[key] = (count[key] ?? 0) + 1; }
        return count }"""
    )
    assert drawn.get(",".join(map(str, accent)), 0) > 100


def test_tables_are_sorted_by_a_column_and_back(view):
    section = view.locator("#scores")
    column = section.locator("th button", has_text="induction")
    column.click()
    values = [float(c) for c in section.locator("tbody tr td:nth-child(6)").all_inner_texts() if c != "–"]
    assert values == sorted(values, reverse=True)
    column.click()
    values = [float(c) for c in section.locator("tbody tr td:nth-child(6)").all_inner_texts() if c != "–"]
    assert values == sorted(values)
    section.locator("th button", has_text="head").click()
    assert section.locator("tbody th").all_inner_texts() == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]


def test_a_narrow_screen_scrolls_tables_and_not_the_page(chromium, address):
    view = chromium.new_page(viewport={"width": 360, "height": 700})
    view.goto(address)
    view.locator("#large").wait_for(state="visible")
    assert view.evaluate("document.documentElement.scrollWidth") == 360
    view.close()


def test_a_table_of_hundreds_of_heads_scrolls_under_its_own_heads(chromium, tmp_path):
    model = small_model(n_heads=51)
    report(model, (torch.arange(5) % 17)[None], "many heads").save(tmp_path / "many.html")
    view = chromium.new_page(viewport={"width": 1200, "height": 900})
    view.goto((tmp_path / "many.html").as_uri())
    box = view.locator("#scores .scroll")
    box.locator("th button", has_text="induction").click()
    assert box.locator("tbody tr").count() == 102
    box.evaluate("box => box.scrollTo(0, 900)")
    top, bottom = (box.bounding_box()["y"] + d for d in (0, box.bounding_box()["height"]))
    assert bottom - top < 900
    assert abs(box.locator("thead").bounding_box()["y"] - top) < 1
    view.close()


def test_labels_of_a_long_pattern_are_as_large_as_those_of_a_short_one(chromium, tmp_path):
    model = small_model(n_ctx=90)
    report(model, (torch.arange(90) % 17)[None], "long").save(tmp_path / "long.html")
    view = chromium.new_page(viewport={"width": 1200, "height": 900})
    view.goto((tmp_path / "long.html").as_uri())
    view.locator("#large").wait_for(state="visible")
    assert "One token in 3 is labelled." in view.locator("#readout").inner_text()
    assert "11px" in view.evaluate("document.getElementById('pattern').getContext('2d').font")
    view.close()


def test_names_under_the_pictures_are_not_cut(chromium, tmp_path):
    report(load("shakespeare"), torch.tensor([[5, 9, 2, 5, 9, 2]])).save(tmp_path / "page.html")
    view = chromium.new_page(viewport={"width": 420, "height": 900})
    view.goto((tmp_path / "page.html").as_uri())
    roles = view.locator(".tiles button small")
    assert "previous" in roles.all_inner_texts()
    assert view.evaluate(
        "[...document.querySelectorAll('.tiles small')].every(e => e.scrollWidth <= e.clientWidth + 1)"
    )
    view.close()


def test_without_scripts_everything_but_the_extras_is_there(chromium, address):
    context = chromium.new_context(java_script_enabled=False)
    view = context.new_page()
    view.goto(address)
    assert view.locator("section").count() == len(SECTIONS)
    assert view.locator("#patterns .tiles img").count() == 6
    assert not view.locator("#large").is_visible()
    context.close()
