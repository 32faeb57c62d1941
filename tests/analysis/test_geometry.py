"""Geometry against identities, against differences of the block itself, and against hand-made cases."""

import math

import architectures
import pytest
import torch
from batches import random_tokens

from analysis.geometry import (
    batch_dependence,
    block_jacobians,
    euler_steps,
    gradient_path,
    head_diversity,
    hull_membership,
    norm_geometry,
    private_copy,
    scale_invariance,
    sequence_jacobian,
    stream_bandwidth,
    update_sizes,
)
from analysis.geometry.bandwidth import coherence, welch_bound
from analysis.geometry.hull import distance_from_hulls
from circuits.names import block_names

DIFFERENT = ("course", "attn_only", "post_norm", "parallel_shared_norm", "like_llama", "like_gemma2", "windows")


@pytest.fixture(scope="module")
def course():
    return architectures.make("course")


def tokens_for(model, batch=1, pos=11):
    return random_tokens(model.config, batch, pos)


# --- norms ----------------------------------------------------------------------------------------------------------


def test_layernorm_lands_on_the_sphere_in_the_hyperplane_and_rmsnorm_on_the_sphere_only(course):
    ideal = norm_geometry(course, tokens_for(course))
    assert ideal.off_hyperplane.max() < 1e-12
    assert ideal.off_sphere.max() < 1e-12
    assert ideal.norms == ("L0.ln1", "L0.ln2", "L1.ln1", "L1.ln2", "ln_final")
    rms = architectures.make("rmsnorm")
    measured = norm_geometry(rms, tokens_for(rms))
    assert measured.off_sphere.max() < 1e-12
    assert measured.off_hyperplane.min() > 1e-3


def test_epsilon_breaks_scale_invariance_near_zero_variance(course):
    measured = norm_geometry(course, tokens_for(course), factors=(1e-4, 1.0, 10.0))
    assert (measured.scale_change[:, 0] > 0.3).all()
    assert (measured.scale_change[:, 1] == 0).all()
    assert (measured.scale_change[:, 2] < 1e-4).all()
    large, small = (norm_geometry(architectures.make(name), tokens_for(course)) for name in ("large_eps", "course"))
    assert (large.off_sphere_eps > 10 * small.off_sphere_eps).all()


def test_gain_and_shift_leave_the_sphere(course):
    measured = norm_geometry(course, tokens_for(course))
    assert measured.off_sphere_affine.min() > 0.01
    assert measured.off_hyperplane_affine.min() > 0.01


def test_a_model_without_norms_has_no_norm_geometry():
    model = architectures.make("no_norm")
    with pytest.raises(ValueError, match="no norms"):
        norm_geometry(model, tokens_for(model))


def test_only_batchnorm_depends_on_the_companions():
    noise = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    measured = batch_dependence(noise[:3], noise[3:])
    change = dict(zip(measured.kinds, measured.change.tolist(), strict=True))
    assert change["layernorm"] == change["rmsnorm"] == 0
    assert change["batchnorm"] > 0.1
    assert measured.alone.tolist() == [1, 1, 0]


# --- Jacobians ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
def test_block_jacobian_predicts_small_changes_of_the_block(name):
    model = architectures.make(name)
    tokens = tokens_for(model)
    layer, position = model.config.n_layers - 1, 7
    measured = block_jacobians(model, tokens, layer, position)
    _, cache = model.run_with_cache(tokens)
    x, run = cache["resid_pre", layer].detach(), model.start(tokens)
    generator = torch.Generator().manual_seed(1)
    for source in (0, 4, position):
        change = torch.zeros_like(x)
        change[0, source] = 1e-6 * torch.randn(x.shape[-1], generator=generator, dtype=torch.float64)
        block = model.blocks[layer]
        actual = (block(x + change, run) - block(x - change, run))[0, position] / 2
        torch.testing.assert_close(change[0, source] @ measured.jacobian[source], actual, rtol=1e-5, atol=1e-13)
    assert measured.jacobian.shape == (position + 1, model.config.d_model, model.config.d_model)
    assert measured.position == position


