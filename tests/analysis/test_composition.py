"""Composition scores against the dense formula on every architecture, and against circuits with known ones."""

import math

import architectures
import compiled
import pytest
import torch

from analysis.composition import component_composition, composition_scores
from circuits.components import MLP, Embed, Head, PosEmbed
from circuits.folded import embedding, head_weights, mlp_weights, positional_embedding, unembedding
from circuits.gauge import transform_ov

NAMES = architectures.NAMES
CONFIGS = architectures.ARCHITECTURES


def share(W, M):
    """The definition, from dense matrices."""
    return (torch.linalg.matrix_norm(W @ M) / (torch.linalg.matrix_norm(W) * torch.linalg.matrix_norm(M))).item()


def dense_reader(model, kind, layer, head, raw, offset=0):
    weights = head_weights(model, raw, offset)
    QK, OV = weights.QK.AB[layer, head], weights.OV.AB[layer, head]
    return {"Q": QK, "K": QK.T, "V": OV}[kind]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("kind", ["Q", "K", "V"])
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_dense_formula(name, kind, raw):
    model = architectures.make(name)
    config, found = model.config, composition_scores(model, kind, raw=raw)
    assert found.score.shape == (config.n_layers, config.n_heads) * 2
    weights = head_weights(model, raw)
    OV, QK = weights.OV.AB, weights.QK.AB
    read = {"Q": QK, "K": QK.mT, "V": OV}[kind]
    products = torch.linalg.matrix_norm(OV[:, :, None, None] @ read)
    expected = products / (torch.linalg.matrix_norm(OV)[:, :, None, None] * torch.linalg.matrix_norm(read))
    for layer in range(config.n_layers):  # a head composes with later layers only
        expected[layer, :, : layer + 1] = float("nan")
    torch.testing.assert_close(found.score, expected, rtol=1e-10, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["grouped_query", "like_llama"])
def test_query_heads_compose_with_their_own_group(name):
    """Field report 13: heads of one group read with the same keys and other queries."""
    model = architectures.make(name)
    found = composition_scores(model, "K", raw=True).score
    W_K = model.blocks[1].attn.W_K[2]
    for head in (4, 5):
        M = W_K @ model.blocks[1].attn.W_Q[head].T
        W = model.blocks[0].attn.W_V[1] @ model.blocks[0].attn.W_O[3]
        assert found[0, 3, 1, head].item() == pytest.approx(share(W, M), rel=1e-10)


def test_composition_of_a_rotary_model_depends_on_the_offset():
    model = architectures.make("rotary_partial")
    here, there = (composition_scores(model, "Q", offset=offset) for offset in (0, 5))
    assert (here.score - there.score)[0, :, 1].abs().min() > 1e-4
    dense = share(head_weights(model).OV.AB[0, 2], dense_reader(model, "Q", 1, 1, False, offset=5))
    assert there.score[0, 2, 1, 1].item() == pytest.approx(dense, rel=1e-10)
    assert "offset 5" in there.note


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_the_compiled_induction_head_composes_through_its_keys_alone(kind):
    found = composition_scores(compiled.induction_head(), kind, raw=True)
    expected = compiled.K_COMPOSITION if kind == "K" else 0.0
    assert found.score[0, 0, 1, 0].item() == pytest.approx(expected, abs=1e-12)
    # The other heads are zero, and compose with nothing.
    assert int(found.score.isfinite().sum()) == 1


def test_random_factors_compose_as_the_baseline_says():
    config = architectures.config("course").replace(d_model=64, n_heads=8, d_head=3, norm=None)
    model = architectures.make(config)
    for kind in ("Q", "K", "V"):
        found = composition_scores(model, kind)
        root_mean_square = found.score[0, :, 1].square().mean().sqrt().item()
        assert found.baseline == 1 / 8
        assert root_mean_square == pytest.approx(1 / 8, rel=0.05)
        torch.testing.assert_close(found.excess, found.score - 1 / 8, equal_nan=True)


@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_composition_knows_no_gauge(kind):
    model = architectures.make("like_gpt2").requires_grad_(False)
    R = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, after = composition_scores(model, kind), composition_scores(transform_ov(model, 0, 1, R), kind)
    torch.testing.assert_close(after.score, before.score, rtol=1e-10, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_computed_in_float32(dtype):
    model = architectures.make("like_gpt2", dtype=dtype)
    exact = architectures.make("like_gpt2", dtype=dtype).double()
    found = composition_scores(model, "K").score
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), composition_scores(exact, "K").score, rtol=1e-5, atol=0, equal_nan=True)


