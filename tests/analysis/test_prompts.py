"""Prompts: what is refused, what stands in when none is given, and how tokens are shown."""

import pytest
import torch

from analysis.prompts import (
    CHARACTER_PROMPT,
    built_in,
    default_tokens,
    parse_tokens,
    prompt_tokens,
    token_labels,
    visible,
)
from circuits import GPTConfig, HookedGPT
from circuits.text import CharTokenizer


@pytest.fixture
def model():
    return HookedGPT(GPTConfig(n_layers=2, d_model=6, n_heads=3, n_ctx=13, d_vocab=17))


@pytest.fixture
def reader():
    characters = CharTokenizer.from_text(CHARACTER_PROMPT + "xyz")
    model = HookedGPT(GPTConfig(n_layers=1, d_model=6, n_heads=2, n_ctx=64, d_vocab=characters.d_vocab))
    model.tokenizer = characters
    return model


def test_default_without_tokenizer_is_one_sequence_twice_without_repeats_inside(model):
    tokens = default_tokens(model)
    assert tokens.shape == (1, 12)
    first, second = tokens[0, :6].tolist(), tokens[0, 6:].tolist()
    assert first == second
    assert len(set(first)) == 6
    assert torch.equal(tokens, default_tokens(model))


def test_default_of_a_character_model_is_the_built_in_text(reader):
    assert "".join(reader.tokenizer.str_tokens(default_tokens(reader)[0].tolist())) == CHARACTER_PROMPT
    assert len(CHARACTER_PROMPT) <= 64


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        (set(CHARACTER_PROMPT) - set("!,"), CHARACTER_PROMPT.replace("!", "").replace(",", "")),
        (set(CHARACTER_PROMPT.lower()) - {":"}, CHARACTER_PROMPT.lower().replace(":", "")),
    ],
)
def test_a_character_model_that_has_the_letters_reads_the_text_without_its_other_signs(reader, vocab, text):
    reader.tokenizer = CharTokenizer(tuple(sorted(vocab)))
    tokens = default_tokens(reader)
    assert "".join(reader.tokenizer.str_tokens(tokens[0].tolist())) == text
    assert "built-in text" in built_in(reader, tokens)


def test_the_built_in_prompt_says_what_it_is(model):
    assert built_in(model, torch.tensor([[1, 2, 3]])) is None
    said = built_in(model, default_tokens(model))
    assert said == "The built-in prompt: 6 different random tokens, twice, since the model has no tokenizer."
    model.tokenizer = CharTokenizer(tuple("ACGT"))
    assert built_in(model, default_tokens(model)).endswith("since the tokenizer lacks letters of the built-in text.")


def test_default_of_a_tokenizer_that_lacks_its_characters_falls_back_to_tokens(model):
    model.tokenizer = CharTokenizer(tuple("ACGT"))
    assert default_tokens(model).shape == (1, 12)


def test_default_is_cut_to_the_context():
    characters = CharTokenizer.from_text(CHARACTER_PROMPT)
    model = HookedGPT(GPTConfig(n_layers=1, d_model=6, n_heads=2, n_ctx=11, d_vocab=characters.d_vocab))
    model.tokenizer = characters
    assert default_tokens(model).shape == (1, 11)


def test_text_and_ids_become_one_sequence(reader):
    assert prompt_tokens(reader, "xyz").tolist() == [reader.tokenizer.encode("xyz")]
    assert prompt_tokens(reader, ids=[3, 1, 2]).tolist() == [[3, 1, 2]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"text": "hello"}, ValueError, "no tokenizer"),
        ({"ids": []}, ValueError, "empty"),
        ({"ids": [1] * 14}, ValueError, "14 tokens.* n_ctx = 13"),
        ({"ids": [3, 17]}, IndexError, "token 1 is 17.* vocabulary of 17"),
        ({"ids": [-1]}, IndexError, "token 0 is -1"),
        ({"ids": [10**30]}, IndexError, "token 0 is 1000"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(model, arguments, error, message):
    with pytest.raises(error, match=message):
        prompt_tokens(model, **arguments)


def test_characters_that_the_tokenizer_lacks_are_named(reader):
    with pytest.raises(ValueError, match="'#' at position 1"):
        prompt_tokens(reader, "x#")


def test_token_ids_are_read_with_spaces_or_commas():
    assert parse_tokens(" 1 2,3,  4\n") == [1, 2, 3, 4]
    assert parse_tokens("-1") == [-1]
    with pytest.raises(ValueError, match="token 1 is 'x'"):
        parse_tokens("1 x 3")
    with pytest.raises(ValueError, match="no token ids"):
        parse_tokens("  ")


def test_every_character_without_a_shape_gets_a_mark():
    assert visible(" the\n\t") == "·the⏎⇥"
    assert visible("a\u200bb\u202ec\x00") == "a\\u200bb\\u202ec\\u0000"
    assert visible("\u0301") == "\N{DOTTED CIRCLE}\u0301"
    assert visible("") == "∅"
    assert visible("naïve 🙂") == "naïve·🙂"


def test_labels_are_ids_without_a_tokenizer_and_mark_ids_beyond_it(model):
    assert token_labels(model, [3, 16]) == ("3", "16")
    model.tokenizer = CharTokenizer(tuple("a b"))
    assert token_labels(model, [0, 1, 16]) == ("a", "·", "<16>")
