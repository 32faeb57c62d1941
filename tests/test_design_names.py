"""The names that other people's code relies on: each importable where it is promised, and called once as promised.

The lists are written out by hand, not derived from the packages, so that a name cannot change without this file.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch

from tests.architectures import NAMES, config, make
from tests.batches import random_tokens

PUBLIC = {
    "circuits": "GPTConfig HookedGPT ActivationCache FactoredMatrix load save "
    "Embed PosEmbed Head AttnBias MLP Neuron Attn Block",
    "circuits.components": "ValueBias NormBias UnembedBias MLPBias",
    "circuits.residual": "decompose direct_logit_attribution",
    "circuits.paths": "expand_paths",
    "circuits.processing": "fold_ln center_writing_weights center_unembed fold_value_biases",
    "circuits.gauge": "transform_qk transform_ov canonical",
    "analysis": "parameter_table flops head_ranks copying_scores composition_scores head_scores attention_patterns "
    "ablate activation_patch verify",
}

CONFIG_DEFAULTS = {
    **dict.fromkeys(("d_head", "d_mlp", "n_kv_heads", "rotary_dim", "final_norm")),
    "act": "gelu",
    "gated_mlp": False,
    "attn_only": False,
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "norm_placement": "pre",
    "positions": "learned",
    "rotary_base": 10_000.0,
    "rotary_layout": "half",
    "parallel_blocks": False,
    "bias_qkv": False,
    "bias_out": True,
    "bias_mlp": True,
    "bias_unembed": False,
    "tie_embeddings": False,
}
REQUIRED = {"n_layers", "d_model", "n_heads", "n_ctx", "d_vocab"}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_promised_name_is_importable_and_documented(module: str) -> None:
    home = importlib.import_module(module)
    for name in PUBLIC[module].split():
        assert inspect.getdoc(getattr(home, name)), name


def test_config_has_the_promised_fields_and_defaults() -> None:
    from circuits import GPTConfig

    fields = {field.name: field.default for field in dataclasses.fields(GPTConfig)}
    assert {name for name, default in fields.items() if default is dataclasses.MISSING} == REQUIRED
    assert {name: fields[name] for name in CONFIG_DEFAULTS} == CONFIG_DEFAULTS
    course = GPTConfig.course()
    sizes = (course.d_vocab, course.n_ctx, course.d_model, course.n_heads, course.n_layers)
    assert sizes == (65, 64, 128, 4, 4)


def test_fields_beyond_the_promised_ones_are_neutral_by_default() -> None:
    """q/k norms, soft caps, windows, a scale on the embedding, rotary scaling, norms on a branch's output."""
    from circuits import GPTConfig

    config = GPTConfig(n_layers=3, d_model=6, n_heads=2, n_ctx=5, d_vocab=7, positions="rotary", d_head=4)
    assert (config.qk_norm, config.branch_norm, config.rotary_scaling) == (False, False, None)
    assert (config.attn_softcap, config.logit_softcap, config.embed_scale) == (None, None, 1.0)
    assert config.window == (None, None, None)
    assert config.attn_scale == 0.5
    assert set(CONFIG_DEFAULTS) | REQUIRED | {
        "qk_norm",
        "branch_norm",
        "rotary_scaling",
        "attn_softcap",
        "logit_softcap",
        "embed_scale",
        "window",
        "attn_scale",
    } == {field.name for field in dataclasses.fields(GPTConfig)}


@pytest.fixture(scope="module")
def model() -> Any:
    from circuits import GPTConfig, HookedGPT

    return HookedGPT(
        GPTConfig(n_layers=2, d_model=7, n_heads=3, d_head=5, d_mlp=11, n_ctx=13, d_vocab=17), seed=0
    ).double()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_the_model_answers_every_promised_call(model: Any, tokens: torch.Tensor) -> None:
    logits = model(tokens)
    assert logits.shape == (4, 9, 17)
    assert model(tokens, attention_mask=torch.ones_like(tokens)).shape == logits.shape
    assert model.loss(tokens, per_token=False).ndim == 0
    assert model.loss(tokens, per_token=True).shape == (4, 8)
    assert model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: None)]).equal(logits)
    zero = [(lambda name: name.endswith("hook_z"), lambda z, hook: torch.zeros_like(z))]
    with model.hooks(fwd_hooks=zero):
        assert not model(tokens).equal(logits)
    assert model(tokens).equal(logits)
    assert "blocks.1.attn.hook_pattern" in model.hook_names


