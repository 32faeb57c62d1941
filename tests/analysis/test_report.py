"""The report: its numbers against ones computed here another way, and hostile tokens as mere text."""

import base64
import json
import math
import re
import struct
import zlib
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from small_models import HOSTILE, HostileTokenizer, small_model

from analysis.claims import verify
from analysis.report import render, report
from analysis.report.markup import Html, el, formula, join
from analysis.report.page import content_policy
from analysis.report.png import weights_png
from analysis.report.predictions import predictions
from analysis.report.sections import SECTIONS
from analysis.report.sections.patterns import packed
from analysis.report.tables import number
from circuits import MLP, Block, GPTConfig, Head, HookedGPT
from tests import architectures


class Page(HTMLParser):
    """The parts of a page that tests ask about."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.tables, self.scripts, self.sections = [], [], {}, []
        self._cell = self._script = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []
        elif tag == "script":
            self._script = attributes.get("id", "page")
            self.scripts[self._script] = ""
        elif tag == "section":
            self.sections.append(attributes["id"])

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.tables[-1][-1].append("".join(self._cell))
            self._cell = None
        elif tag == "script":
            self._script = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)
        if self._script is not None:
            self.scripts[self._script] += data

    def table_with(self, head):
        """The first table that has this text in a head."""
        return next(table for table in self.tables if any(head in row for row in table[:2]))


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def tokens():
    return torch.tensor([[3, 1, 16, 0, 3, 1, 2]])


@pytest.fixture(scope="module")
def made(model, tokens):
    return report(model, tokens, "tiny <model>")


@pytest.fixture(scope="module")
def page(made):
    return Page(made.html)


def written(text):
    """A number as the page writes it, read back."""
    return float(text.replace("−", "-").replace(",", ""))


def mean_loss(model, tokens):
    with torch.no_grad():
        log_probs = model(tokens)[0].log_softmax(-1)
    return -sum(log_probs[t, tokens[0, t + 1]].item() for t in range(tokens.shape[1] - 1)) / (tokens.shape[1] - 1)


def zeroed(model, *prefixes):
    """A copy of the model whose weights and biases under some prefixes are zero."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.startswith(prefixes):
            tensor.zero_()
    return HookedGPT.from_state_dict(model.config, state)


def test_parameter_table_of_the_course_configuration():
    model = HookedGPT(GPTConfig.course())
    table = Page(report(model, torch.tensor([[1, 2, 3, 1, 2, 3]])).html).table_with("parameters")
    rows = {row[0]: (row[1], row[2]) for row in table[1:]}
    assert rows == {
        "token and positional embeddings": ("16,512", "2.02%"),
        "attention in all blocks": ("262,656", "32.16%"),
        "MLPs in all blocks": ("526,848", "64.51%"),
        "block LayerNorms": ("2,048", "0.25%"),
        "final LayerNorm and unembedding": ("8,576", "1.05%"),
        "total": ("816,640", "100%"),
    }


def test_losses_and_guesses_are_those_of_the_logits(model, tokens, page):
    table = page.table_with("loss (nats)")
    with torch.no_grad():
        probabilities = model(tokens)[0].softmax(-1)
    for t, row in enumerate(table[1:]):
        assert row[:2] == [str(t), str(tokens[0, t].item())]
        best = probabilities[t].argmax().item()
        assert row[5].split()[:2] == [str(best), f"{probabilities[t, best]:.3f}"]
        if t < 6:
            probability = probabilities[t, tokens[0, t + 1]].item()
            assert row[2:5] == [str(tokens[0, t + 1].item()), f"{-math.log(probability):.3f}", f"{probability:.3f}"]
    assert table[-1][2:5] == ["–", "–", "–"]


def test_mean_loss_is_that_of_the_predicted_tokens(model, tokens, made):
    assert made.measurements.predictions.mean_loss == pytest.approx(mean_loss(model, tokens), rel=1e-6)
    assert f"Mean loss {mean_loss(model, tokens):.3f} nats over 6 predicted tokens" in made.html


def test_ablated_mlps_and_blocks_change_the_loss_as_models_without_their_weights(model, tokens, made):
    clean, effects = mean_loss(model, tokens), made.measurements.effects
    for layer in range(2):
        mlp, attn = f"blocks.{layer}.mlp.down", f"blocks.{layer}.attn.out"
        assert effects[MLP(layer)] == pytest.approx(mean_loss(zeroed(model, mlp), tokens) - clean, abs=1e-6)
        assert effects[Block(layer)] == pytest.approx(mean_loss(zeroed(model, mlp, attn), tokens) - clean, abs=1e-6)


