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


# ------------------------------------------------------------------------------------------------- induction


def repeated(n: int, batch: int = 64) -> torch.Tensor:
    """Fresh sequences of n different tokens, twice."""
    generator = torch.Generator().manual_seed(123)
    once = torch.rand(batch, 65, generator=generator).argsort(dim=1)[:, :n]
    return torch.cat([once, once], dim=1)


def second_half_loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Nats, the first token of the repeat not counted: it cannot be predicted."""
    n = tokens.shape[1] // 2
    return torch.nn.functional.cross_entropy(logits[:, n:-1].flatten(0, 1), tokens[:, n + 1 :].flatten()).item()


def attention_at(pattern: torch.Tensor, queries: range, lag: int) -> torch.Tensor:
    """Mean of ``A[t, t - lag]`` over some queries, for every head."""
    return torch.stack([pattern[:, :, t, t - lag] for t in queries]).mean(dim=(0, 1))


@pytest.mark.parametrize("n", [8, 16, 32])
def test_induction_has_a_clean_previous_token_head_and_a_clean_induction_head(n):
    model = load("induction")
    _, cache = model.run_with_cache(repeated(n), ["blocks.0.attn.hook_pattern", "blocks.1.attn.hook_pattern"])
    previous = attention_at(cache["pattern", 0], range(1, 2 * n), 1)
    induction = attention_at(cache["pattern", 1], range(n, 2 * n), n - 1)
    assert previous.max() >= 0.9
    assert induction.max() >= 0.9
    assert previous.min() < 0.3  # one head looks one token back, not several


@pytest.mark.parametrize("n", [8, 16, 32])
def test_induction_predicts_what_repeats_until_its_previous_token_head_is_ablated(n):
    model = load("induction")
    tokens = repeated(n)
    logits, cache = model.run_with_cache(tokens, "blocks.0.attn.hook_pattern")
    clean = second_half_loss(logits, tokens)
    assert clean <= 0.2
    head = int(attention_at(cache["pattern", 0], range(1, 2 * n), 1).argmax())

    def ablated(which: int) -> float:
        def zero(z, hook):
            z[:, :, which] = 0
            return z

        return second_half_loss(model.run_with_hooks(tokens, [("blocks.0.attn.hook_z", zero)]), tokens)

    assert ablated(head) > 3.5  # near ln 65 = 4.17: as if nothing had been seen
    assert ablated(1 - head) < 0.2


def test_induction_is_attention_alone_and_sure_of_nothing_that_it_cannot_know():
    model = load("induction")
    config = model.config
    assert (config.n_layers, config.attn_only, config.norm, config.positions) == (2, True, None, "learned")
    assert model.tokenizer is None
    tokens = repeated(32)
    first = torch.nn.functional.cross_entropy(model(tokens)[:, :31].flatten(0, 1), tokens[:, 1:32].flatten())
    assert 3.5 < first.item() < 4.5
    assert model.card["data"]["task"] == "repeated"
    assert model.card["loss"]["val"] < 0.05
