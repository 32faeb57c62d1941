"""The gauge freedom: moving along it changes nothing, the canonical form forgets where one came from, its dimension."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given

from circuits import HookedGPT
from circuits.gauge import FibreDimension, canonical, fibre_dimension, transform_ov, transform_qk
from circuits.layers import rotary_frequencies, rotary_tables, rotate
from tests import compiled
from tests.architectures import ARCHITECTURES, NAMES, SIZES, configs, make
from tests.batches import random_tokens

LAYER, HEAD = -1, 1
FREE = [n for n, c in ARCHITECTURES.items() if c.positions != "rotary" and not c.qk_norm]
ROTARY = [n for n, c in ARCHITECTURES.items() if c.positions == "rotary" and not c.qk_norm]
NORMED = [n for n, c in ARCHITECTURES.items() if c.qk_norm]


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planes_of(config) -> list[tuple[int, int]]:
    half = config.rotary_dim // 2
    if config.rotary_layout == "half":
        return [(i, i + half) for i in range(half)]
    return [(2 * i, 2 * i + 1) for i in range(half)]


def allowed_matrix(config, seed: int = 0) -> torch.Tensor:
    """A random gauge matrix of the QK circuit, built by hand from the definition."""
    R = gaussian(config.d_head, config.d_head, seed=seed)
    if config.positions != "rotary":
        return torch.diag(gaussian(config.d_head, seed=seed).sign()) if config.qk_norm else R
    R[: config.rotary_dim] = 0
    R[:, : config.rotary_dim] = 0
    for plane, (i, j) in enumerate(planes_of(config)):
        a, b = gaussian(2, seed=100 + seed + plane).tolist()
        if config.qk_norm:
            a, b = (-1.0) ** plane, 0.0
        R[i, i], R[j, j], R[i, j], R[j, i] = a, a, b, -b
    return R


def other_gauge(name: str, seed: int) -> HookedGPT:
    """The same function, with other factors in every head."""
    model = model_of(name)
    for layer in range(model.config.n_layers):
        for head in range(0, model.config.n_heads, model.config.group_size):
            model = transform_qk(model, layer, head, allowed_matrix(model.config, seed + 7 * head + layer))
            R = gaussian(model.config.d_head, model.config.d_head, seed=seed + 50 + head + 11 * layer)
            model = transform_ov(model, layer, head, R)
    return model


def logits(model: HookedGPT) -> torch.Tensor:
    with torch.no_grad():
        return model(random_tokens(model.config))


def assert_close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=atol)


# --- moving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_transforming_every_head_leaves_the_logits_alone(name):
    new = other_gauge(name, seed=3)
    assert_close(logits(new), logits(model_of(name)))
    if not new.config.qk_norm:
        assert (new.W_K - model_of(name).W_K).abs().max() > 0.1
    assert (new.W_O - model_of(name).W_O).abs().max() > 0.1


def test_a_transformed_group_shares_its_matrix():
    model = model_of("grouped_query")
    R = gaussian(5, 5, seed=1)
    new = transform_qk(model, 0, 3, R)
    for head in range(6):
        expected = model.blocks[0].attn.W_Q[head] @ R if head in (2, 3) else model.blocks[0].attn.W_Q[head]
        assert_close(new.blocks[0].attn.W_Q[head], expected)
    assert torch.equal(new.blocks[0].attn.W_K[0], model.blocks[0].attn.W_K[0])
    assert_close(new.blocks[0].attn.W_K[1], model.blocks[0].attn.W_K[1] @ torch.linalg.inv(R).T)


@pytest.mark.parametrize("name", ["course", "like_gpt2"])
def test_the_input_is_left_alone_and_shares_nothing(name):
    model = make(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for new in (transform_qk(model, 0, 0, allowed_matrix(model.config)), canonical(model)):
        with torch.no_grad():
            for parameter in new.parameters():
                parameter.fill_(7.0)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("transform", [transform_qk, transform_ov])
def test_a_matrix_that_is_no_gauge_matrix_is_refused(transform):
    model = model_of("course")
    with pytest.raises(ValueError, match=r"expected a gauge matrix R of shape \[5, 5\]"):
        transform(model, 0, 0, torch.eye(4, dtype=torch.float64))
    singular = torch.diag(torch.tensor([1.0, 2, 3, 4, 0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"R is singular: its singular values run from 4 down to 0"):
        transform(model, 0, 0, singular)
    with pytest.raises(ValueError, match="R holds NaN"):
        transform(model, 0, 0, torch.full((5, 5), float("nan")))
    for place, axis in (((2, 0), "layer 2 is not in a model of 2 layers"), ((0, 3), "head 3 is not in a model of 3")):
        with pytest.raises(IndexError, match=axis):
            transform(model, *place, torch.eye(5))


@pytest.mark.parametrize("name", ROTARY + NORMED)
def test_a_matrix_that_would_change_the_scores_is_refused(name):
    model = model_of(name)
    with pytest.raises(ValueError, match=r"does not commute with|must be orthogonal"):
        transform_qk(model, 0, 0, gaussian(model.config.d_head, model.config.d_head, seed=2))


@pytest.mark.parametrize("name", ROTARY)
def test_mixing_two_planes_or_stretching_one_side_of_a_plane_is_refused(name):
    config = model_of(name).config
    (i, j), (k, _) = planes_of(config)[:2]
    for row, column in ((i, k), (i, j), (i, i)):
        R = torch.eye(config.d_head, dtype=torch.float64)
        R[row, column] = 1.3
        with pytest.raises(ValueError, match="does not commute with the rotations of its positions"):
            transform_qk(model_of(name), 0, 0, R)


def test_query_and_key_norms_allow_only_what_their_gains_allow():
    model = make("qk_norm")
    rotation = torch.linalg.qr(gaussian(5, 5, seed=4))[0]
    with pytest.raises(ValueError, match="commute with the gains of the query and key norms"):
        transform_qk(model, 0, 0, rotation)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q_norm.w.fill_(0.7)
            block.attn.k_norm.w.fill_(1.9)
    assert_close(logits(transform_qk(model, 0, 0, rotation)), logits(model))


# --- the canonical form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_canonical_form_is_the_same_function(name):
    assert_close(logits(canonical(model_of(name))), logits(model_of(name)))


@pytest.mark.parametrize("name", NAMES)
def test_the_canonical_form_is_idempotent(name):
    once = canonical(model_of(name))
    for key, tensor in canonical(once).state_dict().items():
        torch.testing.assert_close(tensor, once.state_dict()[key], rtol=0, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_two_gauges_of_one_model_have_one_canonical_form(name):
    expected = canonical(model_of(name)).state_dict()
    other = other_gauge(name, seed=5)
    if other.config.bias_qkv and name in FREE and other.config.attn_softcap is None:
        other = with_other_key_biases(other)
    for key, tensor in canonical(other).state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-8, msg=key)


def with_other_key_biases(model: HookedGPT) -> HookedGPT:
    new = transform_qk(model, 0, 0, torch.eye(model.config.d_head))
    for block in new.blocks:
        block.attn.b_K.add_(1.7)
    return new


@pytest.mark.parametrize("name", [n for n in FREE if ARCHITECTURES[n].bias_qkv])
def test_without_rotary_positions_the_key_bias_changes_no_pattern(name):
    assert_close(logits(with_other_key_biases(model_of(name))), logits(model_of(name)))
    assert not canonical(model_of(name)).b_K.any()


def test_under_a_cap_on_the_scores_the_key_bias_matters_and_is_kept():
    model = make(ARCHITECTURES["soft_caps"].replace(bias_qkv=True)).requires_grad_(False)
    assert (logits(with_other_key_biases(model)) - logits(model)).abs().max() > 1e-3
    assert canonical(model).b_K.any()
    assert_close(logits(canonical(model)), logits(model))


@pytest.mark.parametrize("name", ["course", "grouped_query", "multi_query", "like_gpt2"])
def test_canonical_factors_are_balanced_singular_vectors(name):
    new = canonical(model_of(name))
    size = new.config.group_size
    for block in new.blocks:
        attn = block.attn
        for kv in range(new.config.n_kv_heads):
            heads = range(kv * size, (kv + 1) * size)
            queries = torch.cat([attn.W_Q[h] for h in heads])
            outs = torch.cat([attn.W_O[h].T for h in heads])
            for left, right in ((queries, attn.W_K[kv]), (attn.W_V[kv], outs)):
                s = torch.linalg.svdvals(left @ right.T)[: new.config.d_head]
                assert_close(left.T @ left, torch.diag(s))
                assert_close(right.T @ right, torch.diag(s))
                assert (left.gather(0, left.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("name", ["rotary", "rotary_interleaved", "like_llama"])
def test_canonical_planes_are_balanced_and_in_phase(name):
    new = canonical(model_of(name))
    attn, size = new.blocks[0].attn, new.config.group_size
    queries = torch.cat([attn.W_Q[h] for h in range(size)])
    for i, j in planes_of(new.config):
        q, k = (torch.complex(W[:, i], W[:, j]) for W in (queries, attn.W_K[0]))
        assert_close(q.norm(), k.norm())
        largest = q[q.abs().argmax()]
        assert largest.real > 0
        assert abs(largest.imag) < 1e-12


def test_a_head_of_less_than_full_rank_keeps_what_its_biases_do():
    """W_Q = 0 but b_Q ≠ 0: every query asks for the same, which the product W_QK alone does not show."""
    model = make("all_biases").requires_grad_(False)
    model.blocks[0].attn.W_Q[1].zero_()
    model.blocks[1].attn.W_V[2].zero_()
    model.blocks[1].attn.W_K[0][:, :2] = 0
    assert_close(logits(canonical(model)), logits(model))
    assert_close(canonical(model).QK[0, 1].AB, torch.zeros(7, 7, dtype=torch.float64))


def test_equal_frequencies_form_one_complex_block():
    model = make(ARCHITECTURES["rotary"].replace(rotary_base=1.0)).requires_grad_(False)
    complex_R = torch.complex(gaussian(5, 5, seed=8), gaussian(5, 5, seed=9))
    R = torch.cat(
        [torch.cat([complex_R.real, complex_R.imag], dim=1), torch.cat([-complex_R.imag, complex_R.real], dim=1)]
    )
    other = transform_qk(model, 1, 2, R)
    assert_close(logits(other), logits(model))
    torch.testing.assert_close(canonical(other).W_Q, canonical(model).W_Q, rtol=0, atol=1e-8)
    assert_close(logits(canonical(model)), logits(model))


def test_the_canonical_form_of_the_compiled_induction_head_still_solves_its_task():
    model, tokens = compiled.induction_head(), compiled.tokens(batch=3)
    with torch.no_grad():
        loss = compiled.loss_of(canonical(model)(tokens), tokens)
    torch.testing.assert_close(loss, torch.full_like(loss, compiled.LOSS), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_type_of_the_weights_is_kept(dtype):
    model = make("like_llama", dtype=dtype)
    new = canonical(model)
    assert {p.dtype for p in new.parameters()} == {dtype}
    tolerance = 1e-4 if dtype == torch.float32 else 0.5
    torch.testing.assert_close(logits(new), logits(model), rtol=0, atol=tolerance)


def test_nan_in_a_weight_is_named():
    model = make("course").requires_grad_(False)
    model.blocks[1].attn.W_O[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.out\.weight is nan at \[4, 13\]"):
        canonical(model)


# --- the dimension ---------------------------------------------------------------------------------------------------


def kernel_of_differential(model: HookedGPT, circuit: str) -> int:
    """By the Jacobian of what the weights of one group compute, at enough offsets where positions are rotary."""
    config, size = model.config, model.config.group_size
    attn = model.blocks[LAYER].attn
    kv = HEAD // size
    heads = range(kv * size, (kv + 1) * size)
    if circuit == "QK":
        many, one = torch.cat([attn.W_Q[h] for h in heads]), attn.W_K[kv]
    else:
        many, one = torch.cat([attn.W_O[h].T for h in heads]), attn.W_V[kv]

    def products(many, one):
        if circuit == "OV" or config.positions != "rotary":
            return (many @ one.T).flatten()
        offsets = torch.arange(12) * 3
        cos, sin = rotary_tables(rotary_frequencies(config), offsets, torch.float64)
        return torch.cat(
            [(rotate(many, (c, s), config.rotary_layout) @ one.T).flatten() for c, s in zip(cos, sin, strict=True)]
        )

    jacobian = torch.cat([J.flatten(1) for J in torch.autograd.functional.jacobian(products, (many, one))], dim=1)
    return jacobian.shape[1] - int(torch.linalg.matrix_rank(jacobian))


SOME = ["course", "grouped_query", "multi_query", "rotary_partial", "rotary_interleaved_partial", "rotary_base"]


@pytest.mark.parametrize("circuit", ["QK", "OV"])
@pytest.mark.parametrize("name", SOME)
def test_the_fibre_dimension_is_that_of_the_kernel_of_the_differential(name, circuit):
    model = model_of(name)
    if name.startswith("rotary"):  # d_head 10 on d_model 7 has no full rank; a wider stream has
        model = make(model.config.replace(d_model=11, d_head=8, rotary_dim=min(model.config.rotary_dim, 8)))
        model.requires_grad_(False)
    found = fibre_dimension(model, LAYER, HEAD, circuit)
    assert found.of == "fibre"
    assert found.dimension == kernel_of_differential(model, circuit)
    d_head, rotary_dim = model.config.d_head, model.config.rotary_dim if circuit == "QK" else 0
    assert found.dimension == rotary_dim + (d_head - rotary_dim) ** 2


@pytest.mark.parametrize("circuit", ["QK", "OV"])
def test_factors_of_less_than_full_rank_report_the_kernel_by_name(circuit):
    model = make("course").requires_grad_(False)
    model.blocks[LAYER].attn.W_Q[HEAD][:, :2] = 0
    model.blocks[LAYER].attn.W_O[HEAD][:3] = 0
    a, d_head, d_model = (3 if circuit == "QK" else 2), 5, 15
    found = fibre_dimension(model, LAYER, HEAD, circuit)
    expected = 2 * d_head * d_model - d_model * (a + d_head) + a * d_head
    assert found == FibreDimension(expected, "kernel of the differential")
    assert found.dimension == kernel_of_differential(model, circuit)


def test_the_key_bias_is_further_freedom_where_it_does_not_turn():
    biased = {n: fibre_dimension(model_of(n), 0, 0, "QK").free_key_bias for n in ("like_gpt2", "all_biases", "course")}
    assert biased == {"like_gpt2": 5, "all_biases": 5, "course": 0}
    assert fibre_dimension(model_of("rotary_interleaved_partial"), 0, 0, "QK").free_key_bias == 4


def test_query_and_key_norms_leave_a_finite_freedom_unless_gains_agree():
    model = make("qk_norm").requires_grad_(False)
    assert fibre_dimension(model, 0, 0, "QK").dimension == 0
    model.blocks[0].attn.q_norm.w.fill_(1.0)
    model.blocks[0].attn.k_norm.w.copy_(torch.tensor([2.0, 2, 3, 2, 3]))
    assert fibre_dimension(model, 0, 0, "QK").dimension == 3 + 1
    turning = make("like_qwen3").requires_grad_(False)
    assert fibre_dimension(turning, 0, 0, "QK").dimension == 0
    turning.blocks[0].attn.q_norm.w.fill_(1.0)
    turning.blocks[0].attn.k_norm.w.fill_(1.0)
    assert fibre_dimension(turning, 0, 0, "QK").dimension == SIZES["d_head"]


def test_an_unknown_circuit_is_refused():
    with pytest.raises(ValueError, match="circuit 'QV' is not one of 'QK', 'OV'"):
        fibre_dimension(model_of("course"), 0, 0, "QV")


@given(configs())
def test_the_canonical_form_keeps_every_combination_and_is_idempotent(config):
    model = make(config).requires_grad_(False)
    tokens = random_tokens(config, batch=2, pos=5)
    once = canonical(model)
    with torch.no_grad():
        torch.testing.assert_close(once(tokens), model(tokens), rtol=1e-8, atol=1e-8)
    twice = canonical(once).state_dict()
    for key, tensor in once.state_dict().items():
        torch.testing.assert_close(twice[key], tensor, rtol=0, atol=1e-10, msg=key)
