"""What every function of a model refuses alike: no model, no cache, no whole number, weights that are not finite."""

from __future__ import annotations

import pytest
import torch
from small_models import small_model
from unchecked import unchecked

import analysis
from analysis.ablation import ablate_all_but, ablate_in_order, knock_out_attention, reorder_blocks
from analysis.composition import component_composition, composition_scores
from analysis.geometry import head_diversity, stream_bandwidth
from analysis.matching import match_heads
from analysis.metrics import logit_diff
from analysis.patterns import repeated_tokens
from analysis.ranks import copying_scores, head_ranks, layer_ranks, score_ranks
from analysis.tasks import (
    PromptPairs,
    greater_than,
    indirect_object,
    read_pairs,
    repeated_tokens as repeated_pairs,
)
from analysis.uncertainty import bootstrap_interval, false_discovery
from circuits.full_circuits import full_ov, full_qk, singular_directions, top_entries
from circuits.gauge import canonical, fibre_dimension, transform_ov, transform_qk
from circuits.paths import expand_paths, expand_scores, expand_weights, virtual_head
from circuits.processing import center_unembed, center_writing_weights, fold_ln, fold_value_biases
from circuits.residual import decompose, direct_logit_attribution, logit_lens

R = torch.eye(5, dtype=torch.float64)
TOKENS = torch.tensor([[1, 5, 9, 3, 5], [2, 7, 7, 1, 4]])
METRIC = logit_diff(torch.tensor([1, 2]), torch.tensor([3, 4]))

# Of weights: each names the first weight that is not finite.
OF_WEIGHTS = {
    "head_ranks": head_ranks,
    "head_ranks full": lambda m: head_ranks(m, full=True),
    "layer_ranks": layer_ranks,
    "copying_scores": copying_scores,
    "composition_scores": lambda m: composition_scores(m, "K"),
    "component_composition": lambda m: component_composition(m, "unembed"),
    "match_heads": lambda m: match_heads(m, m),
    "full_ov": lambda m: full_ov(m, 0, 1),
    "full_qk": lambda m: full_qk(m, 0, 1),
    "singular_directions": lambda m: singular_directions(m, 0, 1),
    "virtual_head": lambda m: virtual_head(m, "L0H1", "L1H0"),
    "transform_qk": lambda m: transform_qk(m, 0, 1, R),
    "transform_ov": lambda m: transform_ov(m, 0, 1, R),
    "canonical": canonical,
    "fibre_dimension": lambda m: fibre_dimension(m, 0, 1, "QK"),
    "fold_ln": fold_ln,
    "center_writing_weights": center_writing_weights,
    "center_unembed": center_unembed,
    "fold_value_biases": fold_value_biases,
    "stream_bandwidth": stream_bandwidth,
}
OF_RUNS = {
    "attention_patterns": lambda m: analysis.attention_patterns(m, TOKENS),
    "head_scores": analysis.head_scores,
    "score_ranks": lambda m: score_ranks(m, TOKENS),
    "logit_attribution": lambda m: analysis.logit_attribution(m, TOKENS, 1, 2),
    "logit_paths": lambda m: analysis.logit_paths(m, TOKENS, 1, 2),
    "ablate": lambda m: analysis.ablate(m, TOKENS, "heads"),
    "activation_patch": lambda m: analysis.activation_patch(m, TOKENS, TOKENS.flip(1), metric=METRIC),
}
OTHERS = {
    "expand_weights": expand_weights,
    "expand_scores": lambda m: expand_scores(m, "L1H0"),
    "path_patch": lambda m: analysis.path_patch(m, TOKENS, TOKENS.flip(1), metric=METRIC),
    "decompose": lambda m: decompose(m, None),
    "direct_logit_attribution": lambda m: direct_logit_attribution(m, None, 1),
    "logit_lens": lambda m: logit_lens(m, None),
    "expand_paths": lambda m: expand_paths(m, None, 1),
    "repeated_tokens": lambda m: repeated_tokens(m, 3),
    "repeated_pairs": repeated_pairs,
    "head_diversity": lambda m: head_diversity(m, TOKENS),
    "verify": analysis.verify,
}
ALL = OF_WEIGHTS | OF_RUNS | OTHERS


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_model_is_refused_with_how_to_get_one(name) -> None:
    for given, message in (
        ("shakespeare", r"expected a HookedGPT, not the text 'shakespeare'; circuits\.load"),
        (small_model().config, r"expected a HookedGPT, not a GPTConfig; HookedGPT\(config\)"),
        (None, "expected a HookedGPT, not NoneType"),
    ):
        with unchecked(), pytest.raises(TypeError, match=message):
            ALL[name](given)


