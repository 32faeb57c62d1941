"""Components: one text form each, and only those that a model has."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from unchecked import unchecked

from circuits.components import (
    MLP,
    Attn,
    AttnBias,
    Block,
    Component,
    Embed,
    Head,
    MLPBias,
    Neuron,
    NormBias,
    PosEmbed,
    UnembedBias,
    ValueBias,
    as_component,
    as_head,
    check_component,
    parse_component,
)
from tests.architectures import config

FORMS = {
    "embed": Embed(),
    "pos_embed": PosEmbed(),
    "L2H3": Head(2, 3),
    "L2.mlp": MLP(2),
    "L2.n17": Neuron(2, 17),
    "L2.attn": Attn(2),
    "L2.attn_bias": AttnBias(2),
    "L2.mlp_bias": MLPBias(2),
    "L2": Block(2),
    "L2H3.value_bias": ValueBias(2, 3),
    "L2.ln1_bias": NormBias("ln1", 2),
    "ln_final_bias": NormBias("ln_final"),
    "unembed_bias": UnembedBias(),
}


@pytest.mark.parametrize("text", FORMS)
def test_text_and_component_are_inverse(text: str) -> None:
    assert parse_component(text) == FORMS[text]
    assert str(FORMS[text]) == text


@given(st.sampled_from([Head, ValueBias, Neuron]), st.integers(0, 999), st.integers(0, 99999))
def test_any_indices_survive_the_text_form(kind: type[Component], layer: int, index: int) -> None:
    component = kind(layer, index)  # type: ignore[call-arg]
    assert parse_component(str(component)) == component


@pytest.mark.parametrize(
    "text", ["", "L", "H3", "L2H", "L-1H0", "l2h3", "L2H3 ", "L2.n", "L2.mlps", "embedding", "L²H1"]
)
def test_other_texts_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a component.*L2H3"):
        parse_component(text)


@pytest.mark.parametrize(
    ("architecture", "component", "error", "message"),
    [
        ("course", Head(2, 0), IndexError, "L2H0: layer 2 is not in a model of 2 layers"),
        ("course", Head(0, 3), IndexError, "head 3 is not in a model of 3 heads"),
        ("course", Neuron(0, 60), IndexError, "neuron 60 is not in a model of 60 neurons"),
        ("attn_only", MLP(0), ValueError, "the model is attention-only"),
        ("rotary", PosEmbed(), ValueError, "positions are not learned"),
        ("no_biases", AttnBias(0), ValueError, "bias_out is False"),
        ("course", ValueBias(0, 1), ValueError, "bias_qkv is False"),
        ("course", UnembedBias(), ValueError, "bias_unembed is False"),
        ("rmsnorm", NormBias("ln1", 0), ValueError, "its norms have no shift"),
    ],
)
def test_what_a_model_lacks_is_refused(
    architecture: str, component: Component, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_component(component, config(architecture))


def test_components_are_values() -> None:
    assert len({Head(0, 1), Head(0, 1), Head(1, 0)}) == 2
    assert sorted([Head(1, 0), Head(0, 2)]) == [Head(0, 2), Head(1, 0)]


def test_a_component_may_be_given_as_its_text() -> None:
    assert as_component("L2H3") == as_component(Head(2, 3)) == Head(2, 3)
    with unchecked(), pytest.raises(TypeError, match=r"such as Head\(0, 1\) or its text 'L0H1', not 3"):
        as_component(3)  # type: ignore[arg-type]


def test_a_head_is_told_from_other_components() -> None:
    assert as_head("L0H1", config("course")) == Head(0, 1)
    with pytest.raises(ValueError, match="expected a head"):
        as_head("L0.mlp", config("course"))
    with pytest.raises(IndexError, match="head 99"):
        as_head("L0H99", config("course"))
