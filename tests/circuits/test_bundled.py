"""The models that ship with the package: what their cards say, and that they can do what they are there for."""

import re
from pathlib import Path

import pytest
import torch

from circuits import GPTConfig, load, storage
from circuits.training import TrainingConfig, text_loss

# From the last tenth of the corpus, which no bundled model was trained on.
EXCERPT = Path(__file__).parents[1] / "data" / "taming_of_the_shrew.txt"


@pytest.mark.parametrize("name", storage.bundled_names())
def test_every_bundled_model_is_small_and_has_a_full_card(name):
    with storage.bundled_path(name) as path:
        assert path.stat().st_size < 4_000_000
    model = load(name)
    card = model.card
    assert card["command"].startswith("circuits train --")
    assert "/" not in card["command"]
    assert set(card["versions"]) == {"qkov", "torch", "python"}
    assert TrainingConfig(**card["training"]).to_dict() == card["training"]
    assert (card["steps"], card["seed"]) == (card["training"]["steps"], card["training"]["seed"])
    assert card["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    history = card["history"]
    assert len({len(column) for column in history.values()}) == 1
    assert history["step"][-1] == card["steps"]
    assert history["val_loss"][-1] == card["loss"]["val"]


def test_shakespeare_is_the_course_model_with_a_validation_loss_below_1_65():
    model = load("shakespeare")
    assert model.config == GPTConfig.course()
    assert model.card["parameters"] == 816_640
    assert model.card["loss"]["val"] <= 1.65
    assert model.card["data"]["file"] == "tinyshakespeare.txt"
    assert re.fullmatch(r"[0-9a-f]{64}", model.card["data"]["sha256"])


def test_shakespeare_predicts_text_that_it_has_not_seen():
    model = load("shakespeare")
    tokens = model.to_tokens(EXCERPT.read_text())[0]
    loss = text_loss(model, tokens)
    assert loss < 1.5
    assert text_loss(model, tokens.flip(0)) > loss + 1


def test_shakespeare_speaks_the_corpus_alphabet():
    tokenizer = load("shakespeare").tokenizer
    assert tokenizer.d_vocab == 65
    assert "".join(tokenizer.vocab[:3]) == "\n !"
    with pytest.raises(ValueError, match="'é' at position 3"):
        tokenizer.encode("café")


def test_loading_a_bundled_model_twice_gives_independent_models():
    one, other = load("shakespeare"), load("shakespeare")
    with torch.no_grad():
        one.W_E.zero_()
    assert other.W_E.abs().sum() > 0
