"""Ranks of known spectra, spectra against dense matrices, and copying scores against dense eigenvalues."""

import math

import architectures
import compiled
import pytest
import torch

from analysis.ranks import (
    copying_scores,
    effective_rank,
    energy_rank,
    head_ranks,
    numerical_rank,
    participation_ratio,
    stable_rank,
)
from circuits import GPTConfig, HookedGPT
from circuits.folded import embedding, head_weights, unembedding

RANKS = ("numerical_rank", "stable_rank", "effective_rank", "participation_ratio", "energy_rank")


def every_rank(*values):
    s = torch.tensor(values, dtype=torch.float64)
    measures = (stable_rank, effective_rank, participation_ratio, energy_rank)
    return [numerical_rank(s, 5, 7).item(), *(measure(s).item() for measure in measures)]


def test_equal_singular_values_have_their_number_as_every_rank_but_the_energys():
    assert every_rank(3, 3, 3, 0, 0) == pytest.approx([3, 3, 3, 3, 3])
    assert every_rank(*[2.0] * 20)[:4] == pytest.approx([20] * 4)
    assert every_rank(*[2.0] * 20)[4] == 18


def test_one_direction_has_rank_one_and_nothing_has_rank_zero():
    assert every_rank(4, 0, 0) == pytest.approx([1] * 5)
    assert every_rank(0, 0, 0) == [0] * 5


def test_ranks_of_two_unequal_values_are_their_formulas():
    s = [2.0, 1.0]
    p = [2 / 3, 1 / 3]
    entropy = -sum(x * math.log(x) for x in p)
    assert every_rank(*s) == pytest.approx([2, 5 / 4, math.exp(entropy), 25 / 17, 2])
    assert every_rank(3.0, 1.0)[4] == 1  # 9 of 10 is 90%


def test_ranks_do_not_depend_on_scale():
    s = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for factor in (1e-200, 1e200):
        assert every_rank(*(s * factor).tolist()) == pytest.approx(every_rank(*s.tolist()))


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", architectures.NAMES)
def test_spectra_are_those_of_the_dense_matrices(name, raw):
    model = architectures.make(name)
    found = head_ranks(model, raw=raw)
    weights = head_weights(model, raw=raw)
    for place, circuit in enumerate(("QK", "OV")):
        dense = getattr(weights, circuit).AB
        expected = torch.linalg.svdvals(dense)[..., : found.bound]
        assert torch.allclose(found.singular_values[:, :, place], expected, atol=1e-9), circuit
        assert torch.equal(found.numerical_rank[:, :, place], torch.linalg.matrix_rank(dense))
    assert found.bound == min(model.config.d_head, model.config.d_model)
    assert found.raw is raw


def test_folding_matters_where_there_is_a_norm_and_only_there():
    with_norm, without = architectures.make("course"), architectures.make("no_norm")
    folded, raw = head_ranks(with_norm), head_ranks(with_norm, raw=True)
    assert not torch.allclose(folded.singular_values, raw.singular_values, atol=1e-3)
    folded, raw = head_ranks(without), head_ranks(without, raw=True)
    assert torch.equal(folded.singular_values, raw.singular_values)


def test_the_offset_changes_the_spectrum_of_rotary_heads_but_not_of_their_values():
    model = architectures.make("rotary")
    here, there = head_ranks(model), head_ranks(model, offset=4)
    assert not torch.allclose(here.singular_values[:, :, 0], there.singular_values[:, :, 0], atol=1e-3)
    assert torch.equal(here.singular_values[:, :, 1], there.singular_values[:, :, 1])
    assert "offset 4" in there.note


def test_the_compiled_heads_have_their_known_ranks():
    found = head_ranks(compiled.induction_head(), raw=True)
    assert tuple(found.numerical_rank[:, 0, 0].tolist()) == compiled.QK_RANKS
    assert tuple(found.numerical_rank[:, 0, 1].tolist()) == compiled.OV_RANKS
    # The spectra are flat, so all ranks that count directions agree; the other heads are zero.
    for name in ("stable_rank", "effective_rank", "participation_ratio"):
        assert torch.allclose(getattr(found, name)[:, 0].double(), found.numerical_rank[:, 0].double())
    for name in RANKS:
        assert getattr(found, name)[:, 1].abs().max() == 0


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("name", ["course", "no_norm", "tied", "grouped_query", "rmsnorm", "post_norm", "like_gemma2"])
def test_copying_scores_are_those_of_the_dense_eigenvalues(name, raw):
    model = architectures.make(name)
    found = copying_scores(model, raw=raw)
    weights = head_weights(model, raw=raw)
    dense = embedding(model, raw) @ weights.OV.AB @ unembedding(model, raw)
    expected = torch.linalg.eigvals(dense)
    largest = expected.abs().sort(-1, descending=True).values[..., : found.eigenvalues.shape[-1]]
    assert torch.allclose(found.eigenvalues.abs().sort(-1, descending=True).values, largest, atol=1e-7)
    score = expected.real.sum(-1) / expected.abs().sum(-1)
    assert torch.allclose(found.score, score, atol=1e-6)


