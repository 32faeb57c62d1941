"""Hugging Face folders of every family predict what transformers predicts from them."""

from __future__ import annotations

import json

import huggingface
import pytest
import torch
from batches import SIDES, pad
from test_text import byte_level_json

from circuits import HookedGPT, load, save
from circuits.pretrained.folder import read_folder, read_tokenizer

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, F64], ids=str)
@pytest.mark.parametrize("name", huggingface.NAMES)
def test_saved_in_our_own_format_a_model_comes_back_bit_for_bit(pair, tmp_path, name, dtype):
    model = pair(name)[1]
    model = HookedGPT.from_state_dict(model.config, {n: t.to(dtype) for n, t in model.state_dict().items()})
    model.card = {"source": name}
    save(model, tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert (again.config, again.card, again.dtype) == (model.config, model.card, dtype)
    state = again.state_dict()
    assert all(torch.equal(t.view(torch.uint8), state[n].view(torch.uint8)) for n, t in model.state_dict().items())


BOS_RULES = {
    "nothing said": ({}, False, [258], False),
    "said in the config": ({"add_bos_token": True}, False, [258], True),
    "said in the post-processor": ({}, True, [258], True),
    "no such token": ({"bos_token": None}, False, None, False),
}


@pytest.mark.parametrize("case", BOS_RULES)
def test_one_rule_says_whether_a_text_begins_with_bos(tmp_path, case):
    config, in_post_processor, bos, begins = BOS_RULES[case]
    (tmp_path / "tokenizer.json").write_text(byte_level_json(in_post_processor))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    ours = read_tokenizer(tmp_path)
    assert ours.prepend_bos == begins
    plain = ours.encode("the thé", prepend_bos=False)
    assert ours.encode("the thé") == [*(bos if begins else []), *plain]
    assert ours.str_tokens(ours.encode("th")) == [*(["<s>"] if begins else []), "th"]
    if begins:
        assert ours.encode("<s>the") == ours.encode("the")  # never twice


def test_tokens_of_a_folder_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(byte_level_json(bos_in_post_processor=True))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>")
    theirs.save_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path)
    for text in ("the théorème", " th", "a<s>b", "🙂"):
        assert ours.encode(text) == theirs(text).input_ids
