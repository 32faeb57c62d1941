"""A recomputed cone against a full pass with hooks, over architectures, names, cells, edits, and sets of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import architectures
import batches
import pytest
import torch
from hypothesis import Phase, given, settings, strategies as st
from torch import Tensor
from unchecked import unchecked

from circuits import MLP, Attn, AttnBias, Block, Embed, Head, Neuron, PosEmbed
from circuits.components import MLPBias
from circuits.hooks import Hook
from circuits.model import HookedGPT
from circuits.names import block_names
from circuits.rerun import (
    Add,
    Apply,
    CutKeys,
    From,
    Intervention,
    Keep,
    ProjectOut,
    Put,
    Scale,
    Within,
    Zero,
    one_query,
    rerun,
)
from circuits.rerun.clean import clean_pass
from circuits.rerun.engine import recompute
from circuits.rerun.prepare import lanes_of

PER_HEAD = ("input", "hook_q", "hook_k", "hook_v", "rot_q", "rot_k", "hook_z", "hook_result", "scores", "pattern")
MATRICES = ("hook_attn_scores", "hook_pattern")
_MODELS: dict[Any, tuple[HookedGPT, Any]] = {}


@dataclass(frozen=True)
class Case:
    """An intervention and, written without the engine, what it does to one activation of a full pass."""

    intervention: Intervention
    name: str
    by_hook: Callable[[Tensor], Tensor]


def _tokens(side: str | None, config: Any) -> tuple[Tensor, Tensor | None]:
    if side is None:
        return batches.random_tokens(config), None
    return batches.pad(batches.random_prompts(config), side)


def _model(architecture: Any) -> tuple[HookedGPT, Any]:
    if architecture not in _MODELS:
        model = architectures.make(architecture)
        other = batches.random_tokens(model.config, seed=7)
        _MODELS[architecture] = model, model.run_with_cache(other, lambda name: True)[1].detach()
    return _MODELS[architecture]


Draw = Callable[[st.SearchStrategy[Any]], Any]


def _edit(draw: Draw, name: str, whole: Tensor, source: Tensor, cache: Any, seed: int) -> tuple[Any, Callable]:
    """An edit and its effect on the chosen piece [rows positions ...] of `whole`; `source` is another run's piece."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
    kinds = ["put", "scale", "add", "from", "apply"]
    if not name.endswith((*MATRICES, "hook_scale")):
        kinds += ["zero", "project", "within"]
    if name.endswith("hook_scale"):
        noise = noise.abs() + 0.5
    if name.endswith("scores"):
        kinds.remove("apply")
        kinds += ["cut"]
    kind = draw(st.sampled_from(kinds))
    direction = noise[0, 0].flatten()[: whole.shape[-1]]
    basis = torch.linalg.qr(direction[:, None])[0] @ torch.linalg.qr(direction[:, None])[0].T
    return {
        "put": (Put(noise), lambda old, pick: pick(noise)),
        "zero": (Zero(), lambda old, pick: torch.zeros_like(old)),
        "scale": (Scale(1.7), lambda old, pick: 1.7 * old),
        "add": (Add(noise, 0.5), lambda old, pick: old + 0.5 * pick(noise)),
        "from": (From(cache), lambda old, pick: pick(source)),
        "project": (ProjectOut(direction), lambda old, pick: old - old @ basis),
        "within": (Within(direction, noise), lambda old, pick: old + (pick(noise) - old) @ basis),
        "apply": (
            Apply(lambda x: 0.5 * x + x.mean(1, keepdim=True)),
            # A function is given whole matrices as they are, [rows head query key]; here the queries come first.
            lambda old, pick: 0.5 * old + old.mean(2 if name.endswith(MATRICES) and old.ndim == 4 else 1, keepdim=True),
        ),
        "cut": (CutKeys([0, 2]), lambda old, pick: _without(old, [0, 2])),
    }[kind]


def _without(scores: Tensor, keys: list[int]) -> Tensor:
    scores = scores.clone()
    scores[..., keys] = float("-inf")
    return scores


