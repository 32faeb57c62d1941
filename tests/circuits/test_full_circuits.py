"""Full circuits against what a run computes, their largest entries against a dense search, directions in tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, strategies as st

from circuits import FactoredMatrix, Head, HookedGPT
from circuits.full_circuits import full_ov, full_qk, singular_directions, top_entries
from circuits.layers import centred, norm_scale
from tests import compiled
from tests.architectures import ARCHITECTURES, NAMES, make

PRE = [n for n, c in ARCHITECTURES.items() if c.norm_placement == "pre"]
LAYER = -1


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def alone(model: HookedGPT, source: str) -> torch.Tensor:
    """Rows of a source as they enter the stream."""
    if source == "position":
        return model.W_pos
    E = model.W_E * model.config.embed_scale
    if source == "mlp0":
        block = model.blocks[0]
        norm = block.ln1 if model.config.parallel_blocks == "shared_norm" else block.ln2
        out = block.mlp((E if norm is None else norm(E))[None], block.names)[0]
        E = E + (out if block.ln2_post is None else block.ln2_post(out))
    return E


def scale_of(model: HookedGPT, x: torch.Tensor) -> torch.Tensor:
    config = model.config
    return torch.ones_like(x[:, :1]) if config.norm is None else norm_scale(x, config.norm, config.norm_eps)


def projected(model: HookedGPT, x: torch.Tensor, head: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of rows that stand alone, as the last block computes them."""
    block, config = model.blocks[LAYER], model.config
    normed = x if block.ln1 is None else block.ln1(x)
    q, k, v = block.attn.project((normed[None],) * 3)
    kv = head // config.group_size
    return q[0, :, head], k[0, :, kv], v[0, :, kv]


def sources_of(name: str) -> list[str]:
    config = ARCHITECTURES[name]
    later = config.has_mlp and config.n_layers > 1
    return ["token"] + ["position"] * (config.positions == "learned") + ["mlp0"] * later


QK_CASES = [(n, s) for n in PRE if not ARCHITECTURES[n].qk_norm for s in sources_of(n)]


@pytest.mark.parametrize(("name", "source"), QK_CASES)
def test_the_full_qk_circuit_and_its_biases_are_the_scores(name, source):
    """At the norm scale of each row: what the model computes for rows that stand alone in the stream."""
    from circuits.head_circuits import turned

    model, head = model_of(name), 1
    offset = 3 if model.config.positions == "rotary" else None
    x, y = alone(model, source), alone(model, "token")
    q, k = projected(model, x, head)[0], projected(model, y, head)[1]
    expected = turned(q, model.config, offset) @ k.T
    found = full_qk(model, model.config.n_layers - 1, head, query=source, offset=offset)
    s, t = scale_of(model, x), scale_of(model, y)
    assert found.scale == model.config.attn_scale
    terms = found.row_term[:, None] / s + found.column_term / t.T + found.constant
    assert_close(found.matrix.AB / (s * t.T) + terms, expected)
    assert_close(found.with_biases().AB, found.matrix.AB + found.row_term[:, None] + found.column_term + found.constant)


@pytest.mark.parametrize("name", [n for n, c in ARCHITECTURES.items() if c.qk_norm])
def test_under_query_and_key_norms_the_circuit_holds_at_frozen_scales(name):
    model, head = model_of(name), 2
    x = alone(model, "token")
    attn, eps = model.blocks[LAYER].attn, model.config.norm_eps
    q, k = projected(model, x, head)[:2]
    q_scale, k_scale = (norm_scale(y, "rmsnorm", eps) for y in (q, k))
    expected = attn.q_norm(q) @ attn.k_norm(k).T
    found = full_qk(model, 1, head)
    s = scale_of(model, x)
    terms = found.row_term[:, None] / s + found.column_term / s.T + found.constant
    assert_close((found.matrix.AB / (s * s.T) + terms) / (q_scale * k_scale.T), expected)
    assert "fixed scales of the query and key norms" in found.note


@pytest.mark.parametrize(("name", "source"), [(n, s) for n in PRE for s in sources_of(n)])
def test_the_full_ov_circuit_is_what_attending_to_a_row_adds_to_the_logits(name, source):
    model, head = model_of(name), 1
    block, config = model.blocks[LAYER], model.config
    x = alone(model, source)
    v = projected(model, x, head)[2]
    written = v @ block.attn.W_O[head]
    if block.ln1_post is not None:
        written = centred(written, config.norm) * block.ln1_post.w
    if model.ln_final is not None:
        written = centred(written, config.norm) * model.ln_final.w
    logits = written @ model.W_U
    found = full_ov(model, config.n_layers - 1, head, source=source)
    s = scale_of(model, x)
    assert_close(found.matrix.AB / s + found.column_term, logits - logits.mean(-1, keepdim=True))