@pytest.mark.parametrize("name", ["parameter_table", "flops"])
def test_counting_takes_a_model_or_a_config_and_nothing_else(name) -> None:
    arguments = () if name == "parameter_table" else (4,)
    with unchecked(), pytest.raises(TypeError, match="expected a model or a GPTConfig, not 'shakespeare'"):
        getattr(analysis, name)("shakespeare", *arguments)


@pytest.mark.parametrize("name", ["decompose", "direct_logit_attribution", "logit_lens", "expand_paths"])
def test_what_is_no_cache_is_refused_with_how_to_get_one(name) -> None:
    with unchecked(), pytest.raises(TypeError, match=r"expected an ActivationCache, the second of what.*not NoneType"):
        OTHERS[name](small_model())


@pytest.mark.parametrize("name", OF_WEIGHTS | OF_RUNS)
def test_nan_is_named_by_the_weight_where_it_stands(name) -> None:
    model = small_model()
    weight = "unembed.weight" if name == "component_composition" else "blocks.0.attn.qkv.weight"
    with torch.no_grad():
        # Rows of the query, key and value of head 1.
        for row in (3,) if weight == "unembed.weight" else (7, 22, 37):
            model.get_parameter(weight)[row, 2] = float("nan")
    first = 3 if weight == "unembed.weight" else 7
    with pytest.raises(ValueError, match=rf"weight {weight} is nan at \[{first}, 2\]"):
        (OF_WEIGHTS | OF_RUNS)[name](model)


@pytest.mark.parametrize(
    ("call", "weight"),
    [
        (lambda m: full_qk(m, 0, 1), "blocks.0.ln1.b"),
        (lambda m: full_ov(m, 0, 1), "blocks.0.ln1.b"),
        (lambda m: singular_directions(m, 0, 1), "unembed.weight"),
        (lambda m: head_ranks(m, full=True), "embed.weight"),
        (lambda m: component_composition(m, "Q"), "pos_embed.weight"),
        (lambda m: analysis.ablate(m, TOKENS, "heads"), "unembed.weight"),
    ],
)
def test_nan_beside_the_heads_own_weights_is_named_too(call, weight) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_parameter(weight).view(-1)[0] = float("nan")
    with pytest.raises(ValueError, match=f"weight {weight} is nan at"):
        call(model)


def test_nan_in_the_matrix_of_a_path_is_named() -> None:
    model = small_model(attn_only=True, d_mlp=0, norm=None, final_norm=False)
    with torch.no_grad():
        model.get_parameter("embed.weight")[2, 1] = float("nan")
    for path in (expand_weights(model)[0], expand_scores(model, "L1H0")[0]):
        with pytest.raises(ValueError, match=r"weight embed.weight is nan at \[2, 1\]"):
            path.matrix()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: head_ranks(m, "QK"), TypeError, "raw must be True or False, not 'QK'"),
        (lambda m: head_ranks(m, offset=1.5), TypeError, "offset must be a whole number, not 1.5"),
        (lambda m: full_ov(m, "L0H1", 0), TypeError, "layer must be a whole number, not 'L0H1'"),
        (lambda m: full_ov(m, True, 0), TypeError, "layer must be a whole number, not True"),
        (lambda m: full_ov(m, 0, 0).top_entries(2.5), TypeError, "k must be a whole number"),
        (lambda m: top_entries(torch.ones(3, 3)), TypeError, "expected a FactoredMatrix, not Tensor"),
        (lambda m: fibre_dimension(m, 0.5, 0, "QK"), TypeError, "layer must be a whole number"),
        (lambda m: transform_qk(m, 0, 0, torch.eye(5).long()), TypeError, "gauge matrix R of real .* torch.int64"),
        (lambda m: transform_qk(m, 0, 0, torch.eye(5).cfloat()), TypeError, "not torch.complex64"),
        (lambda m: transform_ov(m, 0, 0, [[1.0]]), TypeError, "a tensor, not list"),
        (lambda m: singular_directions(m, 0, 0, n=0), ValueError, "n must be at least 1, not 0"),
        (lambda m: singular_directions(m, 0, 0, tokens=-2), ValueError, "tokens must be at least 1, not -2"),
        (lambda m: singular_directions(m, 0, 0, "OV", offset=3), ValueError, "offset 3 belongs to the QK circuit"),
        (lambda m: composition_scores(m, "Q").strongest(-1), ValueError, "k must be at least 0, not -1"),
        (lambda m: analysis.logit_paths(m, TOKENS, top=1.5), TypeError, "top must be a whole number"),
        (lambda m: analysis.logit_paths(m, TOKENS, routes=True), TypeError, "routes must be a whole number"),
        (lambda m: analysis.logit_paths(m, TOKENS, position=None), ValueError, "one position of each prompt"),
        (
            lambda m: analysis.logit_attribution(m, TOKENS, position="last"),
            TypeError,
            "position must be a whole number",
        ),
        (lambda m: analysis.logit_attribution(m, TOKENS, batch_size=0), ValueError, "batch_size must be at least 1"),
        (lambda m: analysis.logit_attribution(m, TOKENS, 1.5), TypeError, "correct must be token ids"),
        (lambda m: repeated_pairs(m, 3, seed=1.5), TypeError, "seed must be a whole number, not 1.5"),
        (lambda m: analysis.ablate(m, TOKENS, "heads", "resample", seed="a"), TypeError, "seed must be a whole number"),
        (lambda m: stream_bandwidth(m, 3, seed=0.5), TypeError, "seed must be a whole number, not 0.5"),
        (lambda m: bootstrap_interval(torch.ones(1, 3), torch.ones(3), seed=0.5), TypeError, "seed must be a whole"),
    ],
)
def test_a_number_or_a_name_of_the_wrong_kind_is_named(call, error, message) -> None:
    model = small_model()
    with unchecked(), pytest.raises(error, match=message):
        call(model)


