"""Counts in closed form against numel(), PyTorch's own counter, a real cache, and the lecture's numbers."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from analysis.accounting import (
    cache_memory,
    compare_head_splits,
    crossover_length,
    flops,
    non_embedding_parameters,
    parameter_count,
    parameter_table,
)
from circuits.config import GPTConfig
from circuits.model import HookedGPT

SIZES = {"n_layers": 2, "n_heads": 6, "d_head": 4, "d_model": 7, "n_ctx": 13, "d_vocab": 17}


def configurations():
    """Every combination of the fields that hold parameters, as far as they are allowed together."""
    bias = {"bias_qkv": (False, True), "bias_out": (False, True), "bias_unembed": (False, True)}
    fields = {
        **bias,
        "norm": ("layernorm", "rmsnorm", None),
        "norm_placement": ("pre", "post"),
        "final_norm": (True, False),
        "positions": ("learned", "rotary", None),
        "n_kv_heads": (6, 2),
        "tie_embeddings": (False, True),
        "qk_norm": (False, True),
        "branch_norm": (False, True),
        "parallel_blocks": (False, "shared_norm", "two_norms"),
        "mlp": ("attn_only", "plain", "no_bias", "gated"),
    }
    mlps = {
        "attn_only": {"attn_only": True},
        "plain": {"d_mlp": 11},
        "no_bias": {"d_mlp": 11, "bias_mlp": False},
        "gated": {"d_mlp": 11, "gated_mlp": True},
    }
    generator = torch.Generator().manual_seed(0)
    every = list(itertools.product(*fields.values()))
    for index in torch.randperm(len(every), generator=generator).tolist():
        chosen = dict(zip(fields, every[index], strict=True))
        try:
            yield GPTConfig(**SIZES, **mlps[chosen.pop("mlp")], **chosen)
        except ValueError:
            continue


def numel(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_course_table_is_the_lectures():
    table = parameter_table(GPTConfig.course())
    assert dict(zip(table.parts, table.parameters.tolist(), strict=True)) == {
        "token and positional embeddings": 16_512,
        "attention in all blocks": 262_656,
        "MLPs in all blocks": 526_848,
        "block LayerNorms": 2_048,
        "final LayerNorm and unembedding": 8_576,
    }
    assert table.total == 816_640
    assert [round(100 * share, 2) for share in table.share.tolist()] == [2.02, 32.16, 64.51, 0.25, 1.05]


def test_the_lectures_formula_holds_for_its_conventions():
    V, T, d, L = 19, 23, 15, 3
    config = GPTConfig(n_layers=L, d_model=d, n_heads=5, n_ctx=T, d_vocab=V)
    assert parameter_count(config) == 2 * V * d + T * d + L * (12 * d**2 + 10 * d) + 2 * d


def test_counts_equal_numel_for_every_kind_of_configuration():
    for config in itertools.islice(configurations(), 300):
        model = HookedGPT(config, device="meta")
        assert parameter_count(config) == numel(model), config
        assert parameter_table(config).total == parameter_table(model, detail=True).total == numel(model)


def test_a_gpt2_small_has_its_known_size():
    assert parameter_count(GPTConfig.gpt2_small()) == 124_439_808


def test_tying_saves_one_embedding():
    config = GPTConfig.course()
    tied = config.replace(tie_embeddings=True)
    assert parameter_count(config) - parameter_count(tied) == 65 * 128
    assert parameter_table(config).total_if_tied == parameter_table(tied).total == parameter_table(tied).total_if_tied
    assert parameter_table(config).title() == "816,640 parameters (808,320 with tied embeddings)"
    assert parameter_table(tied).title() == "808,320 parameters, embeddings tied"


def test_detail_rows_are_the_tensors_sizes():
    config = GPTConfig(**SIZES, d_mlp=11, n_kv_heads=2, bias_qkv=True)
    table = parameter_table(config, detail=True)
    rows = dict(zip(table.parts, table.parameters.tolist(), strict=True))
    assert rows["W_Q"] == 2 * 7 * 6 * 4
    assert rows["W_K"] == rows["W_V"] == 2 * 7 * 2 * 4
    assert rows["b_K"] == 2 * 2 * 4
    assert rows["b_in"] == 2 * 11


FLOP_CONFIGS = {
    "plain": GPTConfig(**SIZES, d_mlp=11),
    "gated": GPTConfig(**SIZES, d_mlp=11, gated_mlp=True, norm="rmsnorm"),
    "grouped": GPTConfig(**SIZES, d_mlp=11, n_kv_heads=2, bias_qkv=True),
    "attn_only": GPTConfig(**SIZES, attn_only=True, tie_embeddings=True),
    "parallel_rotary": GPTConfig(**SIZES, d_mlp=11, parallel_blocks="shared_norm", positions="rotary"),
}


@pytest.mark.parametrize("name", FLOP_CONFIGS)
@pytest.mark.parametrize("training", [False, True])
def test_operations_equal_pytorchs_own_counter(name, training):
    config = FLOP_CONFIGS[name]
    model = HookedGPT(config)
    tokens = torch.randint(config.d_vocab, (4, 12), generator=torch.Generator().manual_seed(0))
    # A hook on the scores asks for the explicit products; the fused kernel computes some twice in its backward pass.
    explicit = [("blocks.0.attn.hook_attn_scores", lambda scores, hook: None)]
    explicit += [("blocks.1.attn.hook_attn_scores", lambda scores, hook: None)]
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        logits = model.run_with_hooks(tokens, fwd_hooks=explicit)
        if training:
            logits.sum().backward()
    assert flops(config, tokens=12, batch=4, training=training).total == counter.get_total_flops()


def test_operations_of_each_part_follow_the_lecture():
    T, d, L, V = 64, 128, 4, 65
    count = flops(GPTConfig.course(), tokens=T)
    assert count.flops.tolist() == [8 * L * T * d**2, 4 * L * T**2 * d, 16 * L * T * d**2, 2 * T * d * V]
    assert flops(GPTConfig.course(), tokens=T, batch=3, training=True).total == 9 * count.total


def test_the_rule_counts_what_is_linear_in_tokens():
    """2·N·D is the linear work plus the biases and norms that N counts and no product does."""
    config = GPTConfig(**SIZES, d_mlp=11, norm=None, bias_out=False, bias_mlp=False)
    count = flops(config, tokens=5, batch=3)
    attention = count.flops[1].item()
    assert count.rule_with_unembedding == count.total - attention
    assert count.rule_without_unembedding == count.total - attention - count.flops[3].item()
    assert flops(config, tokens=5, batch=3, training=True).rule_with_unembedding == 3 * count.rule_with_unembedding


def test_both_readings_of_n_add_up_to_the_total():
    config = GPTConfig(**SIZES, d_mlp=11, bias_unembed=True)
    without, with_unembedding = non_embedding_parameters(config)
    assert with_unembedding - without == 7 * 17 + 17
    assert with_unembedding == parameter_count(config) - 7 * 17 - 7 * 13
    assert non_embedding_parameters(config.replace(tie_embeddings=True)) == (without, with_unembedding)


def test_attention_passes_the_rest_at_the_crossover():
    config = GPTConfig(**SIZES, d_mlp=11)
    crossover = crossover_length(config)
    for length, above in ((int(crossover), False), (int(crossover) + 1, True)):
        work = flops(config, tokens=length).flops
        assert (work[1] > work.sum() - work[1]).item() is above
    # Without an unembedding to speak of, the lecture's conventions give 6 d.
    assert crossover_length(GPTConfig(n_layers=2, d_model=12, n_heads=3, n_ctx=4, d_vocab=1)) == 6 * 12 + 1 / 4


CACHED = {
    **FLOP_CONFIGS,
    "everything": GPTConfig(**SIZES, d_mlp=11, n_kv_heads=3, qk_norm=True, branch_norm=True, positions="rotary"),
}


@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("everything", [False, True])
def test_cache_memory_is_that_of_a_real_cache(name, everything):
    config = CACHED[name]
    names_filter = (lambda name: True) if everything else None
    tokens = torch.zeros(3, 5, dtype=torch.long)
    _, cache = HookedGPT(config).run_with_cache(tokens, names_filter=names_filter)
    memory = cache_memory(config, tokens=5, batch=3, names_filter=names_filter)
    assert dict(zip(memory.names, memory.bytes.tolist(), strict=True)) == {
        name: tensor.numel() * 4 for name, tensor in cache.items()
    }
    assert memory.total == sum(tensor.numel() * 4 for tensor in cache.values())


def test_cache_memory_is_proportional_to_the_size_of_a_number():
    config = GPTConfig.course()
    assert cache_memory(config, dtype=torch.float64).total == 4 * cache_memory(config, dtype=torch.bfloat16).total


def test_one_full_width_head_costs_the_same_and_has_other_rank_bounds():
    split = compare_head_splits(GPTConfig.course(), splits=(1, 4, 128))
    assert split.attention_parameters.tolist() == [4 * 128**2] * 3
    assert split.mixing_flops.unique().numel() == 1
    assert split.rank_bound.tolist() == [128, 32, 1]
    assert split.distributions.tolist() == [1, 4, 128]


def test_a_wide_heads_rank_is_bounded_by_d_model():
    assert compare_head_splits(GPTConfig(**SIZES, d_mlp=11), splits=(1,)).rank_bound.tolist() == [7]


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="tokens must be at least 1, not 0"):
        flops(GPTConfig.course(), tokens=0)
    with pytest.raises(ValueError, match="batch must be at least 1, not -2"):
        flops(GPTConfig.course(), batch=-2)
    with pytest.raises(ValueError, match="3 heads do not divide the width n_heads × d_head = 128"):
        compare_head_splits(GPTConfig.course(), splits=(3,))