@pytest.mark.parametrize("name", NAMES)
def test_raw_circuits_are_products_of_the_bare_weights(name):
    model = model_of(name)
    layer = model.config.n_layers - 1
    assert_close(full_ov(model, layer, 2, raw=True).matrix.AB, model.W_E @ model.OV[layer, 2].AB @ model.W_U)
    assert_close(full_qk(model, layer, 2, raw=True).matrix.AB, model.W_E @ model.QK[layer, 2].AB @ model.W_E.T)


def test_factors_keep_the_inner_size_d_head():
    found = full_ov(model_of("course"), 1, 0)
    assert (found.matrix.A.shape, found.matrix.B.shape) == ((17, 5), (5, 17))
    assert repr(found).startswith("FullCircuit(OV of L1H0, token 17 × logit 17 through 5")


def test_the_compiled_head_copies_and_looks_for_the_previous_token():
    model = compiled.induction_head()
    found = full_ov(model, 1, 0, raw=True).top_entries(7)
    assert (found.rows == found.columns).all()
    assert set(found.rows.tolist()) == set(range(1, 8))
    assert_close(found.values, torch.full((7,), 10.0, dtype=torch.float64))
    positions = full_qk(model, 0, 0, query="position", key="position", raw=True).top_entries(12)
    assert sorted(zip(positions.rows.tolist(), positions.columns.tolist(), strict=True)) == [
        (p, p - 1) for p in range(1, 13)
    ]


# --- the largest entries ----------------------------------------------------------------------------------------------

KEYS = {"value": lambda x: x, "magnitude": torch.abs, "lowest": torch.neg}


def dense_top(matrix: torch.Tensor, k: int, by: str) -> torch.Tensor:
    return KEYS[by](matrix).flatten().topk(k).values


@pytest.mark.parametrize("by", KEYS)
@pytest.mark.parametrize("shape", [(700, 900, 6), (3, 1100, 2), (1500, 4, 3), (600, 513, 40)])
def test_top_entries_are_those_of_a_dense_search(shape, by, monkeypatch):
    monkeypatch.setattr("circuits.full_circuits.entries._BLOCK_ON_CPU", 2**14)
    m, n, r = shape
    generator = torch.Generator().manual_seed(m + n)
    # Lengths that differ, so that some blocks are never looked at.
    A = torch.randn(m, r, generator=generator, dtype=torch.float64) * torch.rand(m, 1, generator=generator).exp() ** 3
    B = torch.randn(r, n, generator=generator, dtype=torch.float64) * torch.rand(n, generator=generator).exp() ** 3
    found = top_entries(FactoredMatrix(A, B), 57, by)
    dense = A @ B
    assert_close(found.values, dense[found.rows, found.columns])
    assert_close(KEYS[by](found.values), dense_top(dense, 57, by))


def test_the_bound_on_entries_may_be_reached(monkeypatch):
    """Rank one: every entry is as large as the lengths of its row and column allow."""
    monkeypatch.setattr("circuits.full_circuits.entries._BLOCK_ON_CPU", 2**10)
    monkeypatch.setattr("circuits.full_circuits.entries._ROWS", 8)
    generator = torch.Generator().manual_seed(0)
    A = 1 + torch.rand(300, 1, generator=generator, dtype=torch.float64)
    B = 1 + torch.rand(1, 260, generator=generator, dtype=torch.float64)
    found = top_entries(FactoredMatrix(A, B), 4000)
    assert_close(found.values, dense_top(A @ B, 4000, "value"))


@given(st.integers(0, 1000), st.integers(1, 40), st.sampled_from(sorted(KEYS)))
def test_top_entries_of_small_matrices_with_ties_and_zeros(seed, k, by):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randint(-1, 2, (5, 2), generator=generator).double()
    B = torch.randint(-1, 2, (2, 7), generator=generator).double()
    found = top_entries(FactoredMatrix(A, B), k, by)
    assert len(found) == min(k, 35)
    assert len(set(zip(found.rows.tolist(), found.columns.tolist(), strict=True))) == len(found)
    assert_close(KEYS[by](found.values), dense_top(A @ B, len(found), by))


