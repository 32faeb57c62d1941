"""`circuits train`: what a command line trains, what it records, and how it is stopped and resumed."""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from analysis.cli import main, parser_of, train
from circuits import GPTConfig, storage

ROOT = Path(__file__).parents[2]
SMALL = "--n-layers 1 --d-model 6 --n-heads 3 --n-ctx 13 --steps 6 --warmup 1 --batch-size 2 --eval-every 4".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 30)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parsed(*words: str):
    return parser_of("train", train).parse_args(list(words))


def test_a_text_is_trained_on_and_the_card_repeats_the_command(folder, capsys):
    assert main(["train", "--text", str(folder / "fox.txt"), "--out", "m.safetensors", *SMALL, "--no-bias-mlp"]) == 0
    shown = capsys.readouterr()
    assert "m.safetensors: 900 parameters after 6 steps, training loss" in shown.out
    begun, *rows = shown.err.splitlines()
    assert begun == "training from step 0 to 6, a line every 4"
    assert [line.split(":")[0] for line in rows] == ["step 4", "step 6"]
    assert "(mean since step 0)" in rows[0]
    assert "(mean since step 4)" in rows[1]
    model = storage.read("m.safetensors")
    assert model.config.bias_mlp is False
    command = model.card["command"]
    assert str(folder) not in json.dumps(model.card)
    assert command.startswith("circuits train --text fox.txt --out m.safetensors ")
    before = Path("m.safetensors").read_bytes()
    assert main(command.split()[1:]) == 0
    assert Path("m.safetensors").read_bytes() == before


def test_json_is_the_card(folder, capsys):
    words = ["--task", "repeated", "--d-vocab", "17", "--attn-only", "--norm", "none", "--out", "m.safetensors"]
    assert main(["train", *words, *SMALL, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    model = storage.read("m.safetensors")
    assert shown == {"out": "m.safetensors", "card": model.card}
    assert (model.config.attn_only, model.config.norm, model.config.d_vocab) == (True, None, 17)
    assert model.tokenizer is None


def test_every_field_of_the_architecture_can_be_chosen(folder):
    words = "--positions rotary --rotary-dim 2 --rotary-base 500 --norm rmsnorm --gated-mlp --act silu --n-kv-heads 1 "
    words += (
        "--d-head 4 --d-mlp 9 --qk-norm --tie-embeddings --parallel-blocks shared_norm --window 5 --logit-softcap 30"
    )
    assert main(["train", "--text", "fox.txt", "--out", "m.safetensors", *SMALL, *words.split()]) == 0
    config = storage.read("m.safetensors").config
    assert (config.positions, config.rotary_dim, config.rotary_base, config.norm) == ("rotary", 2, 500.0, "rmsnorm")
    assert (config.gated_mlp, config.act, config.n_kv_heads, config.d_head, config.d_mlp) == (True, "silu", 1, 4, 9)
    assert (config.qk_norm, config.tie_embeddings, config.parallel_blocks) == (True, True, "shared_norm")
    assert (config.window, config.logit_softcap) == ((5,), 30.0)


def test_windows_by_layer_and_stretched_frequencies_can_be_chosen_and_are_recorded(folder):
    words = ["--positions", "rotary", "--rotary-scaling", '{"kind": "linear", "factor": 3}', "--window", "5,all"]
    words += ["--n-layers", "2", "--d-head", "4"]
    assert main(["train", "--text", "fox.txt", "--out", "m.safetensors", *SMALL, *words]) == 0
    model = storage.read("m.safetensors")
    assert model.config.window == (5, None)
    assert (model.config.rotary_scaling.kind, model.config.rotary_scaling.factor) == ("linear", 3)
    before = Path("m.safetensors").read_bytes()
    assert main(shlex.split(model.card["command"])[1:]) == 0
    assert Path("m.safetensors").read_bytes() == before


def test_every_field_of_the_configuration_has_its_option():
    """But for the vocabulary, which a text or a task brings."""
    assert {field.name for field in dataclasses.fields(GPTConfig)} <= {*vars(parsed("--text", "a", "--out", "b"))}


def test_the_recorded_command_holds_what_differs_from_the_defaults_alone():
    args = parsed(
        "--text", "a/b.txt", "--out", "c/d.safetensors", "--lr", "0.01", "--no-bias-out", "--resume", "--json"
    )
    assert train.command_line(args) == "circuits train --text b.txt --out d.safetensors --lr 0.01 --no-bias-out"


@pytest.mark.parametrize("example", train.EXAMPLES)
def test_examples_parse(example):
    assert example.startswith("circuits train ")
    parsed(*example.split()[2:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "missing.txt"], "missing.txt: No such file or directory"),
        (["--text", "fox.txt", "--d-vocab", "9"], "--d-vocab belong to --task"),
        (["--text", "fox.txt", "--n-heads", "4"], "d_model 6 is not n_heads 4 × d_head"),
        (["--text", "fox.txt", "--n-ctx", "500"], "is too short for sequences of n_ctx 500"),
        (["--text", "fox.txt", "--lr", "-1"], "lr must lie between 0 and inf, not -1.0"),
        (["--text", "fox.txt", "--resume"], "nothing to resume"),
        (["--text", "fox.txt", "--threads", "0"], "threads must be at least 1, not 0"),
        (["--text", "fox.txt", "--device", "abacus"], "device 'abacus' cannot be used"),
        (["--task", "repeated", "--max-repeat", "99"], "do not fit sequences of n_ctx 13"),
        (["--text", "fox.txt", "--window", "5,none"], "--window takes whole numbers and 'all'"),
        (["--text", "fox.txt", "--window", "5,5"], "window lists 2 layers, but n_layers is 1"),
        (["--text", "fox.txt", "--window", ""], "--window takes whole numbers and 'all'"),
        (["--text", "fox.txt", "--rotary-scaling", "2"], "--rotary-scaling takes fields in JSON"),
        (["--text", "fox.txt", "--rotary-scaling", "linear"], "--rotary-scaling takes fields in JSON"),
        (["--text", "fox.txt", "--rotary-scaling", '{"kind": "linear"}'], "the rotary scaling lacks factor"),
        (["--task", "copy"], "invalid choice: 'copy'"),
        ([], "one of the arguments --text --task is required"),
    ],
)
def test_bad_input_is_one_line_and_status_2(folder, capsys, words, message):
    assert main(["train", "--out", "m.safetensors", *SMALL, *words]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""
    assert sorted(path.name for path in folder.iterdir()) == ["fox.txt"]


def test_ctrl_c_saves_and_says_how_to_go_on(folder):
    words = ["--text", "fox.txt", "--out", "m.safetensors", *SMALL, "--steps", "1000000", "--eval-every", "10"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "analysis.cli", "train", *words], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not Path("m.training.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("go on with: circuits train --text fox.txt")
    assert errors.splitlines()[-1].endswith("--resume")
    tensors, header = storage.read_tensors(Path("m.training.safetensors"))
    assert header["step"] >= 10
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert not Path("m.safetensors").exists()
