"""GGUF files: the container, the tokenizers, and the weights, against files written by the gguf package."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from circuits import GPTConfig, HookedGPT, load
from circuits.config import RotaryScaling
from circuits.layers import rotary_frequencies
from circuits.pretrained.fields import UnsupportedModel
from circuits.pretrained.gguf_file import GGUFFile
from circuits.pretrained.gguf_tokenizer import merges_of_scores, tokenizer_of

SIZES = {"n_layers": 3, "d_model": 32, "n_heads": 6, "d_head": 16, "n_ctx": 19, "d_vocab": 37, "d_mlp": 64}
LLAMA = GPTConfig(
    **SIZES, n_kv_heads=2, norm="rmsnorm", norm_eps=1e-6, positions="rotary", rotary_base=700.0, act="silu",
    gated_mlp=True, bias_out=False, bias_mlp=False,
)  # fmt: skip
GPT2 = GPTConfig(**{**SIZES, "d_head": 8, "n_heads": 4}, act="gelu_new", bias_qkv=True, tie_embeddings=True)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def filled(config, seed=0):
    model = HookedGPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def permuted(weight, n_heads):
    """llama.cpp's `permute`, written as its converter writes it."""
    w = weight.detach().numpy()
    w = w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(w.reshape(weight.shape))


def llama_arrays(model):
    config, state = model.config, {n: t.detach() for n, t in model.state_dict().items()}
    arrays = {"token_embd.weight": state["embed.weight"], "output_norm.weight": state["ln_final.w"]}
    if "unembed.weight" in state:
        arrays["output.weight"] = state["unembed.weight"]
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}.", f"blk.{layer}."
        q, k, v = state[ours + "attn.qkv.weight"].split([96, 32, 32])
        arrays[theirs + "attn_q.weight"] = permuted(q, config.n_heads)
        arrays[theirs + "attn_k.weight"] = permuted(k, config.n_kv_heads)
        arrays[theirs + "attn_v.weight"] = v
        arrays[theirs + "attn_output.weight"] = state[ours + "attn.out.weight"]
        arrays[theirs + "attn_norm.weight"] = state[ours + "ln1.w"]
        arrays[theirs + "ffn_norm.weight"] = state[ours + "ln2.w"]
        for a in ("up", "gate", "down"):
            arrays[theirs + f"ffn_{a}.weight"] = state[ours + f"mlp.{a}.weight"]
    return {name: np.ascontiguousarray(np.asarray(array)) for name, array in arrays.items()}


def gpt2_arrays(model):
    renamed = {"ln1": "attn_norm", "ln2": "ffn_norm", "attn.qkv": "attn_qkv", "attn.out": "attn_output"}
    renamed |= {"mlp.up": "ffn_up", "mlp.down": "ffn_down", "embed": "token_embd", "pos_embed": "position_embd"}
    arrays = {}
    for name, tensor in model.state_dict().items():
        stem, _, part = name.rpartition(".")
        block, layer, rest = stem.split(".", 2) if stem.startswith("blocks") else ("", "", stem)
        prefix = f"blk.{layer}." if block else ""
        part = {"w": "weight", "b": "bias"}.get(part, part)
        arrays[f"{prefix}{renamed.get(rest, 'output_norm')}.{part}"] = tensor.detach().numpy()
    return arrays


def write(path, config, arrays, kinds=None, tokenizer=(), extra=()):
    """A GGUF file, written by the gguf package."""
    import gguf

    architecture = "gpt2" if config.positions == "learned" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.n_ctx)
    writer.add_embedding_length(config.d_model)
    writer.add_head_count(config.n_heads)
    writer.add_feed_forward_length(config.d_mlp)
    if architecture == "llama":
        writer.add_head_count_kv(config.n_kv_heads)
        writer.add_key_length(config.d_head)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rotary_base)
        writer.add_rope_dimension_count(config.d_head)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    for method, value in [*tokenizer, *extra]:
        getattr(writer, method)(*value)
    for name, array in arrays.items():
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_file_gives_the_weights_bit_for_bit_in_our_order_of_rows(tmp_path, tied):
    model = filled(dataclasses.replace(LLAMA, tie_embeddings=tied))
    read = load(write(tmp_path / "m.gguf", model.config, llama_arrays(model)))
    assert read.config == model.config
    assert torch.equal(read(TOKENS), model(TOKENS))
    assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_a_gpt2_file_gives_the_weights_bit_for_bit(tmp_path):
    model = filled(GPT2)
    read = load(write(tmp_path / "m.gguf", GPT2, gpt2_arrays(model)), dtype=torch.float64)
    assert read.config == GPT2
    assert torch.equal(read(TOKENS), model.double()(TOKENS))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_packed_weights_are_those_that_the_gguf_package_unpacks(tmp_path, kind):
    import gguf

    model = filled(GPT2)
    arrays = gpt2_arrays(model)
    chosen = gguf.GGMLQuantizationType[kind]
    packed = {name: chosen for name, array in arrays.items() if array.ndim == 2}
    read = load(write(tmp_path / "m.gguf", GPT2, arrays, packed))
    for name, ours in (("blk.1.ffn_down.weight", read.blocks[1].mlp.down.weight), ("token_embd.weight", read.W_E)):
        expected = gguf.quants.dequantize(gguf.quants.quantize(arrays[name], chosen), chosen)
        assert torch.equal(ours, torch.from_numpy(expected.astype(np.float32)))