def test_a_block_that_adds_nothing_has_the_identity_as_jacobian(course):
    silent = private_copy(course)
    for block in silent.blocks:
        for weight in (block.attn.out.weight, block.attn.out.bias, block.mlp.down.weight, block.mlp.down.bias):
            weight.data = torch.zeros_like(weight)
    tokens = tokens_for(course)
    measured = block_jacobians(silent, tokens, 1)
    assert measured.distance_to_identity == measured.distance_spectral == 0
    assert measured.gain.tolist() == [0] * 10 + [1]
    path = gradient_path(silent, tokens)
    assert path.gain.tolist() == path.gain_all.tolist() == path.largest.tolist() == [1, 1, 1]
    assert block_jacobians(course, tokens, 1).distance_to_identity > 0.1


def test_post_norm_jacobian_loses_the_directions_that_the_norm_removes():
    model = architectures.make("post_norm")
    ideal = private_copy(model)
    for block in ideal.blocks:
        block.ln2.eps = 0.0
    values = block_jacobians(ideal, tokens_for(model), 0).singular_values[-1]
    assert values[-2:].max() < 1e-12 < values[-3]


@pytest.mark.parametrize("name", DIFFERENT)
def test_gradient_path_is_the_product_of_the_blocks_jacobians(name):
    model = architectures.make(name)
    tokens = tokens_for(model, pos=3)
    _, cache = model.run_with_cache(tokens)
    run = model.start(tokens)
    d, L = model.config.d_model, model.config.n_layers
    path = gradient_path(model, tokens)
    product = torch.eye(3 * d, dtype=torch.float64)
    for layer in reversed(range(L)):
        block = model.blocks[layer]
        jacobian = sequence_jacobian(lambda x, block=block: block(x, run), cache["resid_pre", layer][0])
        product = jacobian @ product
        to_last = product[:, -d:]
        assert math.isclose(path.gain_all[layer], to_last.norm() / math.sqrt(d), rel_tol=1e-10)
        assert math.isclose(path.gain[layer], to_last[-d:].norm() / math.sqrt(d), rel_tol=1e-10)
        assert math.isclose(path.largest[layer], torch.linalg.svdvals(to_last[-d:])[0], rel_tol=1e-10)


def test_probes_estimate_the_gradient_path_and_a_whole_basis_gives_it(course):
    tokens = tokens_for(course)
    exact = gradient_path(course, tokens)
    everything = gradient_path(course, tokens, probes=course.config.d_model)
    torch.testing.assert_close(everything.gain, exact.gain, rtol=1e-10, atol=0)
    some = torch.stack([gradient_path(course, tokens, probes=2, seed=seed).gain.square() for seed in range(60)])
    torch.testing.assert_close(some.mean(0), exact.gain.square(), rtol=0.2, atol=0)
    assert gradient_path(course, tokens, probes=2).largest is None


def test_jacobians_of_several_sequences_and_absent_layers_are_refused(course):
    tokens = tokens_for(course, batch=2)
    with pytest.raises(IndexError, match="layer 2 is not among the 2 there are"):
        block_jacobians(course, tokens[:1], 2)
    with pytest.raises(ValueError, match="probes must lie between 1 and d_model = 15, not 16"):
        gradient_path(course, tokens[:1], probes=16)


# --- updates and steps ----------------------------------------------------------------------------------------------


