"""Ablations against runs edited by hand, and the compiled induction head's known losses."""

import math

import compiled
import pytest
import torch
from unchecked import unchecked

from analysis.ablation import ablate
from analysis.ablation.planning import cells_of
from analysis.ablation.replacements import other_rows, sum_over_real
from analysis.metrics import kl_divergence, logit_diff, loss_per_prompt
from circuits import MLP, Attn, AttnBias, Block, Embed, GPTConfig, Head, HookedGPT, Neuron, PosEmbed
from circuits.rerun import Intervention, Put

ARCHITECTURES = {
    "lecture": {},
    "post_norm": {"norm_placement": "post"},
    "parallel": {"parallel_blocks": "shared_norm", "norm": "rmsnorm"},
    "grouped_rotary": {"positions": "rotary", "rotary_dim": 4, "n_kv_heads": 1, "gated_mlp": True, "bias_qkv": True},
    "branch_norm": {"branch_norm": True},
}


def model_of(name="lecture", **changes):
    sizes = {"n_layers": 2, "n_heads": 3, "d_head": 5, "d_model": 7, "d_mlp": 11, "n_ctx": 19, "d_vocab": 17}
    config = GPTConfig(**{**sizes, **ARCHITECTURES[name], **changes})
    model = HookedGPT(config, seed=2, dtype=torch.float64)
    # At their initial size the branches of so small a model hardly matter, and biases are 0.
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def prompts(batch=4, pos=13):
    return torch.randint(17, (batch, pos), generator=torch.Generator().manual_seed(3))


def edited(model, tokens, name, change):
    def hook(activation, hook):
        change(activation)

    return model.run_with_hooks(tokens, [(name, hook)])


def zeroed(part):
    def change(activation):
        activation[part] = 0

    return change


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_zero_ablation_is_the_hand_edited_run(name):
    model, tokens = model_of(name), prompts()
    cases = {
        Head(1, 2): ("blocks.1.attn.hook_z", zeroed((slice(None), slice(None), 2))),
        Neuron(0, 5): ("blocks.0.mlp.hook_post", zeroed((..., 5))),
        MLP(0): ("blocks.0.hook_mlp_out", zeroed(...)),
        Attn(1): ("blocks.1.hook_attn_out", zeroed(...)),
        Embed(): ("hook_embed", zeroed(...)),
    }
    found = ablate(model, tokens, list(cases), metric="loss", progress=False)
    clean = loss_per_prompt(model(tokens), tokens)
    assert torch.allclose(found.clean, clean, atol=1e-12)
    for row, (component, (hook, change)) in enumerate(cases.items()):
        expected = loss_per_prompt(edited(model, tokens, hook, change), tokens) - clean
        assert torch.allclose(found.effect[row], expected, atol=1e-10), component
        assert expected.abs().max() > 1e-6, component


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_dropped_block_is_the_identity(name):
    model, tokens = model_of(name), prompts()
    _, cache = model.run_with_cache(tokens)
    for layer in range(2):
        found = ablate(model, tokens, [Block(layer)], metric=lambda z: z.sum((1, 2)), progress=False)

        def skip(activation, hook, layer=layer):
            return cache["resid_pre", layer]

        expected = model.run_with_hooks(tokens, [(f"blocks.{layer}.hook_resid_post", skip)])
        assert torch.allclose(found.clean + found.effect[0], expected.sum((1, 2)), atol=1e-9)


def test_dropping_every_block_leaves_the_embedding():
    model, tokens = model_of(), prompts()
    found = ablate(model, tokens, [(Block(0), Block(1))], metric=lambda z: z.sum((1, 2)), progress=False)
    x = model.W_E[tokens] + model.W_pos[:13]
    expected = model.unembedding(x).sum((1, 2))
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-10)


@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
def test_ablating_a_head_at_z_equals_ablating_its_result(method):
    model, tokens = model_of(bias_qkv=True), prompts()
    options = {"reference": prompts(6, 9)} if method == "mean" else {}
    found = ablate(model, tokens, [Head(0, 1)], method=method, metric=lambda z: z[:, -1, 3], progress=False, **options)
    source = options.get("reference", tokens)
    _, cache = model.run_with_cache(source, names_filter="blocks.0.attn.hook_result")
    result = cache["result", 0][:, :, 1]
    new = torch.zeros(1, 1, 7, dtype=torch.float64)
    if method == "mean":
        new = result.mean((0, 1), keepdim=True)
    elif method == "resample":
        new = result[other_rows(tokens, torch.Generator().manual_seed(0))]

    def replace(activation, hook):
        activation[:, :, 1] = new

    expected = model.run_with_hooks(tokens, [("blocks.0.attn.hook_result", replace)])[:, -1, 3]
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-10)


