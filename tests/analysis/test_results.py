"""Results: the axes written once in an annotation reach the table, the JSON and the repr."""

import json
import math

import pytest
import torch
from jaxtyping import Complex, Float, Int
from small_models import small_model
from torch import Tensor

from analysis.ablation import ablate
from analysis.results import Result, result
from analysis.uncertainty import prompts_and_interval
from circuits.components import MLP, Component, Embed, Head


@result
class Grid(Result):
    score: Float[Tensor, "layer head layer2 head2"]
    size: Int[Tensor, " head"]
    spectrum: Float[Tensor, "layer k"]
    maybe: Float[Tensor, " layer"] | None = None
    raw: bool = False


@result
class Effects(Result):
    table = ("mean", "interval")
    components: tuple[Component | tuple[Component, ...], ...]
    effect: Float[Tensor, "component batch"]
    mean: Float[Tensor, " component"]
    interval: Float[Tensor, "component bound"]
    level: float = 0.95


def grid() -> Grid:
    return Grid(
        score=torch.arange(2 * 3 * 2 * 3.0).reshape(2, 3, 2, 3),
        size=torch.tensor([5, 7, 11]),
        spectrum=torch.ones(2, 4),
    )


MIXED = (Head(0, 1), MLP(2), (Head(0, 0), Head(1, 1)))


def effects(components=MIXED) -> Effects:
    return Effects(
        components=components,
        effect=torch.arange(6.0).reshape(3, 2),
        mean=torch.tensor([0.5, math.nan, 4.5]),
        interval=torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]),
    )


def test_the_table_has_one_row_per_cell_with_the_axes_first():
    frame = grid().to_frame()
    assert list(frame.columns) == ["layer", "head", "layer2", "head2", "score", "size"]
    assert len(frame) == 2 * 3 * 2 * 3
    for row in frame.itertuples():
        assert row.score == grid().score[row.layer, row.head, row.layer2, row.head2]
        assert row.size == grid().size[row.head]


def test_chosen_fields_are_laid_over_the_axes_they_have_between_them():
    frame = grid().to_frame("size", "spectrum")
    assert list(frame.columns) == ["head", "layer", "k", "size", "spectrum"]
    assert len(frame) == 3 * 2 * 4
    assert (frame["size"] == torch.tensor([5, 7, 11])[torch.tensor(frame["head"].to_numpy())].numpy()).all()


def test_component_labels_give_text_layer_and_head_columns():
    frame = effects().to_frame()
    assert list(frame.columns) == ["component", "layer", "head", "mean", "interval_low", "interval_high"]
    assert list(frame["component"]) == ["L0H1", "L2.mlp", "L0H0+L1H1"]
    assert frame["layer"][1] == 2
    assert list(frame["head"].isna()) == [False, True, True]
    assert list(frame["interval_high"]) == [1, 3, 5]
    assert effects((Head(0, 1), Head(1, 2), Head(3, 4))).to_frame()["head"].dtype.kind == "i"
    assert "layer" not in effects((Embed(), Embed(), Embed())).to_frame()


def test_rows_are_the_table():
    assert list(effects().rows("effect"))[3] == {
        "component": "L2.mlp",
        "layer": 2,
        "head": None,
        "batch": 1,
        "effect": 3.0,
    }


def test_json_is_valid_and_holds_every_field_with_nan_as_null():
    data = json.loads(effects().to_json())
    assert data["type"] == "Effects"
    assert data["mean"] == [0.5, None, 4.5]
    assert data["components"] == ["L0H1", "L2.mlp", ["L0H0", "L1H1"]]
    assert data["axes"]["effect"] == ["component", "batch"]
    assert data["level"] == 0.95


def test_complex_numbers_become_pairs():
    @result
    class Eigen(Result):
        eigenvalues: Complex[Tensor, " d_head"]

    assert Eigen(eigenvalues=torch.tensor([1 + 2j])).to_dict()["eigenvalues"] == [[1.0, 2.0]]


def test_repr_shows_shapes_settings_and_a_few_rows_only():
    text = repr(grid())
    assert text.splitlines()[0] == "Grid: raw False"
    assert "score [layer 2 × head 3 × layer2 2 × head2 3]" in text
    assert "36 rows in all" in text
    assert len(text.splitlines()) < 15


def test_html_escapes_labels():
    @result
    class Words(Result):
        words: tuple[str, ...]
        score: Float[Tensor, " word"]

    page = Words(words=("</script>", "<img onerror=x>"), score=torch.ones(2))._repr_html_()
    assert "<img" not in page
    assert "&lt;/script&gt;" in page


def test_results_are_frozen():
    with pytest.raises(AttributeError):
        grid().raw = True


def test_half_precision_values_reach_the_table():
    @result
    class Half(Result):
        score: Float[Tensor, " head"]

    assert list(Half(score=torch.ones(3, dtype=torch.bfloat16)).to_frame()["score"]) == [1, 1, 1]


def test_labels_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="axis component has length 3, but 2 labels"):
        effects((Head(0, 1), Head(0, 2)))


def test_axes_of_two_lengths_are_refused_by_name():
    with pytest.raises(ValueError, match="axis layer has length 2 in score, but 4 in spectrum"):
        Grid(score=torch.ones(2, 3, 2, 3), size=torch.ones(3, dtype=torch.int), spectrum=torch.ones(4, 4))


def test_unknown_field_and_axis_list_what_there_is():
    with pytest.raises(KeyError, match="no tensor field 'scroe'; it has score, size, spectrum"):
        grid().to_frame("scroe")
    with pytest.raises(KeyError, match="no axis 'heads'; it has head, head2, k"):
        grid().labels("heads")


def test_axes_in_another_order_are_lined_up_by_name():
    @result
    class Two(Result):
        one: Float[Tensor, "layer head"]
        other: Float[Tensor, "head layer"]

    values = torch.arange(6.0).reshape(2, 3)
    frame = Two(one=values, other=values.T.contiguous()).to_frame()
    assert list(frame["one"]) == list(frame["other"]) == [0, 1, 2, 3, 4, 5]


def test_repr_lists_fields_of_one_shape_together():
    text = repr(effects())
    assert "  effect [component 3 × batch 2]" in text
    assert text.count("[") == 3


def test_repr_shows_a_dash_where_there_is_no_number():
    text = repr(ablate(small_model(), torch.tensor([[1, 2, 3, 1]]), "mlps", progress=False))
    assert "nan" not in text
    assert text.splitlines()[-1].split()[-3:] == ["–", "–", "1"]
    assert "1 prompt, which has no interval" in text
    assert prompts_and_interval(2, 0.9) == "2 prompts, 90% interval"