def test_blocks_that_cannot_matter_are_not_computed(monkeypatch):
    from circuits.full_circuits import entries

    seen = []
    original = entries._Search.offer

    def watched(self, block, *place):
        seen.append(block.numel())
        original(self, block, *place)

    monkeypatch.setattr(entries._Search, "offer", watched)
    generator = torch.Generator().manual_seed(0)
    A, B = torch.randn(3000, 4, generator=generator), torch.randn(4, 3000, generator=generator)
    A[:20] *= 100
    top_entries(FactoredMatrix(A, B), 10)
    assert sum(seen) < 3000 * 300


def test_biases_count_in_where_asked_for():
    found = full_qk(model_of("like_gpt2"), 1, 1)
    top = found.top_entries(9, biases=True)
    assert_close(top.values, dense_top(found.with_biases().AB, 9, "value"))
    assert (top.values - found.top_entries(9).values).abs().max() > 1e-3


def test_lower_precision_is_searched_in_float32():
    model = make("like_gpt2", dtype=torch.bfloat16).requires_grad_(False)
    assert full_ov(model, 1, 0).top_entries(3).values.dtype == torch.float32


# --- singular directions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("circuit", ["OV", "QK"])
@pytest.mark.parametrize("name", ["course", "like_llama", "like_gpt2", "like_gemma2"])
def test_directions_read_out_in_tokens_rebuild_the_circuit(name, circuit):
    """All tokens at one end of all directions are all of both sides: U S V over tokens is the full circuit."""
    model = model_of(name)
    found = singular_directions(model, 1, 2, circuit, n=99, tokens=17)

    def side(tokens, values):
        return torch.zeros_like(values[:, 0]).scatter(1, tokens[:, 0], values[:, 0])

    left = side(found.left_tokens, found.left_values)
    right = side(found.right_tokens, found.right_values)
    full = (full_ov if circuit == "OV" else full_qk)(model, 1, 2).matrix.AB
    assert_close(left.T @ (found.singular_values[:, None] * right), full)
    assert (found.left_values[:, 0].diff() <= 0).all()
    assert torch.equal(found.left_tokens[:, 1], found.left_tokens[:, 0].flip(-1))


def test_directions_are_cut_to_what_there_is():
    found = singular_directions(model_of("course"), 0, 1, n=2, tokens=4)
    assert found.left_tokens.shape == found.right_tokens.shape == (2, 2, 4)
    assert singular_directions(model_of("course"), 0, 1, n=50).singular_values.shape == (5,)


# --- bad input
# ---------------------------------------------------------------------------------------------------------


def test_what_does_not_exist_is_refused():
    model = model_of("course")
    with pytest.raises(IndexError, match="L2H0: layer 2 is not in a model of 2 layers"):
        full_ov(model, 2, 0)
    with pytest.raises(IndexError, match="L0H7: head 7 is not in a model of 3 heads"):
        full_qk(model, 0, 7)
    with pytest.raises(IndexError, match="L0H7"):
        singular_directions(model, 0, 7)
    with pytest.raises(ValueError, match="source 'tokens' is not one of 'token', 'position', 'mlp0'"):
        full_ov(model, 0, 0, source="tokens")
    with pytest.raises(ValueError, match="offset 2 means nothing where positions is 'learned'"):
        full_qk(model, 0, 0, offset=2)
    with pytest.raises(ValueError, match="circuit 'VO' is not one of"):
        singular_directions(model, 0, 0, "VO")
    with pytest.raises(ValueError, match="heads of layer 0 read before MLP 0"):
        full_ov(model, 0, 0, source="mlp0")
    with pytest.raises(ValueError, match="positions is 'rotary'"):
        full_ov(model_of("rotary"), 0, 0, source="position")
    with pytest.raises(ValueError, match="attention-only"):
        full_ov(model_of("attn_only"), 1, 0, source="mlp0")
    with pytest.raises(ValueError, match="post-norm"):
        full_ov(model_of("post_norm"), 1, 0, source="mlp0")


def test_a_search_that_cannot_mean_anything_is_refused():
    matrix = full_ov(model_of("course"), 0, 0).matrix
    with pytest.raises(ValueError, match="k must be at least 1, not 0"):
        top_entries(matrix, 0)
    with pytest.raises(ValueError, match="by 'size' is not one of"):
        top_entries(matrix, 3, "size")
    with pytest.raises(ValueError, match=r"expected one matrix \[m n\]"):
        top_entries(model_of("course").OV.stacked(), 3)


@pytest.mark.parametrize("circuit", [full_ov, full_qk])
def test_nan_in_a_weight_is_named(circuit):
    model = make("course").requires_grad_(False)
    model.blocks[1].attn.qkv.weight[:, 6] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight is nan at \[0, 6\] \(45 of"):
        circuit(model, 1, Head(1, 0).head)