def test_components_of_a_tuple_are_ablated_together():
    model, tokens = model_of(), prompts()
    pair = (Head(0, 0), Head(0, 2))
    found = ablate(model, tokens, [pair, *pair], progress=False)

    def both(activation, hook):
        activation[:, :, [0, 2]] = 0

    expected = loss_per_prompt(model.run_with_hooks(tokens, [("blocks.0.attn.hook_z", both)]), tokens)
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-10)
    assert not torch.allclose(found.effect[0], found.effect[1] + found.effect[2], atol=1e-6)


def test_ablation_at_chosen_positions_leaves_the_others():
    model, tokens = model_of(), prompts()
    found = ablate(model, tokens, [MLP(1)], metric=lambda z: z[:, 11, 3], positions=[3, -1], progress=False)
    assert torch.equal(found.effect, torch.zeros_like(found.effect))
    found = ablate(model, tokens, [MLP(1)], metric=lambda z: z[:, 12, 3], positions=[3, -1], progress=False)
    full = ablate(model, tokens, [MLP(1)], metric=lambda z: z[:, 12, 3], progress=False)
    assert torch.allclose(found.effect, full.effect, atol=1e-12)


def test_padding_changes_no_effect():
    model, tokens = model_of(), prompts(batch=3, pos=9)
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), tokens], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    for metric in ("loss", "kl", logit_diff(1, 2)):
        expected = ablate(model, tokens, metric=metric, positions=[0, -1], progress=False)
        found = ablate(model, padded, metric=metric, positions=[0, -1], attention_mask=mask, progress=False)
        assert torch.allclose(found.effect, expected.effect, atol=1e-9)
        assert torch.allclose(found.mean, expected.mean, atol=1e-9)


def test_a_mean_counts_padding_in_neither_sum_nor_divisor():
    """Field report 26: a mean over a padded reference is that of the same prompts, each by itself."""
    model, tokens = model_of(), prompts()
    padded = torch.cat([torch.full((5, 4), 3), prompts(5, 9)], dim=1)
    mask = torch.ones_like(padded)
    mask[:3, :4], mask[3:, 9:] = 0, 0
    _, cache = model.run_with_cache(padded, attention_mask=mask)
    written = torch.cat([cache["z", 0][row, mask[row].bool(), 1] for row in range(5)])

    def replace(activation, hook):
        activation[:, :, 1] = written.mean(0)

    expected = loss_per_prompt(model.run_with_hooks(tokens, [("blocks.0.attn.hook_z", replace)]), tokens)
    options = {"reference": padded, "reference_mask": mask, "progress": False}
    found = ablate(model, tokens, [Head(0, 1)], "mean", **options)
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-12)
    values, real = torch.arange(24.0).reshape(2, 4, 3), torch.tensor([[True, True, False, False], [True] * 4])
    assert torch.equal(sum_over_real(values, real, (0,))[0, 3], values[1, 3])


def test_mean_ablation_per_position_differs_from_one_mean():
    model, tokens, reference = model_of(), prompts(), prompts(7, 13)
    one = ablate(model, tokens, [MLP(0)], "mean", reference=reference, progress=False)
    each = ablate(model, tokens, [MLP(0)], "mean", reference=reference, per_position=True, progress=False)
    _, cache = model.run_with_cache(reference)
    for found, axes in ((one, (0, 1)), (each, (0,))):
        mean = cache["mlp_out", 0].mean(axes, keepdim=True)

        def replace(activation, hook, mean=mean):
            return mean.expand_as(activation).clone()

        logits = model.run_with_hooks(tokens, [("blocks.0.hook_mlp_out", replace)])
        assert torch.allclose(found.clean + found.effect[0], loss_per_prompt(logits, tokens), atol=1e-10)
    assert "per position" in each.replacement
    assert "over all positions" in one.replacement


def test_resampling_never_takes_a_prompts_own_write():
    for batch in (2, 3, 7):
        for seed in range(20):
            rows = other_rows(prompts(batch), torch.Generator().manual_seed(seed))
            assert sorted(rows.tolist()) == list(range(batch))
            assert (rows != torch.arange(batch)).all()


def test_resampling_takes_no_duplicate_of_the_prompt_itself():
    for copies, once in (([0, 0, 1, 1], True), ([0, 1, 0, 2, 1, 0, 3], True), ([0, 0, 0, 1, 2], False)):
        tokens = prompts(4)[copies]
        for seed in range(40):
            rows = other_rows(tokens, torch.Generator().manual_seed(seed))
            assert (tokens[rows] != tokens).any(1).all()
            assert not once or sorted(rows.tolist()) == list(range(len(copies)))
            assert torch.equal(rows, other_rows(tokens, torch.Generator().manual_seed(seed)))
    drawn = {tuple(other_rows(prompts(4)[[0, 0, 1, 1]], torch.Generator().manual_seed(s)).tolist()) for s in range(40)}
    assert len(drawn) > 1