POSITIONS = "positions must be a whole number or a list of them, not "
ABLATE = [
    ({"components": None}, TypeError, "components must be one of 'heads', .* or a list of them, not None"),
    ({"components": 3.5}, TypeError, "components must be one of .*, not 3.5"),
    ({"method": None}, TypeError, "method must be one of 'zero', 'mean', 'resample', not None"),
    ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor, .* not 4"),
    ({"budget": "1GB"}, TypeError, r"budget \(bytes\) must be a whole number, not '1GB'"),
    ({"budget": True}, TypeError, r"budget \(bytes\) must be a whole number, not True"),
    ({"budget": -1}, ValueError, r"budget \(bytes\) must be at least 1, not -1"),
    ({"budget": 0}, ValueError, r"budget \(bytes\) must be at least 1, not 0"),
    ({"seed": "x"}, TypeError, "seed must be a whole number, not 'x'"),
    ({"level": "x"}, TypeError, "level must be a number between 0 and 1, not 'x'"),
    ({"level": 95}, ValueError, "level must lie between 0 and 1, not 95"),
    ({"resume": 3}, TypeError, "resume must be the path of a file, or None, not 3"),
    ({"progress": "no"}, TypeError, "progress must be True or False, not 'no'"),
    ({"per_position": 1}, TypeError, "per_position must be True or False, not 1"),
    ({"pairs": "yes"}, TypeError, "pairs must be True or False, not 'yes'"),
    ({"freeze": 3}, TypeError, "freeze must be 'patterns' or 'norms', or a list of them, not 3"),
    ({"positions": "all"}, TypeError, f"{POSITIONS}'all'"),
    ({"positions": 1.5}, TypeError, f"{POSITIONS}1.5"),
    ({"positions": [0, 1.5]}, TypeError, "position must be a whole number, not 1.5"),
    ({"positions": True}, TypeError, "position must be a whole number, not True"),
    ({"positions": torch.tensor([0.5])}, ValueError, r"have shape \[1\], expected \[2, 5\]"),
    ({"positions": torch.full((2, 5), 0.5)}, TypeError, "must hold only 0 and 1"),
    ({"positions": []}, ValueError, "no position was given"),
    ({"positions": torch.zeros(2, 5, dtype=torch.bool)}, ValueError, "L0H0 marks none: no position was given"),
    ({"reference": "text"}, TypeError, "expected token ids"),
    ({"reference_mask": torch.ones(2, 5)}, ValueError, "reference_mask was given without reference"),
    ({"method": "resample", "attention_mask": 3.5}, TypeError, "attention_mask must be a tensor of 0 and 1, not float"),
    ({"metric": logit_diff(1, 2, -9)}, IndexError, "position -9 is not in row 0"),
]
PATCH = [
    ({"site": ["head"]}, ValueError, "site .* is not one of"),
    ({"by_position": None}, TypeError, "by_position must be True or False, not None"),
    ({"normalise": "no"}, TypeError, "normalise must be True or False, not 'no'"),
    ({"alignment": "x"}, TypeError, "alignment must hold columns of corrupt, not 'x'"),
    ({"alignment": [0.0] * 5}, TypeError, "alignment must hold columns of corrupt, which are whole numbers"),
    *[case for case in ABLATE if set(case[0]) <= {"executor", "budget", "seed", "level", "resume", "freeze"}],
]
PATHS = [
    ({"senders": 3.5}, TypeError, "senders must be 'heads', .* not 3.5"),
    ({"receivers": None}, TypeError, "receivers must be 'heads', .* not None"),
    ({"receivers": []}, ValueError, "receivers must be 'heads', .* not "),
    ({"inputs": 3}, TypeError, "inputs of heads must be a list of q, k, v, not 3"),
    *PATCH[-9:],
]


