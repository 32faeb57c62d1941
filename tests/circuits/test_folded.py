"""What is read into the weights on the fly is what the model does at its own scales, on every architecture."""

import architectures
import pytest
import torch

from circuits.folded import embedding, head_weights, readers_centre, unembedding
from circuits.layers import norm_scale

PRE = [n for n in architectures.NAMES if architectures.SPECS[n].get("norm_placement") != "post"]


def run(name):
    model = architectures.make(name)
    tokens = torch.randint(17, (4, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=lambda name: True)
    return model, tokens, logits, cache


def affine_part(model, layer, bias, W):
    """What is not linear in the stream: the map's own bias and the norm's shift."""
    shift = 0 if bias is None else bias.repeat_interleave(model.config.n_heads // len(bias), 0)
    norm = model.blocks[layer].ln1
    if norm is None or norm.b is None:
        return shift
    return shift + torch.einsum("d,hde->he", norm.b, W)


def per_query_head(model, x):
    return x.repeat_interleave(model.config.n_heads // x.shape[2], 2)


@pytest.mark.parametrize("name", [name for name in PRE if not architectures.config(name).qk_norm])
def test_queries_keys_and_values_are_linear_in_the_stream_at_its_scale(name):
    model, _, _, cache = run(name)
    weights = head_weights(model)
    for layer in range(model.config.n_layers):
        stream = cache["resid_pre", layer]
        if model.config.norm is not None:
            stream = stream / cache["scale", layer, "ln1"]
        attn = model.blocks[layer].attn
        for part, bias in (("q", attn.b_Q), ("k", attn.b_K), ("v", attn.b_V)):
            folded = getattr(weights, f"W_{part.upper()}")[layer]
            raw = getattr(model, f"W_{part.upper()}")[layer]
            expected = torch.einsum("bpd,hde->bphe", stream, folded) + affine_part(model, layer, bias, raw)
            found = per_query_head(model, cache[part, layer])
            assert torch.allclose(found, expected, atol=1e-9), (layer, part)


@pytest.mark.parametrize("name", ["qk_norm", "like_qwen3"])
def test_gains_of_query_and_key_norms_are_read_in(name):
    model, _, _, cache = run(name)
    weights = head_weights(model)
    for layer in range(model.config.n_layers):
        stream = cache["resid_pre", layer] / cache["scale", layer, "ln1"]
        attn = model.blocks[layer].attn
        for part, norm, bias in (("q", attn.q_norm, attn.b_Q), ("k", attn.k_norm, attn.b_K)):
            constant = affine_part(model, layer, bias, getattr(model, f"W_{part.upper()}")[layer]) * norm.w
            folded = getattr(weights, f"W_{part.upper()}")[layer]
            scale = norm_scale(per_query_head(model, cache[part, layer]), "rmsnorm", norm.eps)
            expected = (torch.einsum("bpd,hde->bphe", stream, folded) + constant) / scale
            assert torch.allclose(norm(per_query_head(model, cache[part, layer])), expected, atol=1e-9)
    assert "fixed scales" in weights.note


@pytest.mark.parametrize("name", [name for name in PRE if architectures.config(name).logit_softcap is None])
def test_probabilities_are_linear_in_the_final_stream_at_its_scale(name):
    model, _, logits, cache = run(name)
    stream = cache["resid_post", -1]
    constant = model.b_U
    if model.config.final_norm:
        stream = stream / cache["ln_final.hook_scale"]
        constant = constant + (0 if model.ln_final.b is None else model.ln_final.b @ model.W_U)
    expected = (stream @ unembedding(model) + constant).log_softmax(-1)
    assert torch.allclose(logits.log_softmax(-1), expected, atol=1e-9)


@pytest.mark.parametrize("name", PRE)
def test_the_mean_of_a_write_matters_to_nobody_where_it_is_taken_off(name):
    model, tokens, logits, _ = run(name)

    def centre(activation, hook):
        return activation - activation.mean(-1, keepdim=True)

    centred = model.run_with_hooks(tokens, [(["hook_embed", "blocks.0.hook_attn_out"], centre)])
    assert torch.allclose(centred, logits, atol=1e-9) is readers_centre(model.config)
    writes = head_weights(model).W_O.sum(-1).abs().max() + embedding(model).sum(-1).abs().max()
    assert bool(writes < 1e-10) is readers_centre(model.config)


@pytest.mark.parametrize("name", [n for n in PRE if architectures.SPECS[n].get("branch_norm")])
def test_writes_go_through_the_norm_on_the_branch(name):
    model, _, _, cache = run(name)
    W_O = head_weights(model).W_O
    for layer, block in enumerate(model.blocks):
        scale = cache[block.names.ln1_post_scale]
        total = torch.einsum("bphe,hed->bpd", cache["z", layer], W_O[layer]) / scale
        bias = 0 if block.attn.b_O is None else block.attn.b_O
        if model.config.norm == "layernorm" and block.attn.b_O is not None:
            bias = bias - bias.mean()
        rest = block.ln1_post.w * bias / scale + (0 if block.ln1_post.b is None else block.ln1_post.b)
        expected = cache["attn_out", layer]
        if readers_centre(model.config):
            total, rest, expected = (x - x.mean(-1, keepdim=True) for x in (total, rest, expected))
        assert torch.allclose(total + rest, expected, atol=1e-9)


@pytest.mark.parametrize("name", architectures.NAMES)
def test_raw_weights_are_the_models_own(name):
    model = architectures.make(name)
    weights = head_weights(model, raw=True)
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(weights, part), getattr(model, part))
    assert torch.equal(unembedding(model, raw=True), model.W_U)
    assert torch.equal(weights.QK.AB, model.QK.AB)
    assert torch.equal(weights.OV.AB, model.OV.AB)


@pytest.mark.parametrize("name", [n for n in architectures.NAMES if n not in PRE])
def test_post_norm_heads_read_and_write_the_stream_itself(name):
    model = architectures.make(name)
    weights = head_weights(model)
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        assert torch.equal(getattr(weights, part), getattr(model, part))
    assert "post-norm" in weights.note


def test_the_offset_turns_rotary_queries_and_is_refused_elsewhere():
    model = architectures.make("rotary")
    assert torch.allclose(head_weights(model, raw=True, offset=3).QK.AB, model.QK.at_offset(3).AB, atol=1e-12)
    assert head_weights(model, offset=3).offset == 3
    assert not torch.allclose(head_weights(model, offset=3).QK.AB, head_weights(model).QK.AB, atol=1e-3)
    with pytest.raises(ValueError, match="offset 3 means nothing where positions is 'learned'"):
        head_weights(architectures.make("course"), offset=3)


def test_sixteen_bit_weights_are_folded_in_float32():
    model = architectures.make("course", dtype=torch.bfloat16)
    assert head_weights(model).W_Q.dtype == torch.float32
    assert unembedding(model).dtype == torch.float32


def test_folding_changes_no_weight_of_the_model():
    model = architectures.make("like_gemma2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    head_weights(model), unembedding(model), embedding(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_unembedding_is_centred_over_the_vocabulary_unless_raw():
    model = architectures.make("course")
    assert unembedding(model).sum(-1).abs().max() < 1e-12
    assert unembedding(model, raw=True).sum(-1).abs().max() > 0.1