@torch.no_grad()
def test_the_cache_answers_every_promised_key(model: Any, tokens: torch.Tensor) -> None:
    from circuits import ActivationCache

    name = "blocks.0.attn.hook_pattern"
    for names_filter in (None, name, [name], lambda n: n == name):
        _, cache = model.run_with_cache(tokens, names_filter=names_filter)
        assert isinstance(cache, ActivationCache)
        assert cache[name] is cache["pattern", 0]
        assert cache[name].shape == (4, 3, 9, 9)
    _, cache = model.run_with_cache(tokens)
    assert cache["resid_post", -1] is cache["blocks.1.hook_resid_post"]


def test_text_goes_to_tokens_and_back_where_there_is_a_tokenizer(tmp_path: Any) -> None:
    from circuits import load, save

    bundled = load("shakespeare")
    ids = bundled.to_tokens("First")
    assert ids.shape == (1, 5)
    assert bundled.to_string(ids) == "First"
    assert bundled.to_str_tokens("First") == list("First")
    save(bundled, tmp_path / "again.safetensors")
    assert load(tmp_path / "again.safetensors").to_tokens("First").equal(ids)


def test_factored_matrices_answer_every_promised_name(model: Any) -> None:
    from circuits import FactoredMatrix

    F = model.OV[1, 2]
    assert isinstance(F, FactoredMatrix)
    dense = F.A @ F.B
    assert F.shape == F.AB.shape == dense.shape == (7, 7)
    assert F.T.AB.allclose(dense.T)
    U, S, Vh = F.svd()
    assert (U @ torch.diag(S) @ Vh).allclose(dense)
    assert F.singular_values().shape == F.eigenvalues().shape == (5,)
    assert F.norm().allclose(dense.norm())
    assert F.trace().allclose(dense.trace())
    assert int(F.rank()) == 5
    for combined, expected in (
        (F @ F, dense @ dense),
        (F * 2, dense * 2),
        (2 * F, dense * 2),
        (F + F, 2 * dense),
        (F - 2 * F, -dense),
    ):
        assert combined.AB.allclose(expected)
    assert F[0, -1].allclose(dense[0, -1])


@torch.no_grad()
def test_decompositions_and_processing_answer(model: Any, tokens: torch.Tensor) -> None:
    from circuits.gauge import canonical, transform_ov, transform_qk
    from circuits.paths import expand_paths
    from circuits.processing import center_unembed, center_writing_weights, fold_ln, fold_value_biases
    from circuits.residual import decompose, direct_logit_attribution

    logits, cache = model.run_with_cache(tokens)
    lead = logits[:, -1, 3] - logits[:, -1, 4]
    decompose(model, cache)
    assert direct_logit_attribution(model, cache, 3, 4).total.allclose(lead)
    one = model.run_with_cache(tokens[:1])[1]
    assert expand_paths(model, one, 3, 4).total.allclose(lead[0])
    R = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
    changed = [transform_qk(model, 0, 1, R), transform_ov(model, 1, 2, R), canonical(model)]
    changed += [step(model) for step in (fold_ln, center_writing_weights, center_unembed, fold_value_biases)]
    for other in changed:
        assert other is not model
        assert other(tokens).log_softmax(-1).allclose(logits.log_softmax(-1), atol=1e-10)


def test_measurements_answer_with_tidy_frames(model: Any, tokens: torch.Tensor) -> None:
    import analysis

    other = (tokens + 1) % 17
    results = [
        analysis.parameter_table(model.config),
        analysis.flops(model.config),
        analysis.head_ranks(model),
        analysis.copying_scores(model),
        analysis.composition_scores(model, "K"),
        analysis.head_scores(model),
        analysis.attention_patterns(model, tokens),
        analysis.ablate(model, tokens),
        analysis.activation_patch(model, tokens, other, "resid_pre", metric="loss"),
        analysis.verify(model),
    ]
    for result in results:
        assert dataclasses.is_dataclass(result)
        assert len(result.to_frame()) > 0
        assert repr(result)


