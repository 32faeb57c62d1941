"""What the report says in words: the card, the closed form of the total, findings that are none, and bars."""

import pytest
import torch
from small_models import small_model
from test_report import Page

from analysis.accounting import parameter_table
from analysis.prompts import default_tokens
from analysis.report import report
from analysis.report.card import loss_curve, provenance
from analysis.report.sections.ablation import ablation
from analysis.report.sections.findings import findings
from analysis.report.sections.model import flattened, once
from analysis.report.sections.parameters import closed_form
from analysis.report.tables import bar
from circuits import GPTConfig, load
from tests import architectures

SIZES = {"n_layers": 3, "d_model": 12, "n_heads": 2, "n_ctx": 13, "d_vocab": 17}


@pytest.fixture(scope="module")
def made():
    return report(small_model(), torch.tensor([[3, 1, 16, 0, 3, 1, 2]]))


@pytest.fixture(scope="module")
def card():
    return load("shakespeare").card


@pytest.mark.parametrize(
    ("changes", "form"),
    [
        ({}, "2Vd + T_max d + L(12d^2 + 10d) + 2d"),
        ({"attn_only": True, "norm": None}, "2Vd + T_max d + L(4d^2 + d)"),
        ({"norm": "rmsnorm", "positions": "rotary", "tie_embeddings": True}, "Vd + L(12d^2 + 8d) + d"),
        ({"bias_out": False, "bias_mlp": False, "norm": None, "bias_unembed": True}, "2Vd + T_max d + 12Ld^2 + V"),
        ({"n_kv_heads": 1}, None),
        ({"d_head": 3}, None),
        ({"qk_norm": True}, None),
    ],
)
def test_closed_form_is_that_of_the_configuration_or_none(changes, form):
    config = GPTConfig(**SIZES, **changes)
    found = closed_form(config, parameter_table(config).total)
    assert (None if found is None else found[0]) == form


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_no_architecture_shows_a_form_with_another_total(name):
    config = architectures.ARCHITECTURES[name]
    total = parameter_table(config).total
    assert closed_form(config, total + 1) is None


def test_page_names_the_lecture_and_needs_it_nowhere_else(made):
    page = Page(made.html)
    assert "This toolkit follows a lecture, “The Transformer”" in made.html
    before = made.html.split('<section id="claims"')[0].split("</nav>")[1]
    assert "lecture" not in before.lower()
    assert "claims" in page.sections
    assert "pre-norm LayerNorm, learned positions, exact GELU" in made.html


def test_scores_say_that_the_tokens_are_different(made):
    assert "Attention scores on 8 sequences of 6 different random tokens, twice" in made.html


def test_card_in_a_line_and_as_a_curve(card):
    assert provenance(card) == "tinyshakespeare.txt, 4,000 steps, validation loss 1.555 nats"
    curve = loss_curve(card)
    assert curve.count("<polyline") == 2
    assert "from step 500 to 4,000" in curve
    assert "validation 1.555" in curve


@pytest.mark.parametrize(
    "card",
    [{}, {"history": 3, "loss": "low", "data": None}, {"history": {"step": [1, "2"], "val_loss": [1.0, 2.0]}}],
)
def test_a_card_that_says_something_else_has_no_curve(card):
    assert provenance(card) == "–"
    assert loss_curve(card) is None


def test_curve_ends_at_the_last_loss():
    curve = loss_curve({"history": {"step": [0, 10], "val_loss": [4.0, 1.0]}})
    assert 'points="0.0,1.0 300.0,62.5"' in curve


def test_card_says_nothing_twice_and_what_its_fractions_are_of(card):
    entries = dict(flattened(once(card)))
    assert not {"seed", "steps"} & set(entries)
    assert entries["training.seed"] == "0"
    assert entries["training.final_lr"] == "0.1 of lr"
    assert entries["history.step"] == "500, …, 4,000 (8 entries)"


def test_a_seed_that_differs_from_the_settings_is_kept():
    assert once({"seed": 1, "training": {"seed": 0}})["seed"] == 1


def test_no_head_is_called_after_a_small_score():
    made = report(load("shakespeare"), torch.arange(20)[None])
    text = findings(made.measurements).html
    assert "<dt>Strongest induction head</dt><dd>none above 0.3<small>largest induction score: L3H3, 0.011" in text
    assert "<dt>Strongest previous-token head</dt><dd>L0H1<" in text


def test_blocks_stand_in_no_list_with_what_is_inside_them(made):
    page = Page(ablation(made.measurements).html)
    lists = [[row[0] for row in table[1:]] for table in page.tables[1:]]
    assert [len(names) for names in lists] == [6, 2, 2]
    assert set(lists[2]) == {"L0", "L1"}


def test_nothing_has_no_bar():
    assert "span" not in bar(0.0, least=-1.0, most=1.0)
    assert "span" in bar(0.01, least=-1.0, most=1.0)


def test_attribution_and_ablation_say_how_they_differ(made):
    assert "total effect, on all predicted tokens" in made.html
    assert "direct effect, at one position and on one pair of tokens" in made.html


def test_paths_say_what_a_remainder_larger_than_the_lead_means():
    made = report(load("shakespeare"), default_tokens(load("shakespeare")))
    assert "The others together (+0.832) are larger than the lead itself (+0.449)" in made.html
    assert "largely cancel" not in report(load("induction"), torch.tensor([[5, 9, 2, 7, 5, 9, 2]])).html