def test_update_sizes_are_norms_of_what_is_added(course):
    tokens = tokens_for(course, batch=3)
    _, cache = course.run_with_cache(tokens)
    measured = update_sizes(course, tokens)
    ratio = cache["mlp_out", 1].norm(dim=-1) / cache["resid_mid", 1].norm(dim=-1)
    assert math.isclose(measured.mlp[1], ratio.mean().detach(), rel_tol=1e-10)
    mask = torch.ones_like(tokens)
    mask[0, 5:] = 0
    masked = update_sizes(course, tokens, attention_mask=mask)
    real = cache["attn_out", 0].norm(dim=-1) / cache["resid_pre", 0].norm(dim=-1)
    assert math.isclose(masked.attn[0], real[mask.bool()].mean().detach(), rel_tol=1e-10)


def test_attention_only_models_have_no_mlp_updates():
    model = architectures.make("attn_only")
    assert update_sizes(model, tokens_for(model)).mlp is None


def test_one_euler_step_is_the_block_and_small_steps_converge_to_first_order(course):
    gentle = private_copy(course)
    for block in gentle.blocks:
        block.mlp.down.weight.data = 0.2 * block.mlp.down.weight
        block.attn.out.weight.data = 0.2 * block.attn.out.weight
    measured = euler_steps(gentle, tokens_for(course), steps=(1, 8, 16, 32))
    assert (measured.error[:, 1:] < measured.error[:, :-1]).all()
    assert (measured.order - 1).abs().max() < 0.1


def test_euler_steps_must_ascend(course):
    with pytest.raises(ValueError, match="ascending"):
        euler_steps(course, tokens_for(course), steps=(4, 2))


# --- hull -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
def test_attention_is_a_convex_combination_of_the_visible_values(name):
    model = architectures.make(name)
    measured = hull_membership(model, tokens_for(model))
    assert (measured.negative == 0).all()
    assert measured.row_sum_error.max() < 1e-12
    assert measured.residual.max() < 1e-12


def test_a_leaking_mask_is_no_combination_of_visible_values(course):
    leaking = private_copy(course)
    leaking.blocks[0].attn.window = 3  # sees 3 positions, while the configuration says all
    told = leaking.config.replace(window=(2, None))
    leaking.config = told
    assert hull_membership(leaking, tokens_for(course)).residual[0].min() > 1e-3