def test_no_d_model_by_d_model_product_of_a_pair_is_formed(monkeypatch):
    """All products of two heads together are [heads·d_head, heads·d_head], never d_model × d_model for each."""
    from analysis.composition import cores

    seen = []
    original = cores.scores

    def watched(written, read):
        seen.append((written.maps.shape, read.maps.shape))
        return original(written, read)

    monkeypatch.setattr("analysis.composition.heads.scores", watched)
    composition_scores(architectures.make("course"), "Q")
    assert seen == [((3, 5, 15), (3, 15, 5))]


def test_the_table_has_a_row_for_every_pair():
    frame = composition_scores(architectures.make("course"), "V").to_frame()
    assert list(frame.columns) == ["layer", "head", "layer2", "head2", "score", "excess"]
    assert len(frame) == 36
    assert frame.score.notna().sum() == 9


# --- every writer and reader ------------------------------------------------------------------------------------------


def dense_writer(model, component, raw):
    if isinstance(component, Embed):
        return embedding(model, raw)
    if isinstance(component, PosEmbed):
        return positional_embedding(model, raw)
    if isinstance(component, MLP):
        return mlp_weights(model, component.layer, raw)[1]
    return head_weights(model, raw).OV.AB[component.layer, component.head]


def stands_before(writer, reader, config):
    """In which order a block computes: attention, then the MLP; both at once in a parallel block."""
    if isinstance(writer, Embed | PosEmbed) or reader == "unembed":
        return True
    same_block = isinstance(writer, Head) and isinstance(reader, MLP) and not config.parallel_blocks
    return writer.layer < reader.layer or (writer.layer == reader.layer and same_block)


@pytest.mark.parametrize("reads", ["Q", "K", "V", "mlp", "unembed"])
@pytest.mark.parametrize(
    "name", ["all_biases", "attn_only", "like_llama", "parallel_two_norms", "like_gemma2", "like_gptj", "no_positions"]
)
def test_every_writer_into_every_reader_is_the_dense_formula(name, reads):
    model = architectures.make(name)
    config = model.config
    if reads == "mlp" and config.attn_only:
        with pytest.raises(ValueError, match="attention-only"):
            component_composition(model, reads)
        return
    found = component_composition(model, reads)
    assert len(found.writers) == 1 + (config.positions == "learned") + 2 * (config.n_heads + config.has_mlp)
    for i, writer in enumerate(found.writers):
        for j, reader in enumerate(found.readers):
            if not stands_before(writer, reader, config):
                assert math.isnan(found.score[i, j])
                continue
            if reader == "unembed":
                M = unembedding(model)
            elif isinstance(reader, MLP):
                M = mlp_weights(model, reader.layer)[0]
            else:
                M = dense_reader(model, reads, reader.layer, reader.head, False)
            assert found.score[i, j].item() == pytest.approx(share(dense_writer(model, writer, False), M), rel=1e-7)


def test_heads_score_the_same_among_all_writers_as_among_heads():
    model = architectures.make("like_neox")
    heads, everything = composition_scores(model, "K").score, component_composition(model, "K")
    i, j = everything.writers.index(Head(0, 1)), everything.readers.index(Head(1, 2))
    assert everything.score[i, j].item() == pytest.approx(heads[0, 1, 1, 2].item(), rel=1e-12)


def test_the_table_names_writers_and_readers():
    frame = component_composition(architectures.make("course"), "mlp").to_frame()
    row = frame[(frame.writer == "L0H1") & (frame.reader == "L1.mlp")].iloc[0]
    assert (row.layer_writer, row.head_writer, row.layer_reader) == (0, 1, 1)


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_does_not_exist_is_refused():
    model = architectures.make("course")
    with pytest.raises(ValueError, match="composition kind 'O' is not one of 'Q', 'K', 'V'"):
        composition_scores(model, "O")
    with pytest.raises(ValueError, match="offset 2 means nothing where positions is 'learned'"):
        composition_scores(model, "Q", offset=2)
    with pytest.raises(ValueError, match="reads 'O' is not one of"):
        component_composition(model, "O")


@pytest.mark.parametrize("measure", [composition_scores, component_composition])
def test_nan_in_a_weight_is_named(measure):
    model = architectures.make("course").requires_grad_(False)
    model.blocks[1].attn.W_Q[2, 3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.attn\.qkv\.weight is nan at \[14, 3\]"):
        measure(model, "Q")


def test_a_single_layer_has_no_pairs():
    assert composition_scores(architectures.make("one_layer"), "Q").score.isnan().all()


def test_the_kind_of_composition_must_be_said() -> None:
    with pytest.raises(ValueError, match="say which composition: kind is one of 'Q', 'K', 'V'"):
        composition_scores(architectures.make("course"))
