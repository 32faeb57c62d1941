"""Components and tokens may be given as their text, wherever they are taken."""

from __future__ import annotations

import pytest
import torch

from circuits import Head, HookedGPT
from circuits.paths import expand_paths, expand_scores, virtual_head
from circuits.residual import decompose, direct_logit_attribution
from circuits.text import CharTokenizer
from tests.architectures import make
from tests.runs import run_of


@pytest.fixture(scope="module")
def model() -> HookedGPT:
    made = make("course").requires_grad_(False)
    made.tokenizer = CharTokenizer(tuple("\n abcdefghijklmno")[: made.config.d_vocab])
    return made


def test_the_row_of_a_component_is_found_by_its_text(model) -> None:
    _, cache = model.run_with_cache(model.to_tokens("abc"))
    for table in (decompose(model, cache), direct_logit_attribution(model, cache, 1, 2)):
        assert torch.equal(table["L0H1"], table[Head(0, 1)])
        with pytest.raises(KeyError, match=r"Head\(0, 9\) is no row of this .*they are embed, pos_embed, L0H0"):
            table[Head(0, 9)]
        with pytest.raises(ValueError, match="'L0K1' is not a component"):
            table["L0K1"]


def test_heads_of_weight_paths_may_be_text() -> None:
    model = run_of("attn_only_no_norm")[0]
    assert len(expand_scores(model, "L1H0")) == len(expand_scores(model, Head(1, 0)))
    assert virtual_head(model, "L0H1", "L1H0").first == Head(0, 1)


def test_tokens_may_be_text(model) -> None:
    _, cache = model.run_with_cache(model.to_tokens(["abc", "bca"]))
    by_text = direct_logit_attribution(model, cache, "a", ["b", "\n"])
    by_id = direct_logit_attribution(model, cache, model.to_single_token("a"), [model.to_single_token("b"), 0])
    assert torch.equal(by_text.values, by_id.values)
    assert torch.equal(expand_paths(model, cache, "a", "b").total[:1], by_text.total[:1])


def test_text_that_is_not_one_token_is_refused(model) -> None:
    _, cache = model.run_with_cache(model.to_tokens("abc"))
    with pytest.raises(ValueError, match="'ab' is 2 tokens, not one: 'a', 'b'"):
        direct_logit_attribution(model, cache, "ab")
    with pytest.raises(ValueError, match="'' is 0 tokens, not one"):
        model.to_single_token("")
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        make("course").to_single_token("a")


@pytest.mark.parametrize("expand", [direct_logit_attribution, expand_paths])
def test_a_token_is_not_compared_with_itself(model, expand) -> None:
    _, cache = model.run_with_cache(model.to_tokens(["abc", "bca"]))
    with pytest.raises(ValueError, match=r"correct and wrong are equal \(token 3\)"):
        expand(model, cache, [1, 3], 3)


def test_some_answers_of_all_positions_may_coincide(model) -> None:
    _, cache = model.run_with_cache(model.to_tokens("abc"))
    found = direct_logit_attribution(model, cache, torch.tensor([[1, 2, 3]]), 2, None)
    assert not found.total[0, 1]
    assert found.total[0, 0]