def _case(draw: Draw, architecture: Any, spans: list[tuple[int, int]]) -> Case:
    model, cache = _model(architecture)
    name = draw(st.sampled_from(model.hook_names))
    rows = draw(st.none() | st.lists(st.integers(0, batches.BATCH - 1), min_size=1, max_size=3, unique=True))
    own = list(range(batches.BATCH)) if rows is None else rows
    shortest = min(spans[row][1] - spans[row][0] + 1 for row in own)
    positions = draw(
        st.none()
        | st.lists(st.integers(0, shortest - 1), min_size=1, max_size=4, unique=True)
        | st.sampled_from([[-1], [-2, -1]])
    )
    source = cache[name]
    if source.shape[0] == 1:
        source = source.expand(batches.BATCH, *source.shape[1:])
    head_axis = 1 if name.endswith(MATRICES) else 2
    head = None
    if name.endswith(PER_HEAD) or ("_norm.hook" in name and "post" not in name and "q_norm" in name):
        head = draw(st.none() | st.integers(0, source.shape[head_axis] - 1))
    part = source if head is None else source.select(head_axis, head)
    edit, effect = _edit(draw, name, part, part, cache, draw(st.integers(0, 99)))

    def by_hook(activation: Tensor) -> Tensor:
        whole = activation.expand(batches.BATCH, *activation.shape[1:]).clone()
        view = whole if head is None else whole.select(head_axis, head)
        # Cells in front: [row position ...], a view that writes through.
        swap = name.endswith(MATRICES) and head is None
        cells = view.transpose(1, 2) if swap else view
        chosen = [_columns(positions, *spans[row]) for row in own]
        at = (torch.tensor(own)[:, None], torch.tensor([sorted(c) for c in chosen]))

        def pick(value: Tensor) -> Tensor:
            return (value.transpose(1, 2) if swap else value)[at]

        old = cells[at]
        cells[at] = effect(old, pick)
        return whole

    return Case(Intervention(name, edit, positions, rows, head), name, by_hook)


def _spans(mask: Tensor | None) -> list[tuple[int, int]]:
    """First and last real column of each row."""
    if mask is None:
        return [(0, batches.POS - 1)] * batches.BATCH
    real = [row.nonzero()[:, 0].tolist() for row in mask]
    return [(columns[0], columns[-1]) for columns in real]


def _columns(positions: list[int] | None, first: int, last: int) -> list[int]:
    if positions is None:
        return list(range(batches.POS))
    return [last + 1 + p if p < 0 else first + p for p in positions]


def hooked(model: HookedGPT, tokens: Tensor, mask: Tensor | None, cases: list[Case]) -> Tensor:
    def hook_for(case: Case) -> Callable[[Tensor, Hook], Tensor]:
        return lambda activation, hook: case.by_hook(activation)

    with torch.no_grad():
        return model.run_with_hooks(tokens, [(case.name, hook_for(case)) for case in cases], mask)


@settings(max_examples=70, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_rerun_equals_the_hooked_full_pass(data: st.DataObject) -> None:
    _assert_equal_to_hooks(data, data.draw(st.sampled_from(architectures.NAMES)))


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data(), architectures.configs())
def test_rerun_equals_the_hooked_full_pass_in_combinations_that_nobody_listed(data: st.DataObject, config: Any) -> None:
    _assert_equal_to_hooks(data, config)


def _assert_equal_to_hooks(data: st.DataObject, architecture: Any) -> None:
    model, _ = _model(architecture)
    tokens, mask = _tokens(data.draw(st.sampled_from([None, "left", "right"])), model.config)
    anywhere = [[3, 5], [12, 7, 1]] if mask is None else [[1, 0]]
    read = data.draw(st.none() | st.sampled_from([[-1], [0], [-2, -1], *anywhere]))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    sets = [[_case(data.draw, architecture, _spans(mask)) for _ in range(size)] for size in sizes]
    mine = rerun(
        model, tokens, [[c.intervention for c in cases] for cases in sets], attention_mask=mask, positions=read
    )
    for logits, cases in zip(mine, sets, strict=True):
        full = hooked(model, tokens, mask, cases)
        if read is not None:
            columns = torch.tensor([_columns(read, *span) for span in _spans(mask)])
            full = full[torch.arange(len(full))[:, None], columns]
        scale = max(1.0, float(full.abs().nan_to_num(0).max()))
        torch.testing.assert_close(logits, full, rtol=0, atol=1e-10 * scale, equal_nan=True)


def _zeroed(name: str, index: int | None) -> tuple[str, Callable[[Tensor, Hook], Tensor]]:
    def zero(activation: Tensor, hook: Hook) -> Tensor:
        (activation if index is None else activation.select(2, index)).zero_()
        return activation

    return name, zero


