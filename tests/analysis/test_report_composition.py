"""The report's composition section."""

import base64
import struct

import pytest
import torch
from small_models import small_model
from test_report import Page

from analysis.composition import composition_scores
from analysis.report import report

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def made():
    return report(small_model(), TOKENS)


def test_the_strongest_pairs_are_listed_with_their_scores(made):
    page = Page(made.html)
    table = next(table for table in page.tables if table[0][:2] == ["heads", "through"])
    best = {kind: composition_scores(small_model(), kind) for kind in ("Q", "K", "V")}
    kind, found = max(best.items(), key=lambda item: item[1].score.nan_to_num(0).max())
    (writer, reader, score) = found.strongest(1)[0]
    assert table[1][:3] == [f"{writer} → {reader}", kind, f"{score:.3f}"]
    assert len(table) == 1 + 12
    assert "composition" in page.sections


def test_there_is_a_picture_for_each_kind_with_a_pixel_for_each_pair(made):
    page = Page(made.html)
    pictures = [a for tag, a in page.tags if tag == "img" and "-composition" in a.get("alt", "")]
    assert [picture["alt"][0] for picture in pictures] == ["Q", "K", "V"]
    for picture in pictures:
        png = base64.b64decode(picture["src"].partition(",")[2])
        assert struct.unpack(">II", png[16:24]) == (3, 3)


def test_plain_data_hold_the_pairs(made):
    pairs = made.measurements.to_dict()["composition"]["K"]
    assert [row["score"] for row in pairs] == sorted((row["score"] for row in pairs), reverse=True)
    assert len(pairs) == 9


def test_a_single_layer_has_no_section():
    page = Page(report(small_model(n_layers=1), TOKENS).html)
    assert "composition" not in page.sections