def _expected_shapes(c: Any, batch: int, pos: int) -> dict[str, tuple[int, ...]]:
    """The vocabulary of hooks, written out: name -> shape, for an architecture of this config."""
    stream, one = (batch, pos, c.d_model), (batch, pos, 1)
    heads, kv_heads = (batch, pos, c.n_heads, c.d_head), (batch, pos, c.n_kv_heads, c.d_head)
    square, hidden = (batch, c.n_heads, pos, pos), (batch, pos, c.d_mlp)
    shapes = {"hook_embed": stream}
    if c.positions == "learned":
        shapes["hook_pos_embed"] = stream
    for layer in range(c.n_layers):
        names = {"hook_resid_pre": stream, "hook_attn_out": stream, "hook_resid_post": stream}
        names |= {"hook_q_input": (batch, pos, c.n_heads, c.d_model)}
        names |= {f"hook_{x}_input": (batch, pos, c.n_kv_heads, c.d_model) for x in "kv"}
        names |= {"attn.hook_q": heads, "attn.hook_k": kv_heads, "attn.hook_v": kv_heads, "attn.hook_z": heads}
        names |= {"attn.hook_attn_scores": square, "attn.hook_pattern": square}
        names |= {"attn.hook_result": (batch, pos, c.n_heads, c.d_model)}
        if c.positions == "rotary":
            names |= {"attn.hook_rot_q": heads, "attn.hook_rot_k": kv_heads}
        if c.norm:
            names |= {"ln1.hook_scale": one, "ln1.hook_normalized": stream}
        if not c.attn_only:
            names |= {"hook_mlp_in": stream, "mlp.hook_pre": hidden, "mlp.hook_post": hidden, "hook_mlp_out": stream}
            if c.gated_mlp:
                names["mlp.hook_pre_linear"] = hidden
            if not c.parallel_blocks:
                names["hook_resid_mid"] = stream
            if c.norm and c.parallel_blocks != "shared_norm":
                names |= {"ln2.hook_scale": one, "ln2.hook_normalized": stream}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in names.items()}
    if c.final_norm:
        shapes |= {"ln_final.hook_scale": one, "ln_final.hook_normalized": stream}
    return shapes


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_hook_of_the_vocabulary_is_there_with_its_shape(name: str) -> None:
    model, c = make(name), config(name)
    _, cache = model.run_with_cache(random_tokens(c, batch=4, pos=13), lambda _: True)
    shapes = {key: tuple(value.shape) for key, value in cache.items()}
    expected = _expected_shapes(c, 4, 13)
    assert {key: shapes.get(key) for key in expected} == expected
    # What is there beyond the vocabulary: the norms of queries, keys and of a branch's output.
    assert all(any(part in key for part in ("_norm.hook", "_post.hook")) for key in set(shapes) - set(expected))


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_of_the_vocabulary_is_there_with_its_shape(name: str) -> None:
    model, c = make(name), config(name)
    L, H, d, h, m, V = c.n_layers, c.n_heads, c.d_model, c.d_head, c.d_mlp, c.d_vocab
    expected = {"W_E": (V, d), "W_U": (d, V), "b_U": (V,), "W_O": (L, H, h, d), "b_O": (L, d)}
    expected |= dict.fromkeys(("W_Q", "W_K", "W_V"), (L, H, d, h))
    expected |= dict.fromkeys(("b_Q", "b_K", "b_V"), (L, H, h))
    expected |= dict.fromkeys(("QK", "OV", "W_QK", "W_OV"), (L, H, d, d))
    if c.positions == "learned":
        expected["W_pos"] = (c.n_ctx, d)
    if not c.attn_only:
        expected |= {"W_in": (L, d, m), "b_in": (L, m), "W_out": (L, m, d), "b_out": (L, d)}
    if c.gated_mlp:
        expected["W_gate"] = (L, d, m)
    assert {name: tuple(getattr(model, name).shape) for name in expected} == expected
    attn = model.blocks[-1].attn
    stored = {name: tuple(getattr(attn, name).shape) for name in ("W_Q", "W_K", "W_V", "W_O")}
    assert stored == {"W_Q": (H, d, h), **dict.fromkeys(("W_K", "W_V"), (c.n_kv_heads, d, h)), "W_O": (H, h, d)}
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert getattr(attn, name).untyped_storage().data_ptr() in {
            p.untyped_storage().data_ptr() for p in attn.parameters()
        }