def test_prompts_that_are_all_the_same_are_not_resampled_from_each_other():
    with pytest.raises(ValueError, match="all 3 prompts are the same, so there is none but row 0 itself"):
        ablate(model_of(), prompts(1)[[0, 0, 0]], method="resample", progress=False)


def test_resampling_from_a_constant_reference_is_its_mean():
    model, tokens = model_of(), prompts()
    reference = prompts(5, 13)[4:]
    resampled = ablate(model, tokens, "heads", "resample", reference=reference, progress=False)
    mean = ablate(model, tokens, "heads", "mean", reference=reference, per_position=True, progress=False)
    assert torch.allclose(resampled.effect, mean.effect, atol=1e-12)


def test_kl_effect_is_the_divergence_from_the_clean_run():
    model, tokens = model_of(), prompts()
    found = ablate(model, tokens, [Attn(0)], metric="kl", progress=False)
    changed = edited(model, tokens, "blocks.0.hook_attn_out", zeroed(...))
    assert torch.equal(found.clean, torch.zeros(4, dtype=torch.float64))
    assert torch.allclose(found.effect[0], kl_divergence(model(tokens), changed), atol=1e-12)


def test_slicing_the_output_of_the_projection_is_not_ablating_a_head():
    """Field report 23: d_model is not divided among heads behind W_O, and a head's share of it is not the head."""
    model, tokens = model_of(d_head=2, d_model=6), prompts()
    found = ablate(model, tokens, [Head(0, 1)], progress=False)
    naive = edited(model, tokens, "blocks.0.hook_attn_out", zeroed((..., slice(2, 4))))
    assert not torch.allclose(found.clean + found.effect[0], loss_per_prompt(naive, tokens), atol=1e-3)


def test_the_grid_holds_the_mean_effects_of_heads():
    found = ablate(model_of(), prompts(), progress=False)
    assert found.grid().shape == (2, 3)
    assert torch.equal(found.grid().flatten(), found.mean)
    some = ablate(model_of(), prompts(), [Head(1, 0)], progress=False).grid()
    assert some.isnan().sum() == 5
    with pytest.raises(ValueError, match=r"L0.mlp is none"):
        ablate(model_of(), prompts(), "mlps", progress=False).grid()


def test_the_table_has_a_row_per_component_and_an_interval():
    frame = ablate(model_of(), prompts(), progress=False).to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "mean", "interval_low", "interval_high", "p"]
    assert (frame["interval_low"] <= frame["mean"]).all()
    assert (frame["mean"] <= frame["interval_high"]).all()


def test_ablation_leaves_model_and_tokens_alone():
    model, tokens = model_of(), prompts()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = tokens.clone()
    ablate(model, tokens, "blocks", progress=False)
    assert torch.equal(tokens, before)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_the_compiled_heads_matter_and_the_others_do_not():
    model, tokens = compiled.induction_head(), compiled.tokens(batch=3)
    clean_logits = model(tokens)
    assert compiled.accuracy_of(clean_logits, tokens).tolist() == [1, 1, 1]
    found = ablate(model, tokens, metric=lambda z: compiled.loss_of(z, tokens), progress=False)
    assert found.clean.tolist() == pytest.approx([compiled.LOSS] * 3, abs=1e-9)
    without = (found.clean + found.effect).tolist()
    assert without[0] == pytest.approx([compiled.LOSS_WITHOUT_PREVIOUS_TOKEN_HEAD] * 3, abs=1e-6)
    assert without[2] == pytest.approx([compiled.LOSS_WITHOUT_INDUCTION_HEAD] * 3, abs=1e-6)
    right = ablate(model, tokens, metric=lambda z: compiled.accuracy_of(z, tokens), progress=False)
    assert (right.clean + right.effect).mean(-1).tolist() == [0, 1, 0, 1]
    unchanged = ablate(model, tokens, [Head(0, 1), Head(1, 1)], metric=lambda z: _distance(z, clean_logits))
    assert unchanged.effect.abs().max() == 0


def _distance(z, clean):
    return (z - clean).abs().amax((1, 2))


