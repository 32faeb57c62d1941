"""Path expansion against every path followed forwards, one at a time; the search, its bounds, and routes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from circuits import MLP, AttnBias, Embed, GPTConfig, Head, PosEmbed
from circuits.components import NormBias, UnembedBias, ValueBias
from circuits.paths import counted, expand_paths, needed_names
from tests.architectures import ARCHITECTURES, configs, make
from tests.batches import SIDES, pad, random_prompts, random_tokens
from tests.compiled import induction_head, tokens as induction_tokens

EXACT = {"rtol": 1e-10, "atol": 1e-10}
PRE = [name for name, c in ARCHITECTURES.items() if c.norm_placement == "pre"]
over_pre = pytest.mark.parametrize("name", PRE)
CORRECT, WRONG = 3, 5


@functools.cache
def run_of(name):
    model = make(name).requires_grad_(False)
    tokens = random_tokens(model.config)
    return model, tokens, *model.run_with_cache(tokens, needed_names(model.config))


def deep_model(n_layers=4, seed=0, strength=1.0, **changes):
    """More layers than heads below them can be listed by hand."""
    fields = {"n_layers": n_layers, "d_model": 9, "n_heads": 2, "d_head": 5, "d_mlp": 11, "n_ctx": 8, "d_vocab": 17}
    model = make(GPTConfig(**fields | changes), seed=seed).requires_grad_(False)
    for block in model.blocks:
        block.attn.out.weight *= strength
    tokens = random_tokens(model.config, batch=2, pos=6, seed=seed)
    return model, model.run_with_cache(tokens)[1]


# --- every path followed forwards: full matrices, one path at a time -------------------------------------------------


def normed(norm, x, scale):
    if norm is None:
        return x
    return (x - x.mean(-1, keepdim=True) if norm.kind == "layernorm" else x) / scale * norm.w


def through_head(model, cache, values, head):
    """What a head writes when its values are these."""
    block, layer = model.blocks[head.layer], head.layer
    written = cache["pattern", layer][:, head.head] @ values @ block.attn.W_O[head.head]
    return written if block.ln1_post is None else normed(block.ln1_post, written, cache["scale", layer, "ln1_post"])


def values_of(model, cache, x, head):
    """The values that a head makes of a part of the stream."""
    block = model.blocks[head.layer]
    scale = None if block.ln1 is None else cache["scale", head.layer, "ln1"]
    return normed(block.ln1, x, scale) @ block.attn.W_V[head.head // model.config.group_size]


def forwards(model, cache, components, direction):
    """The value of one path, ``[batch]``, at the last position."""
    leaf, heads = components[0], list(components[1:])
    shape = cache["embed"].shape
    if leaf in (NormBias("ln_final"), UnembedBias()):
        value = model.ln_final.b @ direction if isinstance(leaf, NormBias) else model.b_U[CORRECT] - model.b_U[WRONG]
        return value.expand(shape[0])
    if isinstance(leaf, ValueBias):
        bias = model.b_V[leaf.layer, leaf.head].expand(*shape[:2], -1)
        x = through_head(model, cache, bias, Head(leaf.layer, leaf.head))
    elif isinstance(leaf, NormBias) and leaf.norm == "ln1":
        head = heads.pop(0)
        shift = model.blocks[leaf.layer].ln1.b.expand(shape)
        x = through_head(
            model, cache, shift @ model.blocks[leaf.layer].attn.W_V[head.head // model.config.group_size], head
        )
    else:
        x = leaf_write(model, cache, leaf)
    for head in heads:
        x = through_head(model, cache, values_of(model, cache, x, head), head)
    final = model.ln_final
    return (normed(final, x, None if final is None else cache["ln_final.hook_scale"]) @ direction)[:, -1]


def leaf_write(model, cache, leaf):
    if isinstance(leaf, Embed | PosEmbed):
        return cache[f"hook_{leaf}"]
    if isinstance(leaf, MLP):
        return cache["mlp_out", leaf.layer]
    block = model.blocks[leaf.layer]
    if isinstance(leaf, NormBias):
        return block.ln1_post.b.expand_as(cache["embed"])
    bias = model.b_O[leaf.layer].expand_as(cache["embed"])
    return bias if block.ln1_post is None else normed(block.ln1_post, bias, cache["scale", leaf.layer, "ln1_post"])


def all_paths(config):
    """The components of every path."""
    heads = [[Head(layer, h) for h in range(config.n_heads)] for layer in range(config.n_layers)]
    for route in itertools.product(*([None, *layer] for layer in heads)):
        chain = tuple(head for head in route if head is not None)
        below = chain[0].layer if chain else config.n_layers
        yield from ((leaf, *chain) for leaf in leaves_below(config, below))
        if chain and config.bias_qkv:
            yield (ValueBias(chain[0].layer, chain[0].head), *chain[1:])
        if chain and config.norm == "layernorm":
            yield (NormBias("ln1", chain[0].layer), *chain)
    if config.final_norm and config.norm == "layernorm":
        yield (NormBias("ln_final"),)
    if config.bias_unembed:
        yield (UnembedBias(),)


def leaves_below(config, below):
    yield Embed()
    if config.positions == "learned":
        yield PosEmbed()
    for layer in range(below):
        if config.bias_out:
            yield AttnBias(layer)
        if config.branch_norm and config.norm == "layernorm":
            yield NormBias("ln1_post", layer)
        if config.has_mlp:
            yield MLP(layer)


@over_pre
def test_every_path_has_the_value_that_it_carries_forwards(name) -> None:
    model, _, _, cache = run_of(name)
    found = expand_paths(model, cache, CORRECT, WRONG, top=None)
    direction = model.W_U[:, CORRECT] - model.W_U[:, WRONG]
    expected = set(all_paths(model.config))
    assert {path.components for path in found.paths} == expected
    assert len(found.paths) == len(expected) == found.n_paths == found.n_found
    for path in found.paths:
        torch.testing.assert_close(path.value, forwards(model, cache, path.components, direction), **EXACT)


@over_pre
def test_all_paths_sum_to_the_logit_difference(name) -> None:
    model, _, logits, cache = run_of(name)
    found = expand_paths(model, cache, CORRECT, WRONG, top=None)
    cap = model.config.logit_softcap
    logits = logits if cap is None else cap * torch.atanh(logits / cap)
    expected = logits[:, -1, CORRECT] - logits[:, -1, WRONG]
    torch.testing.assert_close(sum(path.value for path in found.paths), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.remainder, torch.zeros_like(expected), **EXACT)
    assert found.proven
    assert found.proof == "enumeration"
    assert found.error < 1e-10
    assert ("before the soft cap" in found.quantity) == (cap is not None)


@over_pre
def test_the_top_of_the_list_is_the_top_of_all_paths_and_the_remainder_is_the_rest(name) -> None:
    model, _, _, cache = run_of(name)
    tokens = torch.tensor([3, 9, 1, 4])
    everything = expand_paths(model, cache, tokens, position=-3, top=None)
    top = expand_paths(model, cache, tokens, position=-3, top=7)
    sizes = [float(path.value.abs().mean()) for path in everything.paths]
    assert sizes == sorted(sizes, reverse=True)
    assert [float(path.value.abs().mean()) for path in top.paths] == pytest.approx(sizes[:7])
    rest = sum(path.value for path in everything.paths[7:])
    torch.testing.assert_close(top.remainder, rest, **EXACT)


# --- the search ------------------------------------------------------------------------------------------------------


# Attention alone with strong heads: there the longest paths are the largest.
STRONG = {"attn_only": True, "d_mlp": 0, "norm": None, "strength": 4.0}
BRANCH = {"bias_qkv": True, "branch_norm": True}


@pytest.mark.parametrize("budget", [1, 2, 9, 26])
@pytest.mark.parametrize("changes", [{}, BRANCH, STRONG], ids=["plain", "branch", "strong"])
def test_what_was_not_looked_at_is_known_exactly(budget, changes) -> None:
    model, cache = deep_model(**changes)
    everything = expand_paths(model, cache, CORRECT, WRONG, top=None)
    found = expand_paths(model, cache, CORRECT, WRONG, top=12, budget=budget)
    assert everything.proof == "enumeration"
    assert found.error < 1e-10 * max(1, float(found.total.abs().max()))
    assert found.n_found < found.n_paths == len(everything.paths)
    torch.testing.assert_close(sum(p.value for p in found.paths) + found.remainder, found.total, **EXACT)
    for suffix in found.unexpanded:
        deeper = [path for path in everything.paths if is_deeper(path.components, suffix.heads)]
        torch.testing.assert_close(suffix.total, sum(path.value for path in deeper), **EXACT)
        assert max(float(path.value.abs().mean()) for path in deeper) <= suffix.bound
    unseen = sum(sum(is_deeper(p.components, s.heads) for s in found.unexpanded) for p in everything.paths)
    assert found.n_found + unseen == found.n_paths


def is_deeper(components, suffix):
    """Whether a path ends in these heads and goes through another one below them."""
    carriers = tuple(Head(c.layer, c.head) for c in components if isinstance(c, Head | ValueBias))
    return len(carriers) > len(suffix) and carriers[-len(suffix) :] == suffix


def test_a_bound_proves_the_list_where_heads_are_weak() -> None:
    model, cache = deep_model(strength=0.1)
    everything = expand_paths(model, cache, CORRECT, WRONG, top=None)
    proven = expand_paths(model, cache, CORRECT, WRONG, top=5, budget=8)
    assert proven.proven
    assert proven.proof == "bound"
    assert proven.n_found < proven.n_paths
    assert [p.components for p in proven.paths] == [p.components for p in everything.paths[:5]]
    assert "proven the largest by bound" in repr(proven)


def test_a_list_that_is_not_proven_says_so() -> None:
    model, cache = deep_model()
    found = expand_paths(model, cache, CORRECT, WRONG, top=5, budget=1)
    assert not found.proven
    assert found.proof is None
    assert "not proven" in repr(found)


@given(seed=st.integers(0, 999), budget=st.integers(1, 40), top=st.integers(1, 30))
def test_a_proven_list_holds_the_largest_paths(seed, budget, top) -> None:
    model, cache = deep_model(n_layers=3, seed=seed, bias_qkv=bool(seed % 2))
    everything = expand_paths(model, cache, CORRECT, top=None)
    found = expand_paths(model, cache, CORRECT, top=top, budget=budget)
    torch.testing.assert_close(sum(p.value for p in found.paths) + found.remainder, everything.total, **EXACT)
    assert found.error < 1e-10
    if found.proven:
        sizes = [float(path.value.abs().mean()) for path in found.paths]
        assert sizes == pytest.approx([float(path.value.abs().mean()) for path in everything.paths[:top]])


@given(architecture=configs(), seed=st.integers(0, 99))
def test_all_paths_of_any_architecture_sum_to_the_logit(architecture, seed) -> None:
    model = make(architecture, seed=seed).requires_grad_(False)
    tokens = random_tokens(architecture, batch=2, pos=5, seed=seed)
    logits, cache = model.run_with_cache(tokens)
    if architecture.norm_placement == "post":
        with pytest.raises(ValueError, match="post-norm"):
            expand_paths(model, cache, CORRECT)
        return
    found = expand_paths(model, cache, CORRECT, top=None)
    total = sum(path.value for path in found.paths)
    cap = architecture.logit_softcap
    total = total if cap is None else cap * torch.tanh(total / cap)
    torch.testing.assert_close(total, logits[:, -1, CORRECT], rtol=1e-9, atol=1e-9)
    assert len(found.paths) == found.n_paths


# --- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["course", "branch_norm", "like_gemma2", "attn_only_no_norm"])
def test_all_routes_of_a_path_sum_to_its_value(name) -> None:
    model, _, _, cache = run_of(name)
    found = expand_paths(model, cache, CORRECT, WRONG, position=4, top=None, routes=400)
    for path in found.paths:
        for prompt, value in zip(path.routes, path.value.tolist(), strict=True):
            assert sum(route.value for route in prompt) == pytest.approx(value, abs=1e-10)
            assert len({route.positions for route in prompt}) == len(prompt)
            assert all(len(route.positions) == len(path.components) and route.positions[-1] == 4 for route in prompt)


def test_the_largest_routes_come_first() -> None:
    model, cache = deep_model()
    every = expand_paths(model, cache, CORRECT, WRONG, top=40, routes=2000)
    few = expand_paths(model, cache, CORRECT, WRONG, top=40, routes=3)
    lengths = set()
    for path, whole in zip(few.paths, every.paths, strict=True):
        lengths.add(len(path.components))
        for mine, all_of_them in zip(path.routes, whole.routes, strict=True):
            ranked = sorted(all_of_them, key=lambda route: -abs(route.value))
            assert [r.value for r in mine] == pytest.approx([r.value for r in ranked[:3]])
    assert max(lengths) >= 3


def test_a_route_is_the_product_of_its_hops() -> None:
    model, _, _, cache = run_of("attn_only_no_norm")
    found = expand_paths(model, cache, CORRECT, WRONG, top=None, routes=2)
    path = next(p for p in found.paths if p.components == (Embed(), Head(0, 2), Head(1, 1)))
    w = model.W_U[:, CORRECT] - model.W_U[:, WRONG]
    for row, prompt in enumerate(path.routes):
        for route in prompt:
            source, middle, end = route.positions
            carried = cache["embed"][row, source] @ model.OV[0, 2].AB @ model.OV[1, 1].AB @ w
            hops = cache["pattern", 0][row, 2, middle, source] * cache["pattern", 1][row, 1, end, middle]
            assert route.value == pytest.approx(float(hops * carried))


# --- runs of other kinds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["all_biases", "like_gemma2", "parallel_shared_norm"])
def test_paths_of_padded_prompts_are_those_of_the_prompts_alone(name, side) -> None:
    model = run_of(name)[0]
    prompts = random_prompts(model.config)
    tokens, mask = pad(prompts, side)
    _, cache = model.run_with_cache(tokens, attention_mask=mask)
    found = expand_paths(model, cache, CORRECT, WRONG, top=None)
    values = {path.components: path.value for path in found.paths}
    assert found.error < 1e-10
    for row, prompt in enumerate(prompts):
        alone = expand_paths(model, model.run_with_cache(prompt[None])[1], CORRECT, WRONG, top=None)
        for path in alone.paths:
            torch.testing.assert_close(values[path.components][row], path.value[0], **EXACT)


def test_knocked_out_attention_carries_biases_by_its_actual_row_sums() -> None:
    model, tokens, _, _ = run_of("all_biases")

    def knock_out(pattern, hook):
        pattern[:, 1, :, 3] = 0

    hooks = [("blocks.0.attn.hook_pattern", knock_out), ("blocks.1.attn.hook_pattern", knock_out)]
    logits, cache = model.run_with_cache(tokens, fwd_hooks=hooks)
    found = expand_paths(model, cache, CORRECT, WRONG, top=None)
    assert found.error < 1e-10
    torch.testing.assert_close(
        sum(path.value for path in found.paths), logits[:, -1, CORRECT] - logits[:, -1, WRONG], **EXACT
    )


def test_an_edit_that_no_path_explains_shows_in_the_error() -> None:
    model, tokens, _, _ = run_of("course")
    _, cache = model.run_with_cache(tokens, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 1.5)])
    found = expand_paths(model, cache, CORRECT, WRONG)
    assert found.error > 1e-3
    torch.testing.assert_close(sum(p.value for p in found.paths) + found.remainder, found.total, **EXACT)


def test_float32_paths_add_up_to_its_precision() -> None:
    model = make("course", dtype=torch.float32).requires_grad_(False)
    logits, cache = model.run_with_cache(random_tokens(model.config), needed_names(model.config))
    found = expand_paths(model, cache, CORRECT, WRONG)
    expected = logits[:, -1, CORRECT] - logits[:, -1, WRONG]
    torch.testing.assert_close(sum(p.value for p in found.paths) + found.remainder, expected, rtol=1e-5, atol=1e-5)
    assert found.error < 1e-5


def test_the_compiled_induction_head_copies_by_one_path() -> None:
    model, tokens = induction_head(), induction_tokens()
    _, cache = model.run_with_cache(tokens)
    found = expand_paths(model, cache, int(tokens[0, 8]), int(tokens[0, 9]), position=7, top=None, routes=1)
    first, *others = found.paths
    assert first.components == (Embed(), Head(1, 0))
    assert float(first.value) == pytest.approx(10, abs=1e-6)
    assert first.routes[0][0].positions == (2, 7)  # the token after the first occurrence of the one at 7
    assert max(abs(float(path.value)) for path in others) < 1e-6
    assert found.error < 1e-10


def test_the_table_of_an_expansion_ends_with_the_remainder() -> None:
    model, _, _, cache = run_of("course")
    found = expand_paths(model, cache, CORRECT, WRONG, top=3)
    frame = found.to_frame()
    assert list(frame.columns) == ["path", "n_heads", "batch", "value", "share"]
    assert frame["path"].iloc[-1] == "remainder"
    for row in range(4):
        assert frame.query("batch == @row")["value"].sum() == pytest.approx(float(found.total[row]))


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"position": None}, ValueError, "paths lead to one position"),
        ({"top": 0}, ValueError, "top must be at least 1, not 0"),
        ({"routes": -1}, ValueError, "routes must be at least 0"),
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"correct": 17}, IndexError, "correct: token 17 is not in a vocabulary of 17"),
        ({"position": 13}, IndexError, "position 13 is not in prompt 0"),
        ({"top": None, "budget": 3}, ValueError, r"all \d+ paths were asked for, which takes 4 expansions"),
    ],
)
def test_a_question_that_cannot_mean_anything_is_refused(arguments, error, message) -> None:
    model, _, _, cache = run_of("course")
    with pytest.raises(error, match=message):
        expand_paths(model, cache, **{"correct": CORRECT} | arguments)


def test_a_cache_that_lacks_activations_says_which() -> None:
    model, tokens, _, _ = run_of("course")
    _, cache = model.run_with_cache(tokens, lambda name: "pattern" not in name)
    with pytest.raises(KeyError, match=r"lacks blocks.0.attn.hook_pattern, blocks.1.attn.hook_pattern"):
        expand_paths(model, cache, CORRECT)


def test_nan_in_a_pattern_is_named_where_it_first_stands() -> None:
    model, tokens, _, _ = run_of("course")

    def spoil(pattern, hook):
        pattern[2, 1, 5, 3] = float("nan")

    _, cache = model.run_with_cache(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", spoil)])
    with pytest.raises(ValueError, match=r"blocks.1.attn.hook_pattern is nan first at batch 2, head 1, query 5, key 3"):
        expand_paths(model, cache, CORRECT, position=5)


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0"),
        (787_711, "787,711"),
        (10**12 - 1, "999,999,999,999"),
        (10**12, "1.000·10¹²"),
        (1_111_999_999_999_999, "1.111·10¹⁵"),
        (37 * 10**400, "3.700·10⁴⁰¹"),
    ],
)
def test_a_count_that_nobody_reads_digit_by_digit_is_a_power_of_ten(n, shown):
    assert counted(n) == shown
