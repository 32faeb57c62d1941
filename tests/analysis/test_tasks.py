"""Prompt pairs: what decides the answer is what differs, files read back, bad lines are named."""

from __future__ import annotations

import json
import re

import architectures
import pytest
import torch

from analysis.metrics import LogitDiff
from analysis.patching import activation_patch
from analysis.tasks import PromptPairs, greater_than, indirect_object, read_pairs, repeated_tokens
from circuits import GPTConfig, HookedGPT, load
from circuits.text import CharTokenizer


class WordTokenizer:
    """Words with the space before them; a number behind its second digit starts a token of its own."""

    bos_token_id, prepend_bos = None, False

    def __init__(self):
        self.vocab: dict[str, int] = {}

    @property
    def d_vocab(self):
        return 400

    def encode(self, text, prepend_bos=None):
        words = re.findall(r" ?\d\d|,| ?[^\s,\d]+", text)
        return [self.vocab.setdefault(word, len(self.vocab)) for word in words]

    def decode(self, ids):
        return "".join(self.str_tokens(ids))

    def str_tokens(self, ids):
        words = {index: word for word, index in self.vocab.items()}
        return [words[i] for i in ids]

    def to_dict(self):
        return {"kind": "words"}


def model_of(tokenizer=None, d_vocab=400, n_ctx=40):
    model = HookedGPT(GPTConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=n_ctx, d_vocab=d_vocab), dtype=torch.float64)
    model.tokenizer = tokenizer
    return model


def test_repeated_tokens_answer_with_what_stood_there_before():
    pairs = repeated_tokens(model_of(d_vocab=23), n=7, batch=5)
    assert isinstance(pairs.metric, LogitDiff)
    assert len(pairs) == 5
    for clean, corrupt, correct, wrong in zip(pairs.clean, pairs.corrupt, pairs.correct, pairs.wrong, strict=True):
        last = int(clean[-1])
        first_time = clean.tolist().index(last)
        assert clean[first_time + 1] == correct
        assert corrupt[first_time + 1] == wrong
        assert (clean != corrupt).sum() == 1
        assert wrong not in clean
    with pytest.raises(ValueError, match="no token left"):
        repeated_tokens(model_of(d_vocab=7), n=7)


def test_the_indirect_object_is_the_name_that_is_not_said_again():
    tokenizer = WordTokenizer()
    pairs = indirect_object(model_of(tokenizer), batch=9)
    for row in range(9):
        clean, corrupt = pairs.clean[row], pairs.corrupt[row]
        if pairs.clean_mask is not None:
            clean, corrupt = clean[pairs.clean_mask[row]], corrupt[pairs.corrupt_mask[row]]
        text, other = tokenizer.decode(clean.tolist()), tokenizer.decode(corrupt.tolist())
        right, wrong = tokenizer.str_tokens([int(pairs.correct[row]), int(pairs.wrong[row])])
        assert text.count(right) == 1
        assert text.count(wrong) == 2
        assert other.count(right) == 2
        assert (clean != corrupt).sum() == 1
    assert {tuple(indirect_object(model_of(tokenizer), batch=3, seed=s).correct.tolist()) for s in (0, 0, 1)} != {1}
    again = indirect_object(model_of(tokenizer), batch=9)
    assert torch.equal(again.clean, pairs.clean)


def test_roles_of_tokens_need_no_tokenizer():
    pairs = indirect_object(model_of(d_vocab=19), batch=6, on_tokens=True, length=9)
    for clean, corrupt, correct, wrong in zip(pairs.clean, pairs.corrupt, pairs.correct, pairs.wrong, strict=True):
        assert (clean == correct).sum() == 1
        assert (clean == wrong).sum() == 2
        assert (corrupt == correct).sum() == 2
        assert (clean != corrupt).sum() == 1
    with pytest.raises(ValueError, match="needs a tokenizer"):
        indirect_object(model_of())
    with pytest.raises(ValueError, match="at least 6 positions"):
        indirect_object(model_of(), on_tokens=True, length=5)
    with pytest.raises(ValueError, match="0 of 26 names are single tokens"):
        indirect_object(model_of(CharTokenizer.from_text("abc")))


def test_the_correct_year_is_later_and_the_wrong_one_earlier():
    tokenizer = WordTokenizer()
    pairs = greater_than(model_of(tokenizer), batch=9)
    for row in range(9):
        text = tokenizer.decode(pairs.clean[row].tolist())
        other = tokenizer.decode(pairs.corrupt[row].tolist())
        right, wrong = (int(word) for word in tokenizer.str_tokens([int(pairs.correct[row]), int(pairs.wrong[row])]))
        year = int(re.search(r"year \d\d(\d\d)", text)[1])
        assert wrong < year < right
        assert re.search(r"year \d\d01", other)
        assert text.endswith(re.search(r"year (\d\d)", text)[1])
    with pytest.raises(ValueError, match="fewer than 20"):
        greater_than(model_of(CharTokenizer.from_text("The warlstdfomyeipnugkvx 0123456789")))
    on_tokens = greater_than(model_of(d_vocab=21), batch=9, on_tokens=True)
    years = on_tokens.clean.max(1).values
    assert (on_tokens.wrong < years).all()
    assert (years < on_tokens.correct).all()
    assert (on_tokens.corrupt.max(1).values == 10).all()