def test_ablated_heads_change_the_loss_as_models_without_their_output_weights(model, tokens, made, page):
    clean = mean_loss(model, tokens)
    grid = page.table_with("head 0")
    for layer in range(2):
        for head in range(3):
            other = zeroed(model)
            with torch.no_grad():
                other.blocks[layer].attn.W_O[head].zero_()
            effect = mean_loss(other, tokens) - clean
            assert made.measurements.effects[Head(layer, head)] == pytest.approx(effect, abs=1e-6)
            assert written(grid[1 + layer][1 + head]) == pytest.approx(effect, abs=6e-4)


def test_scores_table_shows_every_head_in_order(page, made):
    table = page.table_with("induction")
    assert [row[0] for row in table[1:]] == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]
    scores = made.measurements.by_head.attention
    assert written(table[4 + 1][1]) == pytest.approx(scores.previous[1, 1].item(), abs=6e-4)
    assert written(table[4 + 1][6]) == pytest.approx(scores.entropy[1, 1].item(), abs=6e-4)


def test_ranks_table_shows_each_circuit_under_its_own_head(page, made):
    table = page.table_with("copying")
    ranks, copies = made.measurements.by_head.ranks, made.measurements.by_head.copies
    row = next(row for row in table if row[0] == "L1H2")
    for start, circuit in ((2, 0), (8, 1)):
        assert written(row[start + 2]) == pytest.approx(ranks.stable_rank[1, 2, circuit].item(), abs=6e-3)
        assert written(row[start + 5]) == ranks.energy_rank[1, 2, circuit].item()
    assert written(row[1]) == pytest.approx(copies.score[1, 2].item(), abs=6e-4)


def attention_by_hand(model, tokens, layer, head):
    """softmax of masked q kᵀ / √d_head, from the stream that the layer reads."""
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=[f"blocks.{layer}.hook_resid_pre"])
        norm = model.blocks[layer].ln1
        x = cache["resid_pre", layer][0]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() * norm.w + norm.b
        attn = model.blocks[layer].attn
        scores = x @ attn.W_Q[head] @ (x @ attn.W_K[head]).T / math.sqrt(5)
    return scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf).softmax(-1)


def png_pixels(png):
    """Palette indices of a PNG whose lines are not filtered."""
    chunks, place = {}, 8
    while place < len(png):
        length, kind = struct.unpack(">I4s", png[place : place + 8])
        data = png[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + data) == struct.unpack(">I", png[place + 8 + length : place + 12 + length])[0]
        chunks[kind] = data
        place += 12 + length
    columns, rows = struct.unpack(">II", chunks[b"IHDR"][:8])
    raw = zlib.decompress(chunks[b"IDAT"])
    assert chunks[b"tRNS"] == bytes(range(256))
    assert len(chunks[b"PLTE"]) == 768
    return [list(raw[r * (columns + 1) + 1 : (r + 1) * (columns + 1)]) for r in range(rows)]


def pattern_pictures(page):
    return [a for tag, a in page.tags if tag == "img" and a["alt"].startswith("Attention pattern")]


def test_pictures_show_the_patterns_computed_by_hand(model, tokens, page):
    pictures = [a["src"] for a in pattern_pictures(page)]
    assert len(pictures) == 6
    for index, (layer, head) in ((1, (0, 1)), (5, (1, 2))):
        pixels = png_pixels(base64.b64decode(pictures[index].removeprefix("data:image/png;base64,")))
        expected = (attention_by_hand(model, tokens, layer, head) * 255).round()
        assert (torch.tensor(pixels) - expected).abs().max() <= 1