def test_part_of_the_stack(tmp_path):
    model = filled(LLAMA)
    part = load(write(tmp_path / "m.gguf", LLAMA, llama_arrays(model)), layers=range(1, 3))
    assert torch.equal(part.W_K, model.W_K[1:])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_stored_rotary_divisors_are_read_as_the_rule_behind_them(tmp_path, factor):
    config = dataclasses.replace(LLAMA, rotary_scaling=RotaryScaling(kind="llama3", factor=factor), rotary_base=5e5)
    model = filled(config)
    plain = rotary_frequencies(dataclasses.replace(config, rotary_scaling=None))
    divisors = (plain / rotary_frequencies(config)).float().numpy()
    read = load(write(tmp_path / "m.gguf", config, {**llama_arrays(model), "rope_freqs.weight": divisors}))
    assert read.config == config
    odd = {**llama_arrays(model), "rope_freqs.weight": divisors + 0.5}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight are not those of Llama 3.1 or 3.2"):
        load(write(tmp_path / "odd.gguf", config, odd))


def test_what_has_no_equal_here_is_refused_by_name(tmp_path):
    arrays = llama_arrays(filled(LLAMA))
    with pytest.raises(UnsupportedModel, match=r"expert_count 8 is not supported"):
        load(write(tmp_path / "a.gguf", LLAMA, arrays, extra=[("add_expert_count", (8,))]))
    with pytest.raises(UnsupportedModel, match=r"rope.scaling.type 'yarn' .*'linear'"):
        load(write(tmp_path / "b.gguf", LLAMA, arrays, extra=[("add_string", ("llama.rope.scaling.type", "yarn"))]))
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "c.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"general.architecture 'mamba' is not supported \(supported: llama"):
        load(tmp_path / "c.gguf")


def test_a_file_cut_short_says_so_wherever_it_was_cut(tmp_path):
    whole = write(tmp_path / "m.gguf", LLAMA, llama_arrays(filled(LLAMA))).read_bytes()
    for size in (6, 30, 200, 900, len(whole) - 5000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut.gguf: (not a whole GGUF file|.*cut short)"):
            load(tmp_path / "cut.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ValueError, match=r"not a GGUF file"):
        load(tmp_path / "other.gguf")


def test_every_kind_of_metadata_is_parsed(tmp_path):
    extra = [
        ("add_uint8", ("a", 200)), ("add_int16", ("b", -300)), ("add_float64", ("c", 1.5)), ("add_bool", ("d", True)),
        ("add_array", ("e", [1, 2, 3])), ("add_array", ("f", ["é", ""])), ("add_array", ("g", [[1, 2], [3]])),
    ]  # fmt: skip
    path = write(tmp_path / "m.gguf", LLAMA, {"x": np.ones((3, 32), np.float32)}, extra=extra)
    read = GGUFFile(path).metadata
    assert [read[key] for key in "abcdefg"] == [200, -300, 1.5, True, [1, 2, 3], ["é", ""], [[1, 2], [3]]]


def test_merges_put_the_best_scored_piece_first():
    tokens, scores = ["a", "b", "ab", "abb", "bb"], [0.0, 0.0, -2.0, -1.0, -3.0]
    assert merges_of_scores(tokens, scores) == [["a", "bb"], ["ab", "b"], ["a", "b"], ["b", "b"]]


def sentencepiece_fields(**changes):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab", "▁a"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    fields = {"model": "llama", "tokens": pieces, "scores": [-float(i) for i in range(len(pieces))]}
    fields |= {"token_type": kinds, "bos_token_id": 1, "unknown_token_id": 0, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def test_sentencepiece_vocabularies_split_as_they_should_and_begin_with_bos():
    tokenizer = tokenizer_of(sentencepiece_fields())
    assert tokenizer.prepend_bos
    ids = tokenizer.encode("ab aé")
    assert tokenizer.str_tokens(ids) == ["<s>", " ab", " a", "\\xc3", "\\xa9"]
    assert tokenizer.decode(ids[1:]) == "ab aé"
    assert tokenizer.str_tokens(tokenizer.encode("  ab")) == ["<s>", " ", " ", " ab"]
    assert tokenizer_of(sentencepiece_fields(add_bos_token=False)).encode("b")[0] != 1
    plain = tokenizer_of(sentencepiece_fields(add_space_prefix=False))
    assert plain.str_tokens(plain.encode("ab", prepend_bos=False)) == ["ab"]


def test_unknown_vocabularies_and_rules_for_words_are_refused_by_name():
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model 'bert' .*'gpt2', 'llama'"):
        tokenizer_of(sentencepiece_fields(model="bert"))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre 'tekken' .*smollm"):
        tokenizer_of(sentencepiece_fields(model="gpt2", pre="tekken", merges=[]))
    assert tokenizer_of({}) is None