@pytest.mark.parametrize("architecture", architectures.NAMES)
def test_every_kind_of_component_ablated_is_its_hook_set_to_zero(architecture: str) -> None:
    model, _ = _model(architecture)
    tokens, mask = _tokens("left", model.config)
    last = model.config.n_layers - 1
    hooks = {Embed(): _zeroed("hook_embed", None), Head(0, 1): _zeroed("blocks.0.attn.hook_z", 1)}
    hooks[Attn(last)] = _zeroed(f"blocks.{last}.hook_attn_out", None)
    if model.config.positions == "learned":
        hooks[PosEmbed()] = _zeroed("hook_pos_embed", None)
    if model.config.has_mlp:
        hooks[MLP(0)] = _zeroed("blocks.0.hook_mlp_out", None)
        hooks[Neuron(last, 3)] = _zeroed(f"blocks.{last}.mlp.hook_post", 3)
    mine = rerun(model, tokens, [Intervention(component, Zero()) for component in hooks], attention_mask=mask)
    for logits, hook in zip(mine, hooks.values(), strict=True):
        full = model.run_with_hooks(tokens, [hook], mask)
        torch.testing.assert_close(logits, full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ["course", "post_norm", "parallel_two_norms", "attn_only", "like_gemma2"])
def test_dropping_a_block_leaves_the_identity(architecture: str) -> None:
    model, _ = _model(architecture)
    tokens = batches.random_tokens(model.config)
    stream: dict[str, Tensor] = {}
    for layer in (0, 1):
        names = block_names(layer)
        hooks = [
            (names.resid_pre, lambda x, hook: stream.__setitem__("before", x.clone())),
            (names.resid_post, lambda x, hook: stream["before"]),
        ]
        full = model.run_with_hooks(tokens, hooks)
        alone = rerun(model, tokens, [Intervention(Block(layer), Zero())])[0]
        torch.testing.assert_close(alone, full, rtol=0, atol=1e-10)
        head_first = [Intervention(Head(0, 0), Zero()), Intervention(Block(1), Zero())]
        with_head = model.run_with_hooks(tokens, [_zeroed("blocks.0.attn.hook_z", 0), *(hooks if layer else [])])
        if layer == 1:
            torch.testing.assert_close(rerun(model, tokens, [head_first])[0], with_head, rtol=0, atol=1e-10)
            last_only = rerun(model, tokens, [head_first], positions=-1)[0, :, 0]
            torch.testing.assert_close(last_only, with_head[:, -1], rtol=0, atol=1e-10)


def _dropped(component: Any, row: int, first: int) -> list[tuple[str, Any]]:
    """Hooks of a full pass that zero a component in one row, from one column on."""
    names, kept = block_names(component.layer), {}

    def zero(x: Tensor, hook: Hook) -> Tensor:
        if isinstance(component, Head):
            x[row, first:, component.head] = 0
        else:
            x[row, first:] = kept["before"][row, first:] if isinstance(component, Block) else 0
        return x

    keep = [(names.resid_pre, lambda x, hook: kept.__setitem__("before", x.clone()))]
    where = {Head: names.z, Attn: names.attn_out, MLP: names.mlp_out, Block: names.resid_post}[type(component)]
    return [*(keep if isinstance(component, Block) else []), (where, zero)]


@pytest.mark.parametrize("read", [None, -1], ids=["all_read", "last_read"])
@pytest.mark.parametrize("architecture", architectures.NAMES)
def test_lanes_that_each_change_one_row_do_not_mix(architecture: str, read: int | None) -> None:
    """Sets that begin at the same position in different rows, layers and stages share every pass, each by itself."""
    model, _ = _model(architecture)
    tokens, mask = _tokens("right", model.config)
    assert mask is not None
    parts = [Head(layer, head) for layer in (0, model.config.n_layers - 1) for head in (0, 1)]
    kinds = [Attn, MLP, Block] if model.config.has_mlp else [Attn, Block]
    parts += [kind(layer) for kind in kinds for layer in (0, model.config.n_layers - 1)]
    sets = [[(part, row, first)] for part in parts for row, first in ((0, 0), (1, 0), (3, 4), (0, 11))]
    sets += [[(Head(0, 1), 1, 3), (part, 1, 5)] for part in parts]  # a lane under way is edited again
    _assert_zeroed(model, tokens, mask, sets, read)
    for part in parts:  # one row under way, and one that begins elsewhere: what is read of them are other positions
        _assert_zeroed(model, tokens, mask, [[(Head(0, 1), 0, 0)], [(part, 1, 0)]], read)


