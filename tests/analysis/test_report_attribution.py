"""The report's attribution and its table of paths."""

import pytest
import torch
from small_models import HOSTILE, HostileTokenizer, small_model
from test_report import Page

from analysis.report import report

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def model():
    return small_model()


@pytest.fixture(scope="module")
def made(model):
    return report(model, TOKENS)


@pytest.fixture(scope="module")
def page(made):
    return Page(made.html)


def plain(text):
    return float(text.replace("−", "-"))


def table_of(page, what):
    """The table of components, or of paths, in logits."""
    return next(table for table in page.tables if table[0][:2] == [what, "logits"])


def lead(model):
    best = model(TOKENS)[0, -1].detach().topk(2).values
    return float(best[0] - best[1])


def test_rows_of_components_sum_to_the_lead_of_the_likeliest_token(model, page):
    table = table_of(page, "component")
    assert {"ln_final_bias", "embed", "L1H2", "L0.mlp"} <= {row[0] for row in table}
    values = [plain(row[1]) for row in table[1:]]
    assert values[-1] == pytest.approx(lead(model), abs=1e-4)
    assert sum(values[:-1]) == pytest.approx(values[-1], abs=1e-2)


def test_paths_and_the_remainder_sum_to_the_lead(model, made, page):
    table = table_of(page, "path")
    values = [plain(row[1]) for row in table[1:]]
    assert values[-1] == pytest.approx(lead(model), abs=1e-4)
    assert sum(values[:-1]) == pytest.approx(values[-1], abs=1e-2)
    assert table[-2][0].endswith("other paths together")
    assert table[1][0] == str(made.measurements.paths.paths[0])
    assert f"All {made.measurements.paths.n_paths:,} paths were looked at" in made.html


def test_plain_data_hold_both(made):
    data = made.measurements.to_dict()["attribution"]
    assert sum(data["components"].values()) == pytest.approx(data["total"])
    assert sum(data["paths"].values()) + data["paths_remainder"] == pytest.approx(data["total"])


def test_a_post_norm_model_says_why_there_is_none():
    made = report(small_model(norm_placement="post"), TOKENS)
    assert made.html.count("Not shown: in a post-norm model") == 2
    assert made.measurements.to_dict()["attribution"] is None


def test_hostile_tokens_are_text_in_paths():
    model = small_model(d_vocab=len(HOSTILE))
    model.tokenizer = HostileTokenizer()
    page = Page(report(model, torch.tensor([[0, 1, 2, 3, 4, 0]])).html)
    assert table_of(page, "path")
    assert not {name for _, attributes in page.tags for name in dict(attributes) if name.startswith("on")}
