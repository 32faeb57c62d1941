"""What is read from a Hugging Face folder, and what is refused, by name. No transformers here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from circuits import GPTConfig, HookedGPT
from circuits.pretrained.families import FAMILIES
from circuits.pretrained.fields import UnsupportedModel
from circuits.pretrained.folder import family_and_config, read_folder

LLAMA = {
    "model_type": "llama",
    "vocab_size": 17,
    "max_position_embeddings": 19,
    "hidden_size": 14,
    "intermediate_size": 11,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def llama_tensors(layers: int = 5, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (17, 14), "model.norm.weight": (14,), "lm_head.weight": (17, 14)}
    for layer in range(layers):
        within = {
            "input_layernorm": (14,),
            "self_attn.q_proj": (24, 14),
            "self_attn.k_proj": (8, 14),
            "self_attn.v_proj": (8, 14),
            "self_attn.o_proj": (14, 24),
            "post_attention_layernorm": (14,),
            "mlp.gate_proj": (11, 14),
            "mlp.up_proj": (11, 14),
            "mlp.down_proj": (14, 11),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in within.items()}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "tiny", llama_tensors())


def test_no_model_code_of_another_library_is_imported(folder):
    code = f"""
import sys, pathlib
from circuits.pretrained.folder import read_folder
read_folder(pathlib.Path({str(folder)!r}))
unwanted = ("transformers", "transformer_lens", "gguf", "huggingface_hub", "pandas", "plotly", "rich")
sys.exit(",".join(m for m in unwanted if m in sys.modules) or 0)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_weight_stands_where_its_head_is_looked_for(folder):
    model, tensors = read_folder(folder), llama_tensors()
    wanted = tensors["model.layers.3.self_attn.q_proj.weight"][2 * 4 : 3 * 4].T
    assert torch.equal(model.blocks[3].attn.W_Q[2], wanted)
    assert torch.equal(model.blocks[3].attn.W_V[1], tensors["model.layers.3.self_attn.v_proj.weight"][4:8].T)
    assert torch.equal(model.blocks[3].attn.W_O[5], tensors["model.layers.3.self_attn.o_proj.weight"][:, 20:].T)
    assert torch.equal(model.W_U, tensors["lm_head.weight"].T)


def test_shards_are_read_as_one_model(folder, tmp_path):
    tensors = llama_tensors()
    sharded = write(tmp_path / "sharded")
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    where = {}
    for i, half in enumerate(halves, 1):
        name = f"model-0000{i}-of-00002.safetensors"
        save_file(half, sharded / name)
        where |= dict.fromkeys(half, name)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(read_folder(sharded)(TOKENS), read_folder(folder)(TOKENS))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 2 files .* missing \(model-00002-of-00002.safetensors\)"):
        read_folder(sharded)


def test_a_bare_model_without_prefix_is_read_where_its_embeddings_are_tied(tmp_path):
    tensors = {name.removeprefix("model."): t for name, t in llama_tensors().items() if name != "lm_head.weight"}
    model = read_folder(write(tmp_path / "bare", tensors, tie_word_embeddings=True))
    assert model.config.tie_embeddings
    with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
        read_folder(write(tmp_path / "untied", tensors))


