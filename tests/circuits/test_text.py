"""Tokenizers: what goes in comes out, what does not fit is named, and beginning-of-sequence tokens follow one rule."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from unchecked import unchecked

from circuits import GPTConfig, HookedGPT
from circuits.text import CharTokenizer, PretrainedTokenizer, Tokenizer, tokenizer_from_dict


def byte_level_json(bos_in_post_processor: bool = False) -> str:
    """A tokenizer.json of GPT-2's kind: the 256 bytes, two merges and one added token."""
    from tokenizers import AddedToken, Tokenizer as Rust, decoders, models, pre_tokenizers, processors

    vocab = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"th": 256, "Ġth": 257}
    rust = Rust(models.BPE(vocab=vocab, merges=[("t", "h"), ("Ġ", "th")]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    if bos_in_post_processor:
        rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    return rust.to_str()


def sentencepiece_json() -> str:
    """A tokenizer.json of Llama's kind: ``▁`` for spaces, ``<0xE2>`` for bytes."""
    from tokenizers import Tokenizer as Rust, decoders, models, normalizers

    vocab = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    rust = Rust(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return rust.to_str()


@given(st.text(alphabet="abcé\n 漢😀", min_size=1))
def test_characters_survive_encoding_and_decoding(text):
    tokenizer = CharTokenizer.from_text(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.str_tokens(ids) == list(text)
    assert set(ids) == set(range(tokenizer.d_vocab))
    assert tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer


def test_characters_outside_the_vocabulary_are_named_with_their_place():
    tokenizer = CharTokenizer.from_text("abc")
    with pytest.raises(ValueError, match=r"among the tokenizer's 3: '€' at position 2, 'x' at position 4$"):
        tokenizer.encode("ab€cx€")
    with pytest.raises(ValueError, match=r"'4' at position 4, and 5 more$"):
        tokenizer.encode("0123456789")


def test_token_outside_the_vocabulary_is_refused():
    with pytest.raises(IndexError, match=r"token id 3 is not in a vocabulary of 3 \(0 to 2\)"):
        CharTokenizer.from_text("abc").decode([0, 3])
    with pytest.raises(IndexError, match="token id -1"):
        CharTokenizer.from_text("abc").str_tokens([-1])


def test_character_tokenizer_has_no_beginning_of_sequence_token():
    with pytest.raises(ValueError, match="no beginning-of-sequence token"):
        CharTokenizer.from_text("abc").encode("a", prepend_bos=True)


@pytest.mark.parametrize(
    ("vocab", "message"), [((), "at least one"), (("ab",), "entry 0 must be one"), (("a", "b", "a"), "'a' stands more")]
)
def test_nonsense_vocabularies_are_refused(vocab, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(vocab)


def test_both_tokenizers_are_tokenizers():
    assert isinstance(CharTokenizer.from_text("abc"), Tokenizer)
    assert isinstance(PretrainedTokenizer(byte_level_json()), Tokenizer)


def test_pretrained_text_survives_encoding_and_decoding():
    tokenizer = PretrainedTokenizer(byte_level_json())
    text = "that is the thing — 漢\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict()))) == tokenizer
    assert tokenizer.d_vocab == 259


def test_str_tokens_keep_spaces_and_show_bytes_that_are_no_character():
    tokenizer = PretrainedTokenizer(byte_level_json())
    assert tokenizer.str_tokens(tokenizer.encode("é th<s>")) == [r"\xc3", r"\xa9", " th", "<s>"]
    tokenizer = PretrainedTokenizer(sentencepiece_json())
    assert tokenizer.str_tokens(tokenizer.encode(" aé")) == [" a", r"\xc3", r"\xa9"]
    assert "".join(tokenizer.str_tokens(tokenizer.encode("a a"))) == "a a"


@pytest.mark.parametrize(
    ("config", "in_post_processor", "expected"),
    [
        ({"bos_token": "<s>", "add_bos_token": True}, False, True),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, False, True),
        ({"bos_token": "<s>", "add_bos_token": False}, True, False),
        ({"bos_token": "<s>"}, True, True),
        ({"bos_token": "<s>"}, False, False),
        ({"bos_token": None}, True, False),
        ({}, False, False),
    ],
)
def test_bos_follows_the_tokenizers_own_config(config, in_post_processor, expected):
    tokenizer = PretrainedTokenizer.from_files(byte_level_json(in_post_processor), config)
    assert tokenizer.prepend_bos is expected
    plain = PretrainedTokenizer(byte_level_json()).encode("th th")
    assert tokenizer.encode("th th") == ([258] if expected else []) + plain


def test_bos_is_never_put_in_front_twice_and_can_be_left_out():
    tokenizer = PretrainedTokenizer.from_files(byte_level_json(True), {"bos_token": "<s>"})
    assert tokenizer.encode("<s>th") == tokenizer.encode("th") == [258, 256]
    assert tokenizer.encode("th", prepend_bos=False) == [256]
    with pytest.raises(ValueError, match="no beginning-of-sequence token"):
        PretrainedTokenizer(byte_level_json()).encode("th", prepend_bos=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{}",), "not a tokenizer.json"),
        ((byte_level_json(), 259), "bos_token_id 259 is not in a vocabulary of 259"),
        ((byte_level_json(), None, True), "bos_token_id is None"),
    ],
)
def test_nonsense_pretrained_tokenizers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PretrainedTokenizer(*arguments)


@pytest.mark.parametrize(
    ("data", "message"), [({"kind": "words"}, "'words' is not one of"), ({"kind": "char"}, "needs 'vocab'")]
)
def test_unreadable_tokenizer_data_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_dict(data)


def model_of_characters() -> HookedGPT:
    model = HookedGPT(GPTConfig(n_layers=1, d_model=6, n_heads=2, n_ctx=5, d_vocab=3))
    model.tokenizer = CharTokenizer(("a", "b", "c"))
    return model


@pytest.mark.parametrize(
    "tokens", [[2, 0], (2, 0), torch.tensor([2, 0]), torch.tensor([[2, 0]]), np.array([2, 0]), [np.int64(2), 0]]
)
def test_one_sequence_may_come_in_any_form(tokens):
    with unchecked():
        assert model_of_characters().to_string(tokens) == "ca"
        assert model_of_characters().to_str_tokens(tokens) == ["c", "a"]
        assert model_of_characters().to_string(torch.tensor(2)) == "c"


@pytest.mark.parametrize("tokens", [[1.7], torch.tensor([1.7]), [True], ["a"], None, [[[1]]]])
def test_what_is_no_token_is_refused_and_not_rounded(tokens):
    with unchecked(), pytest.raises(TypeError, match=r"must be a whole number|expected a list of token ids"):
        model_of_characters().to_string(tokens)


def test_several_sequences_are_not_run_together():
    with unchecked(), pytest.raises(ValueError, match="expected one sequence of token ids, not a batch of 2"):
        model_of_characters().to_string(torch.tensor([[1, 2], [0, 1]]))


@pytest.mark.parametrize("text", [5, None, b"ab", ["a", 5]])
def test_what_is_no_text_is_refused(text):
    with unchecked(), pytest.raises(TypeError, match="expected a text, or a list of texts"):
        model_of_characters().to_tokens(text)
    with unchecked(), pytest.raises(TypeError, match="expected a text"):
        CharTokenizer(("a",)).encode(text)


def test_no_texts_at_all_are_refused():
    with pytest.raises(ValueError, match="at least one text"):
        model_of_characters().to_tokens([])


def test_one_text_is_not_a_batch_of_its_characters():
    with unchecked(), pytest.raises(TypeError, match="expected a text, or a list of texts, not 'abc'"):
        model_of_characters().to_batch("abc")