def test_bad_requests_are_named():
    model, tokens = model_of(), prompts()
    cases = [
        ({"components": "head"}, ValueError, "did you mean 'heads'"),
        ({"components": [Head(2, 0)]}, IndexError, "layer 2 is not in a model of 2 layers"),
        ({"components": [(Head(0, 0), Head(0, 3))]}, IndexError, "head 3 is not in a model of 3 heads"),
        ({"components": ["L0H9"]}, IndexError, "head 9 is not in a model of 3 heads"),
        ({"components": "L0H9"}, IndexError, "head 9 is not in a model of 3 heads"),
        ({"components": "L0K9"}, ValueError, "'L0K9' is not a component"),
        ({"components": []}, ValueError, "at least one component"),
        ({"method": "zeros"}, ValueError, "did you mean 'zero'"),
        ({"method": "mean"}, ValueError, "needs reference prompts"),
        ({"method": "mean", "reference": prompts(2, 5), "per_position": True}, ValueError, "13 positions.* got 5"),
        ({"method": "resample", "reference": prompts(2, 5)}, ValueError, "13 positions.* got 5"),
        ({"metric": "losses"}, ValueError, "did you mean 'loss'"),
        ({"metric": lambda z: z}, ValueError, r"returned shape \[4, 13, 17\] for the clean run"),
        ({"positions": 13}, IndexError, "position 13 is not in row 0"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            ablate(model, tokens, progress=False, **options)
    with pytest.raises(ValueError, match="there is only 1"):
        ablate(model, tokens[:1], method="resample", progress=False)
    with pytest.raises(ValueError, match="attention-only"):
        ablate(compiled.induction_head(), compiled.tokens(), "mlps")
    with pytest.raises(ValueError, match="the same on every prompt"):
        ablate(model, tokens, [AttnBias(0)], "mean", reference=tokens, progress=False)
    with pytest.raises(TypeError, match="no option 'postions'"):
        ablate(model, tokens, postions=3)


def test_components_may_be_given_as_their_text():
    model, tokens = model_of(), prompts()
    by_text = ablate(model, tokens, ["L0H1", ("L0H0", "L1H2")], progress=False)
    assert by_text.components == (Head(0, 1), (Head(0, 0), Head(1, 2)))
    assert torch.equal(by_text.effect[0], ablate(model, tokens, "L0H1", progress=False).effect[0])
    assert torch.equal(by_text.effect[0], ablate(model, tokens, Head(0, 1), progress=False).effect[0])
    with unchecked(), pytest.raises(TypeError, match="or its text 'L0H1', not 3"):
        ablate(model, tokens, [3])


@pytest.mark.parametrize(("factor", "found"), [(math.nan, "NaN"), (math.inf, "-?inf")])
def test_a_metric_that_is_not_finite_names_the_component(factor, found):
    model, tokens = model_of(), prompts()
    clean = model(tokens)

    def fragile(z):
        same = torch.equal(z, clean)
        return z[:, 0, 0] if same else z[:, 0, 0] * factor

    with pytest.raises(ValueError, match=f"is {found} for ablating L0H0"):
        ablate(model, tokens, metric=fragile, progress=False)


@pytest.mark.parametrize("metric", ["loss", "kl"])
def test_a_replacement_that_overflows_names_the_component(metric):
    model, tokens = model_of(), prompts()
    huge = Put(torch.full_like(model.run_with_cache(tokens)[1]["blocks.0.attn.hook_z"][:, :, 1], 1e308) * 10)
    planned = cells_of(
        model, tokens, [Intervention(Head(0, 1), huge)], [Head(0, 1)], "zero", "something huge", metric, {}
    )
    with pytest.raises(ValueError, match=f"metric {metric} is NaN for ablating L0H1, in row 0"):
        planned.run()


def test_a_metric_that_writes_into_its_logits_changes_no_effect():
    model, tokens = model_of(), prompts()

    def untidy(logits):
        value = logits[:, 0, 3] + logits[:, -1, 3]
        logits.zero_()
        return value

    options = {"positions": -1, "progress": False}  # position 0 keeps its clean logits
    tidy = ablate(model, tokens, metric=lambda z: z[:, 0, 3] + z[:, -1, 3], **options)
    assert torch.equal(ablate(model, tokens, metric=untidy, **options).effect, tidy.effect)


def test_positions_of_learned_embeddings_can_be_taken_out():
    model, tokens = model_of(), prompts()
    found = ablate(model, tokens, [PosEmbed()], metric=lambda z: z[:, -1, 3], progress=False)
    expected = edited(model, tokens, "hook_pos_embed", zeroed(...))[:, -1, 3]
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_blocks_write_is_the_difference_it_makes(name):
    model, tokens, reference = model_of(name), prompts(), prompts(6, 9)
    _, cache = model.run_with_cache(reference)
    write = (cache["resid_post", 0] - cache["resid_pre", 0]).mean((0, 1))
    _, own = model.run_with_cache(tokens)

    def replace(activation, hook):
        return own["resid_pre", 0] + write

    expected = model.run_with_hooks(tokens, [("blocks.0.hook_resid_post", replace)])[:, -1, 3]
    found = ablate(model, tokens, [Block(0)], "mean", lambda z: z[:, -1, 3], reference=reference, progress=False)
    assert torch.allclose(found.clean + found.effect[0], expected, atol=1e-9)