def test_the_compiled_induction_head_copies_and_the_others_say_nothing():
    found = copying_scores(compiled.induction_head(), raw=True)
    assert found.score[1, 0].item() == pytest.approx(1, abs=1e-12)
    # The previous-token head moves what it reads to where it is not read out: W_E W_OV W_U is 0.
    assert found.score.isnan().tolist() == [[True, True], [False, True]]


def test_a_head_that_writes_the_opposite_has_score_minus_one():
    model = compiled.induction_head()
    with torch.no_grad():
        model.blocks[1].attn.W_O[0].mul_(-1)
    assert copying_scores(model, raw=True).score[1, 0].item() == pytest.approx(-1, abs=1e-12)


def test_eigenvalues_that_are_only_rounding_give_no_score():
    """In a turned basis of the stream the previous-token head's eigenvalues are 1e-16 and the like instead of 0."""
    model = compiled.induction_head()
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(model.config.d_model, model.config.d_model, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(square).Q
    with torch.no_grad():
        for weight in (model.embed.weight, model.pos_embed.weight, model.unembed.weight):
            weight.copy_(weight @ turn)
        for block in model.blocks:
            block.attn.qkv.weight.copy_(block.attn.qkv.weight @ turn)
            block.attn.out.weight.copy_(turn.T @ block.attn.out.weight)
    found = copying_scores(model, raw=True)
    assert 0 < found.eigenvalues[0, 0].abs().max() < 1e-12
    assert found.score[0, 0].isnan()
    assert found.score[1, 0].item() == pytest.approx(1, abs=1e-9)


def test_a_shift_of_all_logits_changes_no_copying_score():
    model = architectures.make("course")
    folded, raw = copying_scores(model).score, copying_scores(model, raw=True).score
    with torch.no_grad():
        model.unembed.weight.add_(torch.linspace(-1, 2, model.config.d_model, dtype=torch.float64))
    assert torch.allclose(copying_scores(model).score, folded, atol=1e-9)
    assert not torch.allclose(copying_scores(model, raw=True).score, raw, atol=1e-3)


def test_frames_have_the_axes_of_the_results():
    model = architectures.make("course")
    frame = head_ranks(model).to_frame()
    assert list(frame.columns) == ["layer", "head", "circuit", *RANKS]
    assert len(frame) == 2 * 3 * 2
    assert list(frame["circuit"][:2]) == ["QK", "OV"]
    assert list(copying_scores(model).to_frame().columns) == ["layer", "head", "score"]


def test_sixteen_bit_weights_have_float32_spectra():
    model = architectures.make("course", dtype=torch.bfloat16)
    assert head_ranks(model).singular_values.dtype == torch.float32
    assert copying_scores(model).score.dtype == torch.float32


def test_weights_that_are_not_numbers_are_named():
    model = architectures.make("no_norm")
    with torch.no_grad():
        model.blocks[1].attn.W_V[2, 0, 0] = math.nan
    with pytest.raises(ValueError, match="W_V of L1H2 holds NaN"):
        head_ranks(model)
    with pytest.raises(ValueError, match="W_V of L1H2 holds NaN"):
        copying_scores(model)


@pytest.mark.parametrize("name", ["embed.weight", "unembed.weight"])
def test_copying_scores_of_embeddings_that_are_not_finite_are_refused(name):
    model = HookedGPT(GPTConfig(n_layers=2, d_model=7, n_heads=3, d_head=5, d_mlp=11, n_ctx=13, d_vocab=17))
    with torch.no_grad():
        model.get_parameter(name)[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"weight (un)?embed.weight is nan at \["):
        copying_scores(model)