def test_pairs_written_are_pairs_read(tmp_path):
    model = model_of(WordTokenizer())
    pairs = indirect_object(model, batch=4)
    pairs.write(tmp_path / "ioi.jsonl")
    back = read_pairs(tmp_path / "ioi.jsonl")
    assert back.name == "ioi"
    for part in ("clean", "corrupt", "correct", "wrong"):
        assert torch.equal(getattr(back, part), getattr(pairs, part))
    found = activation_patch(model, back.clean, back.corrupt, metric=back.metric, progress=False, **back.masks)
    assert found.values[0].nansum() > 0


def test_texts_are_encoded_and_padded_on_the_right(tmp_path):
    tokenizer = CharTokenizer.from_text("abcdef")
    lines = [
        {"clean": "abc", "corrupt": "abd", "correct": "e", "wrong": "f"},
        {"clean": [0, 1], "corrupt": "bb", "correct": 3, "wrong": "a"},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    pairs = read_pairs(file, tokenizer)
    assert pairs.clean.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert pairs.clean_mask.tolist() == [[True, True, True], [True, True, False]]
    assert pairs.correct.tolist() == [4, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"clean": "abc"', "line 2: not JSON"),
        ('{"clean": "abc"}', "line 2: expected an object with clean, corrupt, correct, wrong"),
        ('{"clean": "a", "corrupt": "b", "correct": "ab", "wrong": "c"}', "correct 'ab' is 2 tokens of this model"),
        (
            '{"clean": "a", "corrupt": "b", "correct": "c", "wrong": 2}',
            "line 2: correct and wrong are the same token 2",
        ),
        ('{"clean": "a", "corrupt": 3, "correct": "c", "wrong": "d"}', "line 2: corrupt must be a text or a list"),
        (
            '{"clean": "a", "corrupt": "b", "correct": null, "wrong": "d"}',
            "line 2: correct must be a text or a token id",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"clean": "a", "corrupt": "b", "correct": "c", "wrong": "d"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_pairs(file, CharTokenizer.from_text("abcdef"))


def test_texts_without_a_tokenizer_and_empty_files_are_named(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text('{"clean": "a", "corrupt": "b", "correct": "c", "wrong": "d"}\n')
    with pytest.raises(ValueError, match="clean is a text, but the model has no tokenizer"):
        read_pairs(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no pairs"):
        read_pairs(file)


@pytest.mark.parametrize("task", [indirect_object, greater_than])
def test_a_task_of_no_prompts_is_refused(task):
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        task(architectures.make("course"), batch=0, on_tokens=True)


def test_years_need_a_tokenizer_with_digits():
    with pytest.raises(ValueError, match="cuts 0 years of a century in two pieces"):
        greater_than(load("shakespeare"))


def test_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"pairs\.jsonl is not UTF-8 text"):
        read_pairs(file)


def test_equal_answers_and_missing_parts_are_refused():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="pair 1: correct and wrong are the same token 4"):
        PromptPairs("x", tokens, tokens, torch.tensor([1, 4]), torch.tensor([2, 4]))
    with pytest.raises(ValueError, match="every pair needs its four parts"):
        PromptPairs("x", tokens, tokens[:1], torch.tensor([1, 4]), torch.tensor([2, 3]))


def test_letters_that_a_tokenizer_lacks_are_named_with_file_and_line(tmp_path):
    file, tokenizer = tmp_path / "pairs.jsonl", CharTokenizer.from_text("abcdef")
    good = '{"clean": "abc", "corrupt": "abd", "correct": "e", "wrong": "f"}'
    for bad in (good.replace("abc", "abz"), good.replace('"e"', '"z"')):
        file.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=r"pairs\.jsonl, line 2: (clean|correct): .*z"):
            read_pairs(file, tokenizer)


def test_token_ids_outside_a_vocabulary_are_named_with_file_and_line(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"clean": [1, 7], "corrupt": [2, 3], "correct": 4, "wrong": 5}\n')
    assert len(read_pairs(file)) == 1
    with pytest.raises(ValueError, match=r"line 1: clean has token id 7, outside a vocabulary of 7 tokens"):
        read_pairs(file, d_vocab=7)
