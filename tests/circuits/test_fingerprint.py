"""A file of a sweep is taken up again by the same sweep and by no other: what a metric computes with decides too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from analysis.ablation import ablate, plan
from circuits import Head
from circuits.rerun.fingerprint import fingerprint
from tests import architectures, batches

FACTOR, FACTORS = 2.0, [2.0, 3.0]


def scaled(logits, factor=1.0):
    return factor * logits.square().mean((1, 2))


class Method:
    def __init__(self, factor):
        self.factor = factor

    def measure(self, logits):
        return scaled(logits, self.factor)

    def __call__(self, logits):
        return scaled(logits, self.factor)


@dataclass(frozen=True)
class Value:
    factor: float

    def __call__(self, logits):
        return scaled(logits, self.factor)


def closing_over(held):
    def metric(logits):
        return scaled(logits, held[0] if isinstance(held, tuple | list) else held)

    return metric


def with_a_function_inside(factor):
    if factor == 2.0:
        return lambda logits: scaled((lambda x: 2.0 * x)(logits))
    return lambda logits: scaled((lambda x: 3.0 * x)(logits))


def helper(x):
    return FACTOR * x


def looking_up(logits):
    return scaled(logits, helper(FACTORS[0]))


MAKERS = {
    "method": lambda factor: Method(factor).measure,
    "callable": Method,
    "dataclass": Value,
    "partial": lambda factor: partial(scaled, factor=factor),
    "closure over a number": closing_over,
    "closure over a tuple": lambda factor: closing_over((factor, 1)),
    "closure over a list": lambda factor: closing_over([factor]),
    "closure over a tensor": lambda factor: closing_over(torch.tensor(factor)),
    "closure over a function": lambda factor: (lambda inner: lambda logits: inner(logits))(closing_over(factor)),
    "function inside": with_a_function_inside,
}


@pytest.fixture(scope="module")
def subject():
    model = architectures.make("course")
    return model, batches.random_tokens(model.config)


def digest(subject, metric):
    return fingerprint(plan(*subject, [Head(0, 1)], "zero", metric, {}).sweep)


@pytest.mark.parametrize("kind", MAKERS)
def test_what_a_metric_computes_with_is_part_of_the_fingerprint(subject, kind):
    assert digest(subject, MAKERS[kind](2.0)) == digest(subject, MAKERS[kind](2.0))
    assert digest(subject, MAKERS[kind](2.0)) != digest(subject, MAKERS[kind](3.0))


@pytest.mark.parametrize(("name", "other"), [("FACTOR", 5.0), ("FACTORS", [5.0]), ("helper", lambda x: x)])
def test_what_a_metric_looks_up_in_its_module_is_too(subject, monkeypatch, name, other):
    before = digest(subject, looking_up)
    if callable(other):
        other.__module__ = __name__
    monkeypatch.setitem(globals(), name, other)
    assert digest(subject, looking_up) != before


def test_a_file_of_another_metric_is_refused(subject, tmp_path):
    model, tokens = subject
    given = {"resume": tmp_path / "record", "progress": False}
    first = ablate(model, tokens, "heads", "zero", Method(2.0).measure, **given)
    again = ablate(model, tokens, "heads", "zero", Method(2.0).measure, **given)
    assert torch.equal(first.effect, again.effect)
    with pytest.raises(ValueError, match="keeps another sweep"):
        ablate(model, tokens, "heads", "zero", Method(3.0).measure, **given)