def test_script_gets_the_same_weights_row_by_row(model, tokens, page):
    data = json.loads(page.scripts["attention-data"])
    weights = zlib.decompress(base64.b64decode(data["packed"]))
    per = 7 * 8 // 2
    assert len(weights) == 6 * per
    expected = attention_by_hand(model, tokens, 1, 1) * 255
    for query in range(7):
        for key in range(query + 1):
            assert abs(weights[4 * per + query * (query + 1) // 2 + key] - expected[query, key]) <= 0.51
    assert data["names"][4] == "L1H1"


def test_page_asks_for_nothing_from_outside(page, made):
    for tag, attributes in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"https?://|@import|url\(", made.html)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert policy == content_policy(page.scripts["page"])
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


def test_no_event_handler_stands_in_an_attribute(page):
    assert [name for _, attributes in page.tags for name in attributes if name.startswith("on")] == []


def test_contents_list_every_section(page):
    links = [a["href"] for tag, a in page.tags if tag == "a" and a.get("href", "").startswith("#")]
    assert page.sections == [
        "findings",
        "model",
        "parameters",
        "prompt",
        "patterns",
        "scores",
        "ranks",
        "composition",
        "ablation",
        "attribution",
        "paths",
        "claims",
    ]
    assert {f"#{section}" for section in page.sections} <= set(links)
    assert len(page.sections) == len(SECTIONS)


def test_the_lectures_claims_have_a_row_each(made, page):
    found = made.measurements.verification
    rows = page.table_with("what the lecture says")
    assert [row[0] for row in rows[1:]] == list(found.claims)
    assert [row[1] for row in rows[1:]] == [verdict.finding.status for verdict in found.verdicts]
    assert found.holds


def test_name_of_the_model_is_escaped(made):
    assert "<title>Circuits of tiny &lt;model&gt;</title>" in made.html


@pytest.fixture(scope="module")
def hostile():
    model = small_model(d_vocab=len(HOSTILE))
    model.tokenizer = HostileTokenizer()
    model.card = {"command": "<script>alert(1)</script>", "nested": {"x": "</style><img src=x>"}}
    return report(model, torch.arange(len(HOSTILE))[None], "</title><script>1</script>")


def test_hostile_tokens_are_text(hostile):
    page = Page(hostile.html)
    assert [attributes.get("id") for tag, attributes in page.tags if tag == "script"] == [
        "prompt-data",
        "attention-data",
        None,
    ]
    assert {tag for tag, _ in page.tags} <= {
        *"html head meta title style body a div nav ol li h1 h2 h3 main header p section footer dl dt dd".split(),
        *"small b i".split(),
        *"span sub sup table caption thead tbody tfoot tr th td button bdi details summary script img canvas".split(),
        *"svg polyline".split(),
    }
    assert all(a["src"].startswith("data:image/png") for tag, a in page.tags if tag == "img")
    shown = json.loads(page.scripts["prompt-data"])
    assert shown[0]["label"] == HOSTILE[0].replace(" ", "·")
    assert "\\u202e" in shown[7]["label"]
    assert "·the" in {row[1] for row in page.table_with("loss (nats)")}
    assert "⏎" in {row[1] for row in page.table_with("loss (nats)")}


@pytest.mark.parametrize("architecture", architectures.NAMES)
def test_every_architecture_has_a_whole_page(architecture, monkeypatch):
    # The claims are checked on every architecture by their own tests.
    monkeypatch.setattr("analysis.report.measurements.verify", partial(verify, claims=["ex1", "4.1", "5.2b.variance"]))
    model = architectures.make(architecture)
    page = Page(report(model, torch.tensor([[3, 1, 2, 3]])).html)
    # A single layer has no pairs of heads that compose.
    assert len(page.sections) == len(SECTIONS) - (model.config.n_layers == 1)
    assert "nan" not in {cell for table in page.tables for row in table for cell in row}
    heads = model.config.n_layers * model.config.n_heads
    assert len(pattern_pictures(page)) == heads


def test_a_single_token_has_a_page_without_losses(model):
    page = Page(report(model, torch.tensor([[3]])).html)
    assert "ablation" not in page.sections
    assert page.table_with("loss (nats)")[1][3] == "–"


def test_nothing_is_computed_when_a_page_is_drawn(made, monkeypatch):
    monkeypatch.setattr(HookedGPT, "forward", None)
    assert render(made.measurements) == made.html


def test_saved_page_is_whole_or_not_there(made, tmp_path):
    made.save(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == made.html
    with pytest.raises(FileNotFoundError):
        made.save(tmp_path / "missing" / "a.html")
    with pytest.raises(IsADirectoryError):
        made.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_report_leaves_the_model_as_it_was(tokens):
    model = small_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report(model, tokens)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_predictions_of_one_prompt(model, tokens):
    found = predictions(model, tokens, top=2)
    assert found.next_token.tolist() == [1, 16, 0, 3, 1, 2, -1]
    assert found.guess.shape == (7, 2)
    assert (found.guess_probability[:, 0] >= found.guess_probability[:, 1]).all()
    assert math.isnan(found.loss[-1])


def test_markup_escapes_text_and_keeps_markup():
    assert el("b", "<i>", class_="x\"'>") == '<b class="x&quot;&#x27;&gt;">&lt;i&gt;</b>'
    assert el("b", Html("<i>")) == "<b><i></b>"
    assert el("img", alt="a", hidden=True, title=None, data_x=3) == '<img alt="a" hidden data-x="3">'
    assert join(["<", Html("<hr>")], "&") == "&lt;&amp;<hr>"
    assert formula("W_K^T x_{<t}") == ('<span class="formula">W<sub>K</sub><sup>T</sup> x<sub>&lt;t</sub></span>')


def test_numbers_have_a_real_minus_and_no_sign_at_zero():
    assert number(-1.5, "+.1f") == "−1.5"
    assert number(-0.0001, "+.3f") == "0.000"
    assert number(math.nan, ".1f") == "–"


def test_picture_of_weights_that_are_not_numbers_is_empty_there():
    pixels = png_pixels(weights_png(torch.tensor([[math.nan, 0.5, 2.0], [0.0, 1.0, -1.0]])))
    assert pixels == [[0, 128, 255], [0, 255, 0]]
    assert zlib.decompress(packed(torch.ones(1, 1, 3, 3))) == b"\xff" * 6
