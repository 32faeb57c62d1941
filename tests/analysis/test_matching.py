"""Head matching: permuted, rotated and rescaled copies are recognised, through tokens and nothing else."""

import itertools

import architectures
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from analysis.matching import match_heads
from analysis.matching.assignment import best_assignment
from circuits import HookedGPT
from circuits.folded import embedding, head_weights, unembedding
from circuits.gauge import transform_ov, transform_qk


def orthogonal(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]


def disguised(model: HookedGPT, order: list[list[int]]) -> HookedGPT:
    """The same function without a norm: heads reordered and in other gauges, the stream in another basis."""
    config = model.config
    for layer, head in itertools.product(range(config.n_layers), range(config.n_heads)):
        R = torch.randn(5, 5, generator=torch.Generator().manual_seed(layer * 9 + head), dtype=torch.float64)
        model = transform_ov(transform_qk(model, layer, head, R), layer, head, R.flip(0))
    basis = orthogonal(config.d_model, 0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith(("embed.weight", "qkv.weight", "up.weight")):
            state[name] = tensor @ basis
        elif name.endswith(("out.weight", "down.weight")):
            state[name] = basis.T @ tensor
        elif name.endswith(("out.bias", "down.bias")):
            state[name] = tensor @ basis
    new = HookedGPT.from_state_dict(config, state)
    with torch.no_grad():
        for layer, block in enumerate(new.blocks):
            for part in ("W_Q", "W_K", "W_V", "W_O"):
                view = getattr(block.attn, part)
                view.copy_(view[order[layer]].clone())
    return new


ORDER = [[2, 0, 1], [1, 2, 0]]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("circuits", [("QK", "OV"), ("QK",), ("OV",)])
def test_a_disguised_copy_is_recognised_head_by_head(circuits, raw):
    model = architectures.make("no_norm")
    other = disguised(model, ORDER)
    tokens = torch.arange(13)[None]
    torch.testing.assert_close(other(tokens), model(tokens), rtol=1e-9, atol=1e-9)
    found = match_heads(model, other, circuits, raw=raw)
    torch.testing.assert_close(found.similarity, torch.ones(6, dtype=torch.float64), rtol=1e-9, atol=0)
    for layer, head in itertools.product(range(2), range(3)):
        place = 3 * layer + head
        assert (found.partner_layer[place], found.partner_head[place]) == (layer, ORDER[layer].index(head))
    assert (found.best_other < 0.9).all()


@pytest.mark.parametrize("name", ["course", "like_gpt2", "like_llama", "like_gemma2"])
def test_similarities_are_cosines_of_the_dense_circuits(name):
    model, other = architectures.make(name), architectures.make(name, seed=1)

    def dense(m, circuit):
        weights, E, U = head_weights(m), embedding(m), unembedding(m)
        full = E @ weights.OV.AB @ U if circuit == "OV" else E @ weights.QK.AB @ (E - E.mean(0)).T
        return full.flatten(2).flatten(0, 1)

    found = match_heads(model, other)
    expected = (
        sum(
            torch.nn.functional.cosine_similarity(dense(model, c)[:, None], dense(other, c)[None], dim=-1)
            for c in ("QK", "OV")
        )
        / 2
    )
    torch.testing.assert_close(found.pairwise.flatten(2).flatten(0, 1), expected.detach(), rtol=1e-9, atol=1e-10)


def test_models_of_different_widths_and_types_can_be_compared():
    wide = architectures.make(architectures.config("course").replace(d_model=24, n_heads=4, n_layers=1))
    narrow = architectures.make("course", dtype=torch.float32)
    found = match_heads(narrow, wide)
    assert found.pairwise.shape == (2, 3, 1, 4)
    assert int((found.partner_layer >= 0).sum()) == 4
    assert found.similarity.isnan().sum() == 2
    back = match_heads(wide, narrow)
    torch.testing.assert_close(back.pairwise, found.pairwise.permute(2, 3, 0, 1))
    assert (back.partner_layer >= 0).all()


def test_heads_can_be_matched_within_their_layers():
    model, other = architectures.make("course"), architectures.make("course", seed=5)
    found = match_heads(model, other, same_layer=True)
    assert found.partner_layer.tolist() == [0, 0, 0, 1, 1, 1]
    assert sorted(found.partner_head[:3].tolist()) == [0, 1, 2]


def test_a_zero_head_is_like_no_other():
    model, other = architectures.make("course"), architectures.make("course", seed=5).requires_grad_(False)
    other.blocks[0].attn.W_V[1].zero_()
    found = match_heads(model, other, ("OV",))
    assert found.pairwise[:, :, 0, 1].isnan().all()
    assert int(found.similarity.isnan().sum()) == 1


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 2))
def test_the_assignment_is_the_best_of_all(seed, rows, more):
    gain = np.random.default_rng(seed).integers(-4, 5, (rows, rows + more)).astype(float)
    found = best_assignment(gain)
    assert len(set(found.tolist())) == rows
    best = max(
        sum(gain[row, column] for row, column in enumerate(columns))
        for columns in itertools.permutations(range(rows + more), rows)
    )
    assert gain[np.arange(rows), found].sum() == pytest.approx(best)


def test_what_cannot_be_compared_is_refused():
    model = architectures.make("course")
    with pytest.raises(ValueError, match="d_vocab is 17 in one and 19 in the other"):
        match_heads(model, architectures.make(model.config.replace(d_vocab=19)))
    with pytest.raises(ValueError, match="not one or both of 'QK', 'OV'"):
        match_heads(model, model, ("OK",))
    with pytest.raises(ValueError, match=r"same_layer needs as many .* got 2 × 3 and 1 × 3"):
        match_heads(model, architectures.make("one_layer"), same_layer=True)
    with pytest.raises(ValueError, match="at most as many rows"):
        best_assignment(np.zeros((3, 2)))
    bad = architectures.make("course").requires_grad_(False)
    bad.blocks[1].attn.W_V[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight is nan"):
        match_heads(model, bad)


def test_the_table_names_both_heads():
    frame = match_heads(architectures.make("course"), architectures.make("course", seed=2)).to_frame()
    assert list(frame.columns) == [
        "component", "layer", "head", "partner_layer", "partner_head", "similarity", "best_other"
    ]  # fmt: skip