def test_hull_distance_is_that_of_a_known_square():
    corners = torch.tensor([[[[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]]], dtype=torch.float64)
    points = torch.tensor([[[4.0, 0.0], [0.3, -0.9], [1.0, 1.0], [2.0, 2.0]]], dtype=torch.float64)
    start = torch.full((1, 1, 4, 4), 0.25, dtype=torch.float64)
    seen = torch.ones(4, 4, dtype=torch.bool)
    found = distance_from_hulls(points, corners, start, seen, rounds=200)
    torch.testing.assert_close(found[0], torch.tensor([3.0, 0, 0, math.sqrt(2)], dtype=torch.float64))


def test_a_sum_of_hulls_is_wider_than_one():
    corners = torch.tensor([[[[1.0], [-1.0]], [[2.0], [-2.0]]]], dtype=torch.float64)
    start = torch.full((1, 2, 1, 2), 0.5, dtype=torch.float64)
    seen = torch.ones(1, 2, dtype=torch.bool)
    for point, distance in ((2.9, 0.0), (3.5, 0.5)):
        found = distance_from_hulls(torch.tensor([[[point]]], dtype=torch.float64), corners, start, seen)
        assert math.isclose(found.item(), distance, abs_tol=1e-12)


# --- the scale of weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["course", "rmsnorm", "attn_only", "branch_norm", "parallel_two_norms", "like_llama"])
def test_gradient_of_a_scale_invariant_loss_is_orthogonal_and_shrinks_as_one_over_c(name):
    model = architectures.make(name)
    measured = scale_invariance(model, tokens_for(model, batch=2), factors=(0.3, 1.0, 5.0))
    assert measured.radial.abs().max() < 1e-12
    torch.testing.assert_close(measured.scaled_gradient, torch.ones(3, dtype=torch.float64), rtol=1e-10, atol=0)
    torch.testing.assert_close(measured.loss, measured.loss[1].expand(3), rtol=1e-12, atol=0)


def test_epsilon_makes_the_loss_see_the_scale(course):
    measured = scale_invariance(course, tokens_for(course, batch=2), factors=(0.01,), eps=1e-2)
    assert abs(measured.scaled_gradient.item() - 1) > 1e-2
    assert measured.weights == 2 * (15 * 15 + 15 + 60 * 15 + 15) + 17 * 15 + 19 * 15


@pytest.mark.parametrize(
    ("name", "reason"), [("tied", "tie_embeddings"), ("post_norm", "'post'"), ("no_final_norm", "final_norm is False")]
)
def test_losses_that_see_the_scale_are_refused_with_the_reason(name, reason):
    model = architectures.make(name)
    with pytest.raises(ValueError, match=reason):
        scale_invariance(model, tokens_for(model))


# --- heads and the stream -------------------------------------------------------------------------------------------


def test_head_diversity_is_zero_for_equal_heads_and_at_most_ln_2(course):
    same = private_copy(course)
    same.blocks[0].attn.qkv.weight.data = course.blocks[0].attn.qkv.weight.detach().clone()
    with torch.no_grad():
        attn = same.blocks[0].attn
        attn.W_Q[2] = attn.W_Q[1]
        attn.W_K[2] = attn.W_K[1]
    measured = head_diversity(same, tokens_for(course, batch=2))
    assert measured.divergence[0, 1, 2] == 0
    assert measured.divergence.diagonal(dim1=1, dim2=2).max() < 1e-15
    assert 0.01 < measured.divergence.max() < math.log(2)
    torch.testing.assert_close(measured.mean[0], (measured.divergence[0].sum() / 6))


def test_overlap_is_one_where_the_reader_sees_all_that_is_written(course):
    measured = stream_bandwidth(course)
    assert measured.overlap[1].isnan().all()
    assert measured.overlap[0, :, 0].isnan().all()
    assert measured.overlap[0, :, 1].min() > 0
    assert measured.overlap[0, :, 1].max() <= 1 + 1e-12
    assert measured.embeddings == 17


def test_overlap_of_subspaces_chosen_by_hand():
    model = architectures.make("attn_only_no_norm")
    with torch.no_grad():
        model.blocks[0].attn.out.weight.zero_()
        model.blocks[1].attn.qkv.weight.zero_()
        for column in range(2):  # writes the first two directions of the stream; reads the second and third
            model.blocks[0].attn.W_O[0, column, column] = 1.0
            model.blocks[1].attn.W_Q[1, 1 + column, column] = 3.0
    overlap = stream_bandwidth(model).overlap
    assert math.isclose(overlap[0, 0, 1, 1], 0.5)
    assert overlap[0, 0, 1, 0] == 0
    assert overlap[0, 1, 1].isnan().all()


def test_coherence_never_falls_below_the_welch_bound():
    simplex = torch.eye(4, dtype=torch.float64) - 0.25
    assert math.isclose(coherence(simplex)[0], 1 / 3)
    assert math.isclose(welch_bound(4, 3), 1 / 3)
    assert welch_bound(3, 4) == 0
    noise = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    assert coherence(noise)[0] > coherence(noise)[1] > welch_bound(40, 7) > 0


def test_private_copies_behave_alike_and_leave_the_original_alone(course):
    tokens = tokens_for(course)
    changed = private_copy(course, torch.float32)
    changed.blocks[0].attn.scale = 3.0
    changed.blocks[0].ln1.w.data = 2 * changed.blocks[0].ln1.w
    assert changed.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in changed.parameters())
    assert course.blocks[0].attn.scale != 3.0
    assert all(parameter.requires_grad for parameter in course.parameters())
    again = private_copy(changed)
    assert again.blocks[0].attn.scale == 3.0
    assert torch.equal(again(tokens), changed(tokens))
    assert block_names(0).resid_pre in again.hook_names
