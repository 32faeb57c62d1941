"""What must add up inside a forward pass, over every architecture."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F

from circuits import HookedGPT
from tests.architectures import ARCHITECTURES, NAMES, make
from tests.batches import POS, random_tokens
from tests.exactly import assert_exact


def names_where(condition) -> list[str]:
    return [name for name, config in ARCHITECTURES.items() if condition(config)]


def over(names):
    return pytest.mark.parametrize("name", names)


POST = names_where(lambda c: c.norm_placement == "post")
PARALLEL = names_where(lambda c: c.parallel_blocks)
SEQUENTIAL = [name for name in NAMES if name not in POST + PARALLEL]
BRANCH_NORM = names_where(lambda c: c.branch_norm)
WITH_MLP = names_where(lambda c: c.has_mlp)


@functools.cache
def model_of(name: str) -> HookedGPT:
    return make(name).requires_grad_(False)


@functools.cache
def run_of(name: str):
    """Model, tokens, logits, and every activation."""
    model = model_of(name)
    tokens = random_tokens(model.config)
    return model, tokens, *model.run_with_cache(tokens, names_filter=lambda _: True)


def layers_of(name: str):
    """(prefix, block) of each layer."""
    return [(f"blocks.{layer}.", block) for layer, block in enumerate(model_of(name).blocks)]


def normed(norm, x: torch.Tensor, eps: float) -> torch.Tensor:
    if norm.b is None:
        return F.rms_norm(x, x.shape[-1:], norm.w, eps)
    return F.layer_norm(x, x.shape[-1:], norm.w, norm.b, eps)


# --- the residual stream --------------------------------------------------------------------------------------------


@over(NAMES)
def test_embeddings_sum_to_the_first_stream(name: str) -> None:
    _, _, _, cache = run_of(name)
    total = cache["hook_embed"]
    if "hook_pos_embed" in cache:
        total = total + cache["hook_pos_embed"]
    assert_exact(cache["blocks.0.hook_resid_pre"], total)


@over(NAMES)
def test_each_stream_enters_the_next_block_unchanged(name: str) -> None:
    model, _, _, cache = run_of(name)
    for layer in range(1, model.config.n_layers):
        assert torch.equal(cache["resid_pre", layer], cache["resid_post", layer - 1])


@over(SEQUENTIAL)
def test_branches_add_to_the_stream_one_after_the_other(name: str) -> None:
    _, _, _, cache = run_of(name)
    for at, block in layers_of(name):
        after_attention = cache[at + "hook_resid_pre"] + cache[at + "hook_attn_out"]
        if block.mlp is None:
            assert at + "hook_resid_mid" not in cache
            assert_exact(cache[at + "hook_resid_post"], after_attention)
        else:
            assert_exact(cache[at + "hook_resid_mid"], after_attention)
            assert_exact(cache[at + "hook_resid_post"], cache[at + "hook_resid_mid"] + cache[at + "hook_mlp_out"])


@over(PARALLEL)
def test_parallel_branches_add_to_the_same_stream(name: str) -> None:
    _, _, _, cache = run_of(name)
    for at, _ in layers_of(name):
        assert at + "hook_resid_mid" not in cache
        total = cache[at + "hook_resid_pre"] + cache[at + "hook_attn_out"] + cache[at + "hook_mlp_out"]
        assert_exact(cache[at + "hook_resid_post"], total)


@over(POST)
def test_post_norm_normalises_the_stream_after_each_addition(name: str) -> None:
    model, _, _, cache = run_of(name)
    eps = model.config.norm_eps
    for at, block in layers_of(name):
        middle = normed(block.ln1, cache[at + "hook_resid_pre"] + cache[at + "hook_attn_out"], eps)
        if block.mlp is None:
            assert_exact(cache[at + "hook_resid_post"], middle)
        else:
            assert_exact(cache[at + "hook_resid_mid"], middle)
            expected = normed(block.ln2, cache[at + "hook_resid_mid"] + cache[at + "hook_mlp_out"], eps)
            assert_exact(cache[at + "hook_resid_post"], expected)


@over(NAMES)
def test_logits_are_the_last_stream_normalised_and_unembedded(name: str) -> None:
    model, _, logits, cache = run_of(name)
    config = model.config
    stream = cache["resid_post", -1]
    if config.final_norm:
        stream = normed(model.ln_final, stream, config.norm_eps)
    expected = stream @ model.W_U + model.b_U
    if config.logit_softcap is not None:
        expected = config.logit_softcap * torch.tanh(expected / config.logit_softcap)
    assert_exact(logits, expected)


# --- attention and the MLP ------------------------------------------------------------------------------------------


@over([name for name in NAMES if name not in BRANCH_NORM])
def test_head_results_and_bias_sum_to_attn_out(name: str) -> None:
    _, _, _, cache = run_of(name)
    for at, block in layers_of(name):
        total = cache[at + "attn.hook_result"].sum(2)
        assert_exact(cache[at + "hook_attn_out"], total if block.attn.b_O is None else total + block.attn.b_O)


@over(BRANCH_NORM)
def test_what_branches_add_is_normalised_with_a_scale_that_is_shown(name: str) -> None:
    model, _, _, cache = run_of(name)
    for at, block in layers_of(name):
        heads = cache[at + "attn.hook_result"].sum(2)
        total = heads if block.attn.b_O is None else heads + block.attn.b_O
        assert_exact(cache[at + "hook_attn_out"], normed(block.ln1_post, total, model.config.norm_eps))
        if model.config.norm == "rmsnorm" and block.attn.b_O is None:
            # A head's write is γ ⊙ result / scale, and the writes add up to what is added.
            writes = cache[at + "attn.hook_result"] / cache[at + "ln1_post.hook_scale"][:, :, None]
            assert_exact(cache[at + "hook_attn_out"], (block.ln1_post.w * writes).sum(2))
        if block.mlp is not None:
            out = cache[at + "mlp.hook_post"] @ block.mlp.W_out
            out = out if block.mlp.b_out is None else out + block.mlp.b_out
            assert_exact(cache[at + "hook_mlp_out"], normed(block.ln2_post, out, model.config.norm_eps))


@over(NAMES)
def test_results_are_z_through_each_heads_output_map(name: str) -> None:
    _, _, _, cache = run_of(name)
    for at, block in layers_of(name):
        expected = torch.einsum("bphe,hed->bphd", cache[at + "attn.hook_z"], block.attn.W_O)
        assert_exact(cache[at + "attn.hook_result"], expected)


@over(NAMES)
def test_z_is_the_pattern_applied_to_the_values_of_the_heads_group(name: str) -> None:
    model, _, _, cache = run_of(name)
    for at, _ in layers_of(name):
        for head in range(model.config.n_heads):
            values = cache[at + "attn.hook_v"][:, :, head // model.config.group_size]
            assert_exact(cache[at + "attn.hook_z"][:, :, head], cache[at + "attn.hook_pattern"][:, head] @ values)


@over(NAMES)
def test_pattern_is_the_softmax_of_masked_scores(name: str) -> None:
    model, _, _, cache = run_of(name)
    query, key = torch.arange(POS)[:, None], torch.arange(POS)
    for layer, (at, _) in enumerate(layers_of(name)):
        scores, pattern = cache[at + "attn.hook_attn_scores"], cache[at + "attn.hook_pattern"]
        window = model.config.window[layer] or POS
        unseen = (key > query) | (key <= query - window)
        assert torch.equal(scores == -torch.inf, unseen.expand_as(scores))
        assert_exact(pattern, scores.softmax(-1))
        assert_exact(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


@over(NAMES)
def test_scores_are_scaled_products_of_what_the_hooks_show(name: str) -> None:
    model, _, _, cache = run_of(name)
    config = model.config
    for at, block in layers_of(name):
        q, k = cache[at + "attn.hook_q"], cache[at + "attn.hook_k"]
        if config.qk_norm:
            q = cache[at + "attn.q_norm.hook_normalized"] * block.attn.q_norm.w
            k = cache[at + "attn.k_norm.hook_normalized"] * block.attn.k_norm.w
        if config.positions == "rotary":
            q, k = cache[at + "attn.hook_rot_q"], cache[at + "attn.hook_rot_k"]
        k = k.repeat_interleave(config.group_size, dim=2)
        expected = config.attn_scale * torch.einsum("bqhe,bkhe->bhqk", q, k)
        if config.attn_softcap is not None:
            expected = config.attn_softcap * torch.tanh(expected / config.attn_softcap)
        scores = cache[at + "attn.hook_attn_scores"]
        seen = scores > -torch.inf
        assert_exact(scores[seen], expected[seen])


@over([name for name in WITH_MLP if name not in BRANCH_NORM])
def test_neurons_and_bias_sum_to_mlp_out(name: str) -> None:
    _, _, _, cache = run_of(name)
    for at, block in layers_of(name):
        total = sum(
            cache[at + "mlp.hook_post"][..., n, None] * block.mlp.W_out[n] for n in range(block.mlp.W_out.shape[0])
        )
        assert_exact(cache[at + "hook_mlp_out"], total if block.mlp.b_out is None else total + block.mlp.b_out)


@over(names_where(lambda c: c.norm is not None))
def test_a_norm_is_its_input_centred_over_the_scale_it_shows(name: str) -> None:
    model, _, _, cache = run_of(name)
    config = model.config
    for at, _ in layers_of(name):
        x = cache[at + "hook_resid_pre"]
        if config.norm_placement == "post":
            x = x + cache[at + "hook_attn_out"]
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        assert_exact(cache[at + "ln1.hook_scale"], (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt())
        assert_exact(cache[at + "ln1.hook_normalized"] * cache[at + "ln1.hook_scale"], x)


@over(NAMES)
def test_split_inputs_are_copies_of_the_stream_before_the_norm(name: str) -> None:
    model, _, _, cache = run_of(name)
    config = model.config
    for at, _ in layers_of(name):
        for which, heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads)):
            expected = cache[at + "hook_resid_pre"][:, :, None].expand(-1, -1, heads, -1)
            assert torch.equal(cache[f"{at}hook_{which}_input"], expected)
        if config.has_mlp:
            source = "hook_resid_mid" if config.has_resid_mid else "hook_resid_pre"
            assert torch.equal(cache[at + "hook_mlp_in"], cache[at + source])


@over(names_where(lambda c: c.positions != "rotary" and not (c.qk_norm or c.bias_qkv or c.attn_softcap)))
def test_scores_are_a_bilinear_form_of_what_attention_reads(name: str) -> None:
    model, _, _, cache = run_of(name)
    for layer, (at, block) in enumerate(layers_of(name)):
        read = cache[at + "hook_resid_pre"]
        if model.config.norm is not None and model.config.norm_placement == "pre":
            read = normed(block.ln1, read, model.config.norm_eps)
        for head in range(model.config.n_heads):
            expected = model.config.attn_scale * read @ (model.W_Q[layer, head] @ model.W_K[layer, head].T) @ read.mT
            scores = cache[at + "attn.hook_attn_scores"][:, head]
            seen = scores > -torch.inf
            assert_exact(scores[seen], expected[seen])


@pytest.mark.parametrize("name", ["course", "tied", "all_biases"])
def test_unembed_of_the_normalised_stream_is_the_logits(name) -> None:
    model = make(name).requires_grad_(False)
    logits, cache = model.run_with_cache(random_tokens(model.config))
    normalised = model.ln_final.affine(cache["ln_final.hook_normalized"])
    torch.testing.assert_close(model.unembed(normalised), logits, rtol=1e-10, atol=1e-10)