@pytest.mark.parametrize(("options", "error", "message"), ABLATE)
def test_an_argument_of_ablate_that_can_mean_nothing_is_named(options, error, message) -> None:
    model = small_model()
    with unchecked(), pytest.raises(error, match=message):
        analysis.ablate(model, TOKENS, **{"progress": False, **options})


@pytest.mark.parametrize(
    ("call", "options", "error", "message"),
    [(analysis.activation_patch, *case) for case in PATCH] + [(analysis.path_patch, *case) for case in PATHS],
)
def test_an_argument_of_patching_that_can_mean_nothing_is_named(call, options, error, message, tmp_path) -> None:
    model = small_model()
    with unchecked(), pytest.raises(error, match=message):
        call(model, TOKENS, TOKENS.flip(1), **{"metric": METRIC, "progress": False, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: reorder_blocks(m, TOKENS, [1, 0]), TypeError, r"a list of orders, .* \[\[1, 0\]\]; 1 is no order"),
        (lambda m: reorder_blocks(m, TOKENS, "10"), TypeError, "orders must be a list of orders, .* not '10'"),
        (lambda m: reorder_blocks(m, TOKENS, [[1, 0.5]]), TypeError, "layer must be a whole number, not 0.5"),
        (lambda m: reorder_blocks(m, TOKENS, [[1, 0]], level="x"), TypeError, "level must be a number"),
        (lambda m: ablate_in_order(m, TOKENS, None), TypeError, "order must be one of .* not None"),
        (lambda m: ablate_all_but(m, TOKENS, 2), TypeError, "kept must be one of .* not 2"),
        (lambda m: knock_out_attention(m, TOKENS, 1.5), TypeError, "keys must be a whole number .* not 1.5"),
        (lambda m: knock_out_attention(m, TOKENS, True), TypeError, "key must be a whole number, not True"),
        (lambda m: knock_out_attention(m, TOKENS, []), ValueError, "no key was given"),
        (lambda m: knock_out_attention(m, TOKENS, 1, []), ValueError, "no position was given"),
        (lambda m: logit_diff(1.5, 2), TypeError, "correct must be token ids, which are whole numbers, not 1.5"),
        (lambda m: logit_diff(1, torch.tensor([2.0])), TypeError, "wrong must be token ids, which are whole numbers"),
        (lambda m: logit_diff(None, 2), TypeError, "correct must be a token id, or one for each prompt, not None"),
        (lambda m: logit_diff(1, 2, 0.5), TypeError, "position must be a whole number, not 0.5"),
        (lambda m: logit_diff([1, 2], [3, 4, 5]), ValueError, r"correct has shape \[2\] and wrong \[3\]"),
        (lambda m: indirect_object(m, batch=2.5), TypeError, "batch must be a whole number, not 2.5"),
        (lambda m: greater_than(m, length="x"), TypeError, "length must be a whole number, not 'x'"),
        (lambda m: repeated_pairs(m, 3.5), TypeError, "n must be a whole number, not 3.5"),
        (lambda m: read_pairs(3), TypeError, "path must be that of a file of pairs, not 3"),
        (lambda m: PromptPairs("x", TOKENS, TOKENS, 1, TOKENS[0]), TypeError, "correct of a PromptPairs must be"),
        (lambda m: false_discovery(torch.ones(2), "x"), TypeError, "the false-discovery rate must be a number"),
    ],
)
def test_what_an_intervention_cannot_be_given_is_named(call, error, message) -> None:
    model = small_model()
    with unchecked(), pytest.raises(error, match=message):
        call(model)


def test_a_direction_that_is_not_finite_is_named() -> None:
    model = small_model()
    _, cache = model.run_with_cache(TOKENS)
    direction = torch.ones(7, dtype=torch.float64)
    direction[3] = float("nan")
    with pytest.raises(ValueError, match=r"the direction is nan at \[3\]"):
        direct_logit_attribution(model, cache, direction)


def test_each_prompt_may_have_a_position_of_its_own() -> None:
    model = small_model()
    both = analysis.logit_attribution(model, TOKENS, 1, 2, position=[2, -1], batch_size=1)
    for row, position in enumerate((2, -1)):
        one = analysis.logit_attribution(model, TOKENS[row : row + 1], 1, 2, position=position)
        torch.testing.assert_close(both.value[:, row], one.value[:, 0])
    paths = analysis.logit_paths(model, TOKENS, 1, 2, position=torch.tensor([2, 4]))
    torch.testing.assert_close(paths.total, both.total)