def _assert_zeroed(model: HookedGPT, tokens: Tensor, mask: Tensor, sets: list[list[Any]], read: int | None) -> None:
    interventions = [
        [
            Intervention(part, Zero(), positions=range(first, batches.LENGTHS[row]), rows=[row])
            for part, row, first in one
        ]
        for one in sets
    ]
    mine = rerun(model, tokens, interventions, attention_mask=mask, positions=read)
    last = mask.sum(-1) - 1
    for one, logits in zip(sets, mine, strict=True):
        full = model.run_with_hooks(tokens, [hook for part in one for hook in _dropped(*part)], mask)
        if read is None:
            full, logits = full[mask.bool()], logits[mask.bool()]  # what stands under the padding was left alone
        else:
            full = full[torch.arange(len(full)), last][:, None]
        torch.testing.assert_close(logits, full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("component", [AttnBias(1), MLPBias(0)], ids=str)
def test_a_bias_set_to_zero_is_a_model_without_it(component: AttnBias | MLPBias) -> None:
    model, tokens = architectures.make("all_biases"), batches.random_tokens(architectures.config("all_biases"))
    mine = rerun(model, tokens, [Intervention(component, Zero())])[0]
    block = model.blocks[component.layer]
    bias = block.attn.b_O if isinstance(component, AttnBias) else block.mlp.b_out
    with torch.no_grad():
        bias.zero_()
        torch.testing.assert_close(mine, model(tokens), rtol=0, atol=1e-10)


@pytest.mark.parametrize("architecture", ["course", "rotary", "post_norm", "like_gemma2", "parallel_shared_norm"])
def test_frozen_patterns_and_scales_are_those_of_the_clean_run(architecture: str) -> None:
    model, _ = _model(architecture)
    tokens = batches.random_tokens(model.config)
    _, clean = model.run_with_cache(tokens)
    for freeze, tail in (("patterns", "hook_pattern"), ("norms", "hook_scale")):
        held = [name for name in model.hook_names if name.endswith(tail)]
        hooks = [(name, lambda x, hook: clean[hook.name]) for name in held]
        full = model.run_with_hooks(tokens, [_zeroed("blocks.0.attn.hook_z", 1), *hooks])
        mine = rerun(model, tokens, [Intervention(Head(0, 1), Zero())], freeze=[freeze])[0]
        torch.testing.assert_close(mine, full, rtol=0, atol=1e-10)
        assert not torch.allclose(mine, rerun(model, tokens, [Intervention(Head(0, 1), Zero())])[0])


def test_a_pass_narrowed_to_one_position_touches_no_more_than_the_cone() -> None:
    model, _ = _model("course")
    tokens = batches.random_tokens(model.config)
    seen: list[tuple[int, int]] = []

    original = torch.nn.functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((weight.shape[0], x.numel() // x.shape[-1]))
        return original(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        clean = clean_pass(model, tokens, None, {"blocks.1.attn.hook_z", "blocks.1.hook_resid_pre"})
        lanes = lanes_of(model, tokens, None, [Intervention(Head(1, 0), Zero(), positions=[4, 9])])
        patch.setattr(torch.nn.functional, "linear", counted)
        changed = recompute(clean, lanes, torch.full((batches.BATCH, 1), 9))
    assert {cells for _, cells in seen} == {batches.BATCH}
    assert changed.final.shape == (batches.BATCH, model.config.d_model)


# Under a soft cap a key's bias does not cancel in the softmax.
CAPPED = architectures.config("soft_caps").replace(bias_qkv=True)


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("architecture", [*architectures.NAMES, pytest.param(CAPPED, id="soft_caps_with_biases")])
def test_one_position_read_is_that_position_of_the_full_pass(architecture: Any, side: str | None) -> None:
    """In the last block the map of keys and values is moved behind the attention where the architecture allows it."""
    model, _ = _model(architecture)
    tokens, mask = _tokens(side, model.config)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        heads = one_query.heads
        patch.setattr(one_query, "heads", lambda *args: calls.append("moved") or heads(*args))
        early = [Intervention(Embed(), Scale(0.5), positions=[0, 1]), Intervention(Head(0, 1), Zero())]
        mine = rerun(model, tokens, early, attention_mask=mask, positions=-1)[:, :, 0]
    movable = model.config.positions != "rotary" and not model.config.qk_norm
    assert bool(calls) == movable
    last = torch.tensor([last for _, last in _spans(mask)])
    rows = torch.arange(batches.BATCH)
    whole = rerun(model, tokens, early, attention_mask=mask)[:, rows, last]
    torch.testing.assert_close(mine, whole, rtol=0, atol=1e-10)
    full = model.run_with_hooks(tokens, [_zeroed("blocks.0.attn.hook_z", 1)], mask)[rows, last]
    torch.testing.assert_close(mine[1], full, rtol=0, atol=1e-10)


BAD = {
    "no such hook": (Intervention("blocks.0.hook_resid_pr", Zero()), KeyError, "closest are blocks.0.hook_resid_pre"),
    "no such head": (Intervention("L0H9", Zero()), IndexError, "L0H9: head 9 is not in a model of 3 heads"),
    "no such layer": (Intervention(MLP(7), Zero()), IndexError, "layer 7"),
    "no head axis": (Intervention("hook_embed", Zero(), head=1), ValueError, "no head axis"),
    "head of a hook": (Intervention("blocks.0.hook_k_input", Zero(), head=3), IndexError, "3 heads"),
    "leaf": (Intervention("unembed_bias", Zero()), ValueError, "does not exist"),
    "position": (Intervention("L0H1", Zero(), positions=13), IndexError, "position 13 is not in row 0"),
    "row": (Intervention("L0H1", Zero(), rows=4), IndexError, "row 4 is not in a batch of 4 rows"),
    "shape": (Intervention("L0H1", Put(torch.zeros(3))), ValueError, r"shape \[.*\] at the cells to change"),
    "cut": (Intervention("L0H1", CutKeys([0])), ValueError, "CutKeys edits attention scores"),
}


SCORES = "blocks.0.attn.hook_attn_scores"
# Of the wrong kind: (what to make an intervention from, error, message).
MEANINGLESS = {
    "positions of text": (
        lambda: Intervention("L0H1", Zero(), "all"),
        TypeError,
        "positions must be a whole number or",
    ),
    "position 1.5": (
        lambda: Intervention("L0H1", Zero(), [1.5]),
        TypeError,
        "position must be a whole number, not 1.5",
    ),
    "no position": (lambda: Intervention("L0H1", Zero(), []), ValueError, "no position was given"),
    "empty mask": (
        lambda: Intervention("L0H1", Zero(), torch.zeros(batches.BATCH, batches.POS, dtype=torch.bool)),
        ValueError,
        "at L0H1 marks none: no position was given",
    ),
    "no row": (lambda: Intervention("L0H1", Zero(), rows=[]), ValueError, "no row was given"),
    "rows of text": (lambda: Intervention("L0H1", Zero(), rows="a"), TypeError, "rows must be a whole number or"),
    "head of text": (
        lambda: Intervention("blocks.0.attn.hook_z", Zero(), head="a"),
        TypeError,
        "head of blocks.0.*'a'",
    ),
    "put": (lambda: Put(0.5), TypeError, "the value of Put must be a tensor, not 0.5"),
    "from": (lambda: From(None), TypeError, "the cache of From must be an ActivationCache, not None"),
    "scale": (lambda: Scale("x"), TypeError, "the factor of Scale must be a number or a tensor, not 'x'"),
    "add": (lambda: Add(None), TypeError, "the direction of Add must be a tensor, not None"),
    "coefficient": (lambda: Add(torch.ones(5), "x"), TypeError, "the coefficient of Add must be a number, not 'x'"),
    "project": (lambda: ProjectOut([1.0]), TypeError, "the directions of ProjectOut must be a tensor"),
    "within": (lambda: Within(torch.ones(5), 1), TypeError, "the value of Within must be a tensor or"),
    "apply": (lambda: Apply(3), TypeError, "the function of Apply must be a function, not 3"),
    "no key": (lambda: Intervention(SCORES, CutKeys([])), ValueError, "no key was given"),
    "key -1": (lambda: Intervention(SCORES, CutKeys([-1])), ValueError, "columns of the prompts, from 0 on, not -1"),
}


@pytest.mark.parametrize("case", MEANINGLESS)
def test_what_an_intervention_cannot_mean_is_refused_by_name(case: str) -> None:
    make, error, message = MEANINGLESS[case]
    model, _ = _model("course")
    with unchecked(), pytest.raises(error, match=message):
        rerun(model, batches.random_tokens(model.config), [make()])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "interventions must be a list of interventions, .* not None"),
        (Intervention("L0H1", Zero()), "interventions must be a list of interventions"),
        ([3.5], "set 0 must be an Intervention or a list of them, not 3.5"),
        (["L0H1"], "set 0 must be an Intervention or a list of them, not 'L0H1'"),
    ],
)
def test_what_is_no_list_of_interventions_is_refused(given: Any, message: str) -> None:
    model, _ = _model("course")
    with unchecked(), pytest.raises(TypeError, match=message):
        rerun(model, batches.random_tokens(model.config), given)


def test_one_name_freezes_like_a_list_of_one() -> None:
    model, _ = _model("course")
    tokens, sets = batches.random_tokens(model.config), [Intervention("L0H1", Zero())]
    assert torch.equal(rerun(model, tokens, sets, freeze="norms"), rerun(model, tokens, sets, freeze=["norms"]))


def test_a_mask_may_leave_a_prompt_alone() -> None:
    model, _ = _model("course")
    tokens = batches.random_tokens(model.config)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[1:, 5] = True
    changed = rerun(model, tokens, [Intervention("L0H1", Zero(), mask)])[0]
    clean = model(tokens).detach()
    torch.testing.assert_close(changed[0], clean[0], rtol=0, atol=1e-12)
    assert all(not torch.allclose(changed[row], clean[row], atol=1e-6) for row in range(1, len(tokens)))


@pytest.mark.parametrize("case", BAD)
def test_bad_interventions_are_refused_by_name(case: str) -> None:
    intervention, error, message = BAD[case]
    model, _ = _model("course")
    with pytest.raises(error, match=message):
        rerun(model, batches.random_tokens(model.config), [intervention])


def test_hooks_of_an_enclosing_block_are_refused_not_ignored() -> None:
    model, _ = _model("course")
    with (
        model.hooks([("hook_embed", lambda x, hook: x * 2)]),
        pytest.raises(ValueError, match="takes its interventions as arguments"),
    ):
        rerun(model, batches.random_tokens(model.config), [Intervention("L0H1", Zero())])


@pytest.mark.parametrize(
    "edit",
    [Apply(lambda x: x - x.mean(1, keepdim=True)), Keep(), "from", "within"],
    ids=["function", "keep", "from", "within"],
)
def test_a_bias_takes_no_edit_that_is_of_a_run(edit: Any) -> None:
    model, tokens = architectures.make("all_biases"), batches.random_tokens(architectures.config("all_biases"))
    cache = model.run_with_cache(tokens)[1].detach()
    edits = {"from": From(cache), "within": Within(torch.ones(model.config.d_model), cache)}
    with pytest.raises(ValueError, match="is a parameter, the same in every run and at every position"):
        rerun(model, tokens, [Intervention(AttnBias(1), edits.get(edit, edit) if isinstance(edit, str) else edit)])


def test_a_function_wants_as_many_positions_in_every_row() -> None:
    model, _ = _model("course")
    tokens = batches.random_tokens(model.config)
    where = torch.zeros(tokens.shape, dtype=torch.bool)
    where[0, 2], where[1, 3:5] = True, True
    with pytest.raises(ValueError, match=r"as many positions in every row; the intervention names \[1, 2\]"):
        rerun(model, tokens, [Intervention(block_names(0).resid_mid, Apply(lambda x: 2 * x), where)])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func's own
@pytest.mark.parametrize("act", ["relu", "gelu"])
def test_a_pass_outside_the_engine_writes_over_nothing(act: str) -> None:
    """Transforms of torch.func refuse it: one parameter in many versions, and forward under reverse mode."""
    config = architectures.config("course").replace(gated_mlp=True, act=act, attn_softcap=5.0)
    model = HookedGPT(config).double()
    tokens = batches.random_tokens(config)
    params = {name: value.detach() for name, value in model.named_parameters()}
    name = "blocks.0.mlp.up.weight"

    def loss(value: Tensor) -> Tensor:
        return torch.func.functional_call(model, {**params, name: value}, (tokens,)).square().mean()

    versions = torch.stack([params[name], 2 * params[name]])
    apart = torch.stack([loss(value) for value in versions])
    assert torch.allclose(torch.func.vmap(loss)(versions), apart, atol=1e-12)
    along = torch.func.grad(lambda value: torch.func.jvp(loss, (value,), (torch.ones_like(value),))[1])
    assert along(params[name]).isfinite().all()