def test_two_different_embeddings_are_both_kept_whatever_the_config_says(tmp_path):
    tensors = llama_tensors()
    model = read_folder(write(tmp_path / "both", tensors, tie_word_embeddings=True))
    assert not model.config.tie_embeddings
    assert torch.equal(model.W_U.T, tensors["lm_head.weight"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert read_folder(write(tmp_path / "same", tensors, tie_word_embeddings=True)).config.tie_embeddings


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_float32_unless_asked_and_the_stored_type_is_kept_bit_for_bit(tmp_path, stored):
    tensors = llama_tensors(dtype=stored)
    where = write(tmp_path / "typed", tensors)
    name = "model.layers.1.mlp.up_proj.weight"
    assert read_folder(where).dtype == torch.float32
    assert torch.equal(read_folder(where).blocks[1].mlp.up.weight, tensors[name].float())
    kept = read_folder(where, dtype=stored)
    assert kept.dtype == stored
    assert torch.equal(kept.blocks[1].mlp.up.weight.view(torch.uint8), tensors[name].view(torch.uint8))


def test_part_of_the_stack_has_the_weights_of_those_layers(folder):
    whole, part = read_folder(folder), read_folder(folder, layers=range(1, 4))
    assert part.config.n_layers == 3
    assert torch.equal(part.W_Q, whole.W_Q[1:4])
    assert torch.equal(part.W_U, whole.W_U)
    assert part.card["layers"] == [1, 2, 3]
    assert torch.equal(read_folder(folder, layers=[4])(TOKENS), part_of(whole, 4)(TOKENS))


def part_of(model, layer):
    prefix = f"blocks.{layer}."
    state = {name: t for name, t in model.state_dict().items() if not name.startswith("blocks.")}
    state |= {"blocks.0." + n.removeprefix(prefix): t for n, t in model.state_dict().items() if n.startswith(prefix)}
    return HookedGPT.from_state_dict(model.config.replace(n_layers=1, window=(None,)), state)


def test_windows_follow_their_layers(tmp_path):
    fields = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    tensors = llama_tensors()
    for layer in range(5):
        for x, rows in (("q", 24), ("k", 8), ("v", 8)):
            tensors[f"model.layers.{layer}.self_attn.{x}_proj.bias"] = torch.ones(rows)
    where = write(tmp_path / "windows", tensors, **fields)
    assert read_folder(where).config.window == (None, None, 3, 3, 3)
    assert read_folder(where, layers=range(1, 3)).config.window == (None, 3)


@pytest.mark.parametrize("layers", [range(0), range(3, 7), [2, 1], [1, 1], [-1]])
def test_layers_that_are_not_there_are_refused(folder, layers):
    with pytest.raises(ValueError, match=r"layers must be increasing numbers from 0 to 4"):
        read_folder(folder, layers=layers)


REFUSED = {
    "another family": ({"model_type": "mamba"}, r"model_type 'mamba' is not supported \(supported: gpt2, .*phi\)"),
    "no family": ({"model_type": None}, r"model_type None is not supported"),
    "activation": ({"hidden_act": "quick_gelu"}, r"llama: hidden_act 'quick_gelu' .*supported: gelu, gelu_new"),
    "mlp biases": ({"mlp_bias": True}, r"llama: mlp_bias True is not supported \(supported: False\)"),
    "stretching": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, r"rope_type 'yarn' .*'llama3'"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic"}}, r"rope_type 'dynamic'"),
    "no factor": ({"rope_scaling": {"type": "linear"}}, r"rope_scaling factor None .*supported: a number"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config 'gptq' is not supported"),
    "a size that is none": ({"vocab_size": "many"}, r"vocab_size 'many' .*a whole number"),
    "a flag that is none": ({"tie_word_embeddings": 1}, r"tie_word_embeddings 1 .*true or false"),
    "impossible sizes": ({"num_key_value_heads": 4}, r"llama: n_heads 6 is not a multiple of n_kv_heads 4"),
    "gpt2 scaling": (
        {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
        r"gpt2: scale_attn_by_inverse_layer_idx True is not supported \(supported: False\)",
    ),
    "phi norms": ({"model_type": "phi", "qk_layernorm": True}, r"phi: qk_layernorm True"),
    "gemma both ways": ({"model_type": "gemma2", "use_bidirectional_attention": True}, r"use_bidirectional_attention"),
    "layer types": (
        {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 5},
        r"layer_types 'chunked_attention' .*'sliding_attention'",
    ),
    "too few layer types": ({"model_type": "gemma2", "layer_types": ["full_attention"]}, r"5 entries"),
    "neo attention": (
        {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global", "dilated"], 1]]},
        r"attention_types .*'global' or 'local' for each of 2 layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_equal_here_is_refused_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        family_and_config({**LLAMA, **changes})


def test_old_and_new_spellings_of_rotary_fields_mean_the_same():
    spellings = [
        ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
         {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}),
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 77},
         {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0, "partial_rotary_factor": 0.5}}),
        ("phi", {"partial_rotary_factor": 0.5, "rope_theta": 10000.0}, {}),
    ]  # fmt: skip
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    for family, old, new in spellings:
        read = [family_and_config({"model_type": family, **sizes, **fields})[1] for fields in (old, new)]
        assert read[0] == read[1]


def test_a_file_that_lists_only_its_differences_gets_its_familys_defaults():
    pythia = family_and_config({"model_type": "gpt_neox"})[1]
    assert (pythia.rotary_dim, pythia.parallel_blocks, pythia.tie_embeddings) == (24, "two_norms", False)
    assert family_and_config({"model_type": "mistral"})[1].window == (4096,) * 32
    assert family_and_config({"model_type": "mistral", "sliding_window": None})[1].window == (None,) * 32
    gemma = family_and_config({"model_type": "gemma2"})[1]
    assert (gemma.window[:2], gemma.attn_softcap, gemma.tie_embeddings) == ((4096, None), 50.0, True)
    assert family_and_config({"model_type": "gpt2"})[1] == GPTConfig.gpt2_small()


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path):
    tensors = llama_tensors()
    gone = {n: t for n, t in tensors.items() if n != "model.layers.2.mlp.gate_proj.weight"}
    with pytest.raises(ValueError, match=r"tensor model.layers.2.mlp.gate_proj.weight is missing"):
        read_folder(write(tmp_path / "a", gone))
    extra = {**tensors, "model.layers.0.self_attn.lora_A.weight": torch.ones(3), "rotary_emb.inv_freq": torch.ones(2)}
    with pytest.raises(ValueError, match=r"tensor model.layers.0.self_attn.lora_A.weight is not part of this family"):
        read_folder(write(tmp_path / "b", extra))
    wrong = {**tensors, "model.layers.2.self_attn.k_proj.weight": torch.ones(9, 14)}
    with pytest.raises(ValueError, match=r"v_proj.weight \[8, 14\] does not fit blocks.2.attn.qkv.weight \[40, 14\]"):
        read_folder(write(tmp_path / "c", wrong))


def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path):
    where = write(tmp_path / "pickled")
    torch.save(llama_tensors(), where / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a pickle .*never opened here") as caught:
        read_folder(where)
    code = str(caught.value).split('python -c "')[1].removesuffix('"')
    subprocess.run([sys.executable, "-c", code], cwd=where, check=True, env={**os.environ, "PYTHONPATH": ""})
    assert load_file(where / "model.safetensors").keys() == llama_tensors().keys()
    assert read_folder(where).config.n_layers == 5


def test_what_is_not_a_folder_of_a_whole_model_is_said_plainly(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        read_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        read_folder(write(tmp_path / "empty"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"not a whole safetensors file .*cut short"):
        read_folder(folder)


def test_the_file_may_be_deleted_once_it_is_read(folder):
    model = read_folder(folder)
    before = model(TOKENS)
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(model(TOKENS), before)


def test_every_family_is_listed_under_its_own_name():
    assert list(FAMILIES) == [
        *("gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi")
    ]
