"""TransformerLens models become ours with equal logits, and scripts written for theirs run on ours."""

from __future__ import annotations

import logging
import warnings
from types import SimpleNamespace

import huggingface
import pytest
import torch

from circuits import GPTConfig, HookedGPT
from circuits.config import RotaryScaling
from circuits.pretrained import from_transformer_lens
from circuits.pretrained.fields import UnsupportedModel

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]])

SIZES = {"n_layers": 2, "d_model": 20, "n_heads": 3, "d_head": 8, "d_mlp": 28, "n_ctx": 19, "d_vocab": 17}
NATIVE = {
    "layernorm": {},
    "layernorm without gains": {"normalization_type": "LNPre", "act_fn": "gelu_new"},
    "rmsnorm, grouped, gated, rotary, soft caps": {
        "normalization_type": "RMS",
        "n_heads": 6,
        "n_key_value_heads": 2,
        "gated_mlp": True,
        "act_fn": "silu",
        "positional_embedding_type": "rotary",
        "rotary_dim": 4,
        "rotary_base": 700,
        "attn_scores_soft_cap": 1.5,
        "output_logits_soft_cap": 2.0,
    },
    "rmsnorm without gains, stretched": {
        "normalization_type": "RMSPre",
        "positional_embedding_type": "rotary",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "attention only, its own scale": {"attn_only": True, "attn_scale": 3.0, "act_fn": None},
    "no norms": {"normalization_type": None, "act_fn": "relu"},
}
WRAPPED = ["gpt2", "gpt_neo", "gpt_neox", "gptj", "llama", "llama_stretched", "mistral", "qwen2", "qwen3", "gemma2"]


@pytest.fixture(scope="module")
def bridge_class():
    logging.disable(logging.WARNING)  # its remarks on tiny models
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformer_lens.model_bridge import TransformerBridge

        yield TransformerBridge
    logging.disable(logging.NOTSET)


def boot_native(bridge_class, **fields):
    from transformer_lens.config import TransformerBridgeConfig

    fields = {"act_fn": "gelu", "normalization_type": "LN", **SIZES, **fields}
    scaling = fields.pop("rope_scaling", None)
    cfg = TransformerBridgeConfig(**fields, architecture="TransformerLensNative")
    if scaling is not None:
        cfg.rope_scaling = scaling
    model = bridge_class.boot_native(cfg, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def wrapped(bridge_class, tmp_path_factory):
    """name, processed -> a bridge around a tiny Hugging Face model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(huggingface.VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="1", eos_token="2", pad_token="2")
    made = {}

    def get(name, processed=False):
        if (name, processed) not in made:
            folder = tmp_path_factory.mktemp(name)
            huggingface.save(name, folder)
            tokenizer.save_pretrained(folder)
            bridge = bridge_class.boot_transformers(str(folder), dtype=torch.float32)
            if processed:
                bridge.enable_compatibility_mode(disable_warnings=True)
            made[name, processed] = bridge
        return made[name, processed]

    return get


@torch.no_grad()
def assert_equal_logits(theirs):
    """Ours and theirs, which is left as it was."""
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    expected = theirs(TOKENS)
    ours = from_transformer_lens(theirs)
    assert (ours(TOKENS) - expected).abs().max() < 1e-5 * expected.abs().max()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    after = theirs.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(theirs(TOKENS), expected)


@pytest.mark.parametrize("case", NATIVE)
def test_native_models_have_equal_logits_and_are_left_alone(bridge_class, case):
    assert_equal_logits(boot_native(bridge_class, **NATIVE[case]))


@pytest.mark.parametrize("processed", [False, True], ids=["as stored", "processed"])
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models_have_equal_logits_and_are_left_alone(wrapped, name, processed):
    assert_equal_logits(wrapped(name, processed))


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gptj", "llama", "gemma2"])
def test_hook_values_agree_name_by_name(wrapped, name):
    theirs = wrapped(name)
    ours = from_transformer_lens(theirs)
    _, expected = theirs.run_with_cache(TOKENS)
    _, cache = ours.run_with_cache(TOKENS)
    compared = [name for name in cache if name in expected]
    for name in compared:
        value, right = cache[name], expected[name]
        if name.endswith("hook_attn_scores"):
            pattern = expected[name.replace("attn_scores", "pattern")]
            if (right.softmax(-1) - pattern).abs().max() > 1e-4:
                continue  # theirs are not the scores of their own pattern (GPT-J)
            seen = right > -1e30  # they mask with the least float, where ours have -inf
            assert value[~seen].isneginf().all()
            value, right = value[seen], right[seen]
        assert value.shape == right.shape, name
        assert (value - right).abs().max() < 1e-4 * (1 + right.abs().max()), name
    rotated = {n for n in cache if "hook_rot_" in n}  # absent from some of their architectures
    assert set(cache) - set(compared) - rotated == {f"blocks.{layer}.hook_mlp_in" for layer in range(3)}


@torch.no_grad()
def test_a_script_written_for_theirs_runs_unchanged_on_ours(bridge_class):
    def script(model):
        """What people write: filters, cache keys, hooks that return or change in place, a context of hooks."""
        logits, cache = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith(("pattern", "hook_z")))
        _, whole = model.run_with_cache(TOKENS)

        def ablate(z, hook):
            z[:, :, 1, :] = 0.0
            return z

        def double(activation, hook):
            return 2 * activation

        edited = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", ablate)])
        with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", double)]):
            scoped = model(TOKENS)
        return {
            "logits": logits,
            "pattern": cache["pattern", 0],
            "z": cache["blocks.1.attn.hook_z"],
            "resid_post": whole["resid_post", -1],
            "mlp_out": whole["mlp_out", 1],
            "scale": whole["ln_final.hook_scale"],
            "edited": edited,
            "scoped": scoped,
            "after": model(TOKENS),
            "W_Q": model.W_Q[1, 2],
            "W_O": model.blocks[0].attn.W_O,
            "W_in": model.W_in,
            "W_U": model.W_U,
            "heads": torch.tensor([model.cfg.n_layers, model.cfg.n_heads, model.cfg.d_head, model.cfg.d_vocab]),
        }

    theirs = boot_native(bridge_class)
    expected, results = script(theirs), script(from_transformer_lens(theirs))
    for key, value in expected.items():
        assert (results[key] - value).abs().max() < 1e-4, key


def test_text_is_tokenised_by_their_tokenizer_and_their_rule(wrapped):
    theirs = wrapped("llama")
    ours = from_transformer_lens(theirs)
    for text in ("3", "5", "36"):
        assert ours.to_tokens(text).tolist() == theirs.to_tokens(text).tolist()
    assert ours.to_tokens("5").tolist() == [[1, 5]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"act_fn": "solu_ln"}, r"act_fn 'solu_ln' is not supported"),
        ({"attention_dir": "bidirectional"}, r"attention_dir 'bidirectional' .*'causal'"),
        ({"final_rms": True}, r"final_rms True is not supported"),
    ],
)
def test_what_has_no_equal_here_is_refused_by_name(bridge_class, fields, message):
    with pytest.raises(UnsupportedModel, match=message):
        from_transformer_lens(boot_native(bridge_class, **fields))


def test_something_else_is_refused():
    with pytest.raises(TypeError, match=r"expected a TransformerBridge or a HookedTransformer, not Linear"):
        from_transformer_lens(torch.nn.Linear(2, 3))


# --- 3.x, which cannot be installed beside 4.x: what it shows of itself, by name --------------------------------------

LEGACY = {
    "gpt2": (
        {"normalization_type": "LN", "act_fn": "gelu_new"},
        GPTConfig(**SIZES, act="gelu_new", bias_qkv=True, bias_unembed=True),
    ),
    "folded": (
        {"normalization_type": "LNPre", "act_fn": "gelu"},
        GPTConfig(**SIZES, bias_qkv=True, bias_unembed=True),
    ),
    "llama": (
        {
            "normalization_type": "RMS", "act_fn": "silu", "gated_mlp": True, "n_heads": 6, "n_key_value_heads": 2,
            "positional_embedding_type": "rotary", "rotary_base": 500.0, "rotary_dim": 8, "final_rms": True,
            "use_NTK_by_parts_rope": True, "NTK_by_parts_factor": 8.0, "NTK_original_ctx_len": 64,
        },
        GPTConfig(
            **{**SIZES, "n_heads": 6}, n_kv_heads=2, norm="rmsnorm", act="silu", gated_mlp=True, positions="rotary",
            rotary_base=500.0, bias_qkv=True, bias_unembed=True,
            rotary_scaling=RotaryScaling(kind="llama3", factor=8.0, original_n_ctx=64),
        ),
    ),
    "gptj": (
        {
            "normalization_type": "LN", "act_fn": "gelu_new", "parallel_attn_mlp": True, "rotary_dim": 4,
            "positional_embedding_type": "rotary", "rotary_adjacent_pairs": True,
        },
        GPTConfig(
            **SIZES, act="gelu_new", parallel_blocks="two_norms", positions="rotary", rotary_dim=4,
            rotary_layout="interleaved", bias_qkv=True, bias_unembed=True,
        ),
    ),
    "neo": (
        {
            "normalization_type": "LN", "act_fn": "gelu_new", "use_attn_scale": False, "use_local_attn": True,
            "window_size": 4, "attn_types": ["global", "local"],
        },
        GPTConfig(**SIZES, act="gelu_new", attn_scale=1.0, window=(None, 4), bias_qkv=True, bias_unembed=True),
    ),
    "gemma2": (
        {
            "normalization_type": "RMS", "act_fn": "gelu_pytorch_tanh", "gated_mlp": True, "attn_scale": 3.5,
            "positional_embedding_type": "rotary", "use_normalization_before_and_after": True,
            "attn_scores_soft_cap": 1.5, "output_logits_soft_cap": 2.5, "use_qk_norm": True,
        },
        GPTConfig(
            **SIZES, norm="rmsnorm", act="gelu_new", gated_mlp=True, positions="rotary", branch_norm=True,
            attn_scale=1 / 3.5, attn_softcap=1.5, logit_softcap=2.5, qk_norm=True, bias_qkv=True, bias_unembed=True,
        ),
    ),
}  # fmt: skip


def legacy(fields, model):
    """What a 3.x `HookedTransformer` with the weights of `model` shows: parameters of their names, heads repeated."""
    config = model.config

    def norm(module):
        if module is None or fields["normalization_type"].endswith("Pre"):
            return SimpleNamespace()
        return SimpleNamespace(**dict(module.named_parameters()))

    def block(b):
        a, m = b.attn, b.mlp
        repeat = config.group_size
        attn = {"W_Q": a.W_Q, "b_Q": a.b_Q, "W_O": a.W_O, "b_O": a.b_O}
        for x in "KV":
            attn[f"W_{x}"] = getattr(a, f"W_{x}").repeat_interleave(repeat, 0)
            attn[f"b_{x}"] = getattr(a, f"b_{x}").repeat_interleave(repeat, 0)
        attn |= {name: norm(getattr(a, name)) for name in ("q_norm", "k_norm") if config.qk_norm}
        mlp = SimpleNamespace(W_in=m.W_in, b_in=m.b_in, W_gate=m.W_gate, W_out=m.W_out, b_out=m.b_out)
        norms = {n: norm(getattr(b, n)) for n in ("ln1", "ln2", "ln1_post", "ln2_post") if getattr(b, n) is not None}
        return SimpleNamespace(attn=SimpleNamespace(**attn), mlp=mlp, **norms)

    cfg = {"positional_embedding_type": "standard", "attn_scale": SIZES["d_head"] ** 0.5, "use_attn_scale": True}
    cfg |= {"attn_scores_soft_cap": -1.0, "output_logits_soft_cap": -1.0, "attention_dir": "causal"}
    return SimpleNamespace(
        cfg=SimpleNamespace(**{**SIZES, **cfg, "model_name": "old", **fields}),
        blocks=[block(b) for b in model.blocks],
        embed=SimpleNamespace(W_E=model.W_E),
        pos_embed=SimpleNamespace(W_pos=model.W_pos) if config.positions == "learned" else None,
        unembed=SimpleNamespace(W_U=model.W_U, b_U=model.b_U),
        ln_final=norm(model.ln_final),
    )


@torch.no_grad()
@pytest.mark.parametrize("case", LEGACY)
def test_a_model_of_the_old_kind_is_read_by_its_names(case):
    fields, config = LEGACY[case]
    model = HookedGPT(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        gain_was_folded = fields["normalization_type"] == "LNPre" and name.endswith((".w", ".b"))
        if not gain_was_folded:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    read = from_transformer_lens(legacy(fields, model))
    assert read.config == config
    assert torch.equal(read(TOKENS), model(TOKENS))
    assert read.card == {"source": "old", "from": "TransformerLens"}
