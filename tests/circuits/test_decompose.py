"""The stream as a sum of writes, over every architecture."""

from __future__ import annotations

import pytest
import torch

from circuits import MLP, Attn, AttnBias, Head, Neuron
from circuits.residual import decompose
from tests.runs import PRE, UNITS, run_of

EXACT = 1e-10
over_pre = pytest.mark.parametrize("name", PRE)
over_units = pytest.mark.parametrize("unit", UNITS)


@over_units
@over_pre
def test_writes_sum_to_every_stream(name, unit) -> None:
    model, _, _, cache = run_of(name)
    for layer in [*range(model.config.n_layers), None]:
        parts = decompose(model, cache, layer, unit)
        stream = cache["resid_post", -1] if layer is None else cache["resid_pre", layer]
        torch.testing.assert_close(parts.writes.sum(0), stream, rtol=EXACT, atol=EXACT)
        assert parts.error < EXACT
        assert len(parts.components) == len(parts.writes) == len(set(parts.components))
        if model.config.has_resid_mid and layer is not None:
            mid = decompose(model, cache, layer, unit, mid=True)
            torch.testing.assert_close(mid.writes.sum(0), cache["resid_mid", layer], rtol=EXACT, atol=EXACT)


@over_pre
def test_rows_of_one_unit_sum_to_those_of_the_coarser(name) -> None:
    model, _, _, cache = run_of(name)
    layers, heads, neurons = (decompose(model, cache, unit=unit) for unit in UNITS)
    for layer in range(model.config.n_layers):
        attention = [heads[c] for c in heads.components if _is_attention(c, layer)]
        torch.testing.assert_close(sum(attention), layers[Attn(layer)], rtol=EXACT, atol=EXACT)
        if model.config.has_mlp:
            mlp = [neurons[c] for c in neurons.components if _is_mlp(c, layer)]
            torch.testing.assert_close(sum(mlp), layers[MLP(layer)], rtol=EXACT, atol=EXACT)


def _is_attention(c, layer):
    return getattr(c, "layer", None) == layer and (
        str(c).startswith(f"L{layer}H") or "attn" in str(c) or "ln1" in str(c)
    )


def _is_mlp(c, layer):
    return getattr(c, "layer", None) == layer and not _is_attention(c, layer)


def test_a_heads_row_is_its_result() -> None:
    model, _, _, cache = run_of("all_biases")
    parts = decompose(model, cache)
    result = cache["result", 1]
    torch.testing.assert_close(parts[Head(1, 2)], result[:, :, 2], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(parts[AttnBias(1)], model.b_O[1].expand(*result.shape[:2], -1))


def test_a_heads_write_through_a_branch_norm_is_gain_times_result_over_scale() -> None:
    model, _, _, cache = run_of("like_gemma2")
    expected = model.blocks[0].ln1_post.w * cache["result", 0][:, :, 4] / cache["blocks.0.ln1_post.hook_scale"]
    torch.testing.assert_close(decompose(model, cache)[Head(0, 4)], expected, rtol=EXACT, atol=EXACT)


def test_a_neurons_row_is_its_activation_times_its_output_weights() -> None:
    model, _, _, cache = run_of("gated_silu")
    expected = cache["post", 1][..., 7:8] * model.W_out[1, 7]
    torch.testing.assert_close(decompose(model, cache, unit="neuron")[Neuron(1, 7)], expected, rtol=EXACT, atol=EXACT)


def test_the_table_of_a_decomposition_has_shares_that_sum_to_one() -> None:
    model, _, _, cache = run_of("course")
    frame = decompose(model, cache, position=-1).to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "batch", "norm", "share"]
    assert frame.groupby("batch")["share"].sum().to_numpy() == pytest.approx(1.0)


def test_an_edited_write_shows_in_the_error() -> None:
    model, tokens, _, _ = run_of("course")
    edit = [("blocks.1.hook_attn_out", lambda x, hook: x + 0.5)]
    _, cache = model.run_with_cache(tokens, fwd_hooks=edit)
    assert decompose(model, cache).error == pytest.approx(0.5)
    assert decompose(model, cache, unit="layer").error < EXACT
