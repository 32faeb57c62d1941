"""Hugging Face folders of every family predict what transformers predicts from them."""

from __future__ import annotations

import huggingface
import pytest
import torch
from batches import SIDES, pad

from circuits.pretrained.folder import read_folder

LENGTHS = (13, 9, 2, 6)
F32, F64 = torch.float32, torch.float64


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """name, dtype -> (transformers' model, ours), each read once."""
    made = {}

    def get(name, dtype=F64):
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            theirs = huggingface.save(name, folder, dtype)
            made[name, dtype] = (theirs, read_folder(folder, dtype=dtype))
        return made[name, dtype]

    return get


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(huggingface.VOCAB, (length,), generator=generator) for length in LENGTHS]


def off_by(ours, theirs):
    """Largest difference, relative to the largest logit."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("name", huggingface.NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-4), (F64, 1e-9)], ids=["float32", "float64"])
def test_logits_are_those_of_transformers(pair, name, dtype, tolerance):
    theirs, ours = pair(name, dtype)
    assert ours.dtype == dtype
    for prompt in prompts():
        assert off_by(ours(prompt[None]), huggingface.logits(theirs, prompt[None])) < tolerance


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", huggingface.NAMES)
def test_padding_on_either_side_gives_the_logits_of_transformers(pair, name, side):
    theirs, ours = pair(name)
    tokens, mask = pad(prompts(), side)
    expected = huggingface.logits(theirs, tokens, mask)
    assert off_by(ours(tokens, attention_mask=mask)[mask.bool()], expected[mask.bool()]) < 1e-9


@pytest.mark.parametrize("name", huggingface.NAMES)
def test_greedy_continuations_agree_token_by_token(pair, name):
    theirs, ours = pair(name, F32)
    for prompt in prompts(seed=1)[1:]:
        expected = theirs.generate(
            prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones_like(prompt[None]),
        )  # fmt: skip
        assert ours.generate(prompt[None], 12, temperature=0.0).tolist() == expected.tolist()
