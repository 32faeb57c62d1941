"""Figures draw the numbers of a result as they are, under its own labels."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from analysis import figures
from analysis.results import Result, result
from circuits import MLP, Head


@result
class Sample(Result):
    score: Float[Tensor, "layer head"]
    effect: Float[Tensor, "component batch"]
    spectrum: Float[Tensor, "layer circuit index"]
    components: tuple[Head | MLP, ...]
    circuits: tuple[str, ...]


@pytest.fixture
def sample():
    return Sample(
        score=torch.arange(6.0).reshape(2, 3),
        effect=torch.tensor([[-1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]),
        spectrum=torch.arange(20.0).reshape(2, 2, 5),
        components=(Head(0, 1), MLP(1)),
        circuits=("QK", "OV"),
    )


def test_heatmap_has_the_first_axis_downwards(sample):
    figure = figures.heatmap(sample, "score")
    assert [list(row) for row in figure.data[0].z] == [[0, 1, 2], [3, 4, 5]]
    assert (figure.layout.yaxis.title.text, figure.layout.xaxis.title.text) == ("layer", "head")
    assert figure.layout.yaxis.autorange == "reversed"
    assert figure.data[0].zmin == 0


def test_heatmap_of_signed_values_is_centred_at_zero(sample):
    trace = figures.heatmap(sample, "effect").data[0]
    assert trace.zmid == 0
    assert trace.zmin is None


def test_heatmap_keeps_equal_labels_apart(sample):
    axis = figures.heatmap(sample, "score", head=["a", "b", "a"]).layout.xaxis
    assert (list(axis.tickvals), list(axis.ticktext)) == ([0, 1, 2], ["a", "b", "a"])


def test_bars_stand_over_the_labels_of_components(sample):
    trace = figures.bars(sample, "effect", at={"batch": 2}).data[0]
    assert (list(trace.x), list(trace.y)) == (["L0H1", "L1.mlp"], [3.0, 7.0])


def test_lines_are_named_after_their_places(sample):
    figure = figures.lines(sample, "spectrum", at={"circuit": "OV"})
    assert [trace.name for trace in figure.data] == ["layer 0", "layer 1"]
    assert list(figure.data[1].y) == [15, 16, 17, 18, 19]
    assert len(figures.lines(sample, "spectrum").data) == 4


@pytest.mark.parametrize(
    ("draw", "arguments", "error", "message"),
    [
        (figures.heatmap, {"field": "scores"}, KeyError, "no tensor field 'scores'"),
        (figures.heatmap, {"field": "spectrum"}, ValueError, "2 axes, but these are left: layer, circuit, index"),
        (figures.heatmap, {"field": "score", "at": {"pos": 1}}, KeyError, "no axis 'pos'; it has layer, head"),
        (figures.bars, {"field": "score", "at": {"layer": 2}}, IndexError, "layer 2 is not on an axis of 2"),
        (figures.bars, {"field": "effect", "at": {"component": "L9"}}, KeyError, "no label 'L9'; it has L0H1, L1.mlp"),
        (figures.bars, {"field": "score"}, ValueError, "1 axis, but these are left: layer, head"),
        (figures.lines, {"field": "score", "at": {"layer": 0, "head": 1}}, ValueError, "are left: none"),
    ],
)
def test_what_cannot_be_drawn_is_refused(sample, draw, arguments, error, message):
    with pytest.raises(error, match=message):
        draw(sample, **arguments)


def test_too_many_lines_are_refused():
    @result
    class Wide(Result):
        value: Float[Tensor, "head index"]

    with pytest.raises(ValueError, match="65 lines"):
        figures.lines(Wide(value=torch.zeros(65, 2)), "value")


def test_drawing_changes_nothing(sample):
    before = sample.score.clone()
    figures.heatmap(sample, "score")
    assert torch.equal(sample.score, before)
