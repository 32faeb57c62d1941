"""Training: the data, the schedule, the loop, and above all that a stopped run ends like one that was never stopped."""

import hashlib
import math
import os
import signal
import threading

import pytest
import torch

from circuits import storage
from circuits.config import GPTConfig
from circuits.model import HookedGPT
from circuits.training import Interrupted, RepeatedData, TextData, TrainingConfig, text_loss, train
from circuits.training.data import stream
from circuits.training.optim import make_optimizer, update
from circuits.training.state import fresh_run, state_path, stop_requests

TEXT = "the quick brown fox jumps over the lazy dog.\n" * 30
SETTINGS = TrainingConfig(steps=12, batch_size=3, warmup=2, eval_every=5, lr=1e-2, seed=4)


def tiny(d_vocab: int, **changes) -> GPTConfig:
    sizes = {"n_layers": 1, "d_model": 6, "n_heads": 3, "d_head": 5, "d_mlp": 11, "n_ctx": 13}
    return GPTConfig(d_vocab=d_vocab, **(sizes | changes))


@pytest.fixture
def data():
    return TextData.from_text(TEXT, n_ctx=13, source={"file": "fox.txt"})


@pytest.fixture
def config(data):
    return tiny(data.d_vocab)


def same_weights(one: HookedGPT, other: HookedGPT) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def interrupt_at(step: int):
    """A callback on the loss history that presses Ctrl-C."""

    def press(row):
        if row["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    return press


# -------------------------------------------------------------------------------------------------- settings


def test_learning_rate_warms_up_and_follows_a_cosine():
    settings = TrainingConfig(steps=110, warmup=10, lr=2.0, final_lr=0.25)
    assert settings.lr_at(0) == pytest.approx(0.2)
    assert settings.lr_at(9) == settings.lr_at(10) == 2.0
    assert settings.lr_at(60) == pytest.approx(2.0 * (0.25 + 0.75 / 2))
    assert settings.lr_at(110) == pytest.approx(0.5)
    rates = [settings.lr_at(step) for step in range(10, 110)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1, not 0"),
        ({"steps": 50, "warmup": 100}, ValueError, "warmup 100 is longer than the run of 50 steps"),
        ({"lr": 0.0}, ValueError, "lr must be positive"),
        ({"lr": math.nan}, ValueError, "lr must lie between 0 and inf, not nan"),
        ({"final_lr": 1.5}, ValueError, r"final_lr must lie between 0 and 1, not 1\.5"),
        ({"beta2": 1.0}, ValueError, "beta2 must be below 1"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(setting, error, message):
    with pytest.raises(error, match=message):
        TrainingConfig(**setting)


@pytest.mark.parametrize(
    ("steps", "warmup", "eval_every"), [(5000, 100, 250), (4000, 100, 250), (1000, 100, 250), (40, 4, 10), (3, 0, 1)]
)
def test_warm_up_and_evaluations_of_a_short_run_fit_into_it(steps, warmup, eval_every):
    settings = TrainingConfig(steps=steps)
    assert (settings.warmup, settings.eval_every) == (warmup, eval_every)
    assert settings == TrainingConfig(steps=steps, warmup=warmup, eval_every=eval_every)
    assert settings.to_dict()["warmup"] == warmup


def test_only_matrices_and_embeddings_decay():
    model = HookedGPT(tiny(17, bias_qkv=True, bias_unembed=True))
    decaying, still = make_optimizer(model, TrainingConfig(weight_decay=0.3)).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decaying["weight_decay"] == 0.3
    assert still["weight_decay"] == 0.0
    assert all(names[id(p)].endswith(".weight") for p in decaying["params"])
    assert all(names[id(p)].endswith((".w", ".b", ".bias")) for p in still["params"])
    assert len(decaying["params"]) + len(still["params"]) == len(names)


def test_gradient_is_clipped_as_a_whole(config, data):
    settings = TrainingConfig(clip=1e-3)
    model = HookedGPT(config)
    update(model, make_optimizer(model, settings), *data.batch(3, stream(0, "batch")), settings, 0)
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_init_scale_multiplies_matrices_and_leaves_norms(config):
    plain = fresh_run(config, TrainingConfig(seed=2), None).model
    scaled = fresh_run(config, TrainingConfig(seed=2, init_scale=5.0), None).model
    assert torch.equal(scaled.W_E, plain.W_E * 5)
    assert torch.equal(scaled.state_dict()["ln_final.w"], plain.state_dict()["ln_final.w"])


# ------------------------------------------------------------------------------------------------------ data


def test_the_last_tenth_is_held_out(data):
    assert data.tokenizer.decode(data.train_tokens.tolist() + data.validation_tokens.tolist()) == TEXT
    assert len(data.validation_tokens) == len(TEXT) - int(0.9 * len(TEXT))


def test_text_batches_are_windows_of_the_training_part_and_their_successors(data):
    inputs, targets = data.batch(7, stream(0, "batch", 3))
    assert inputs.shape == targets.shape == (7, 13)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    training = data.tokenizer.decode(data.train_tokens.tolist())
    assert all(data.tokenizer.decode(row) in training for row in inputs.tolist())


def test_batches_depend_on_the_seed_and_the_step_alone(data):
    first = [data.batch(2, stream(1, "batch", step))[0] for step in range(3)]
    again = [data.batch(2, stream(1, "batch", step))[0] for step in (2, 1, 0)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], data.batch(2, stream(2, "batch", 0))[0])


def test_text_loss_counts_every_position_of_windows_that_do_not_overlap(config, data):
    model = HookedGPT(config, seed=1).double()
    tokens = data.validation_tokens[:45]  # 3 windows of 13, 5 tokens over, and a target for the last position
    nats = []
    for start in (0, 13, 26):
        log_probs = torch.log_softmax(model(tokens[None, start : start + 13])[0], dim=-1)
        nats += [-log_probs[t, tokens[start + t + 1]].item() for t in range(13)]
    assert text_loss(model, tokens) == pytest.approx(sum(nats) / 39, rel=1e-6)
    with pytest.raises(ValueError, match="at least 14 tokens, not 13"):
        text_loss(model, tokens[:13])


def test_text_files_are_recorded_by_name_and_hash(tmp_path):
    (tmp_path / "fox.txt").write_text(TEXT)
    card = TextData.from_file(tmp_path / "fox.txt", 13).card()
    assert card["file"] == "fox.txt"
    assert card["sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert str(tmp_path) not in str(card)


def test_texts_that_cannot_be_trained_on_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the text is empty"):
        TextData.from_text("", 13)
    with pytest.raises(ValueError, match="too short for sequences of n_ctx 13: 10 tokens remain, 14 are needed"):
        TextData.from_text("a" * 100, 13)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 999)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: .* at byte 0"):
        TextData.from_file(tmp_path / "latin.txt", 13)


def test_repeated_blocks_are_followed_by_themselves():
    data = RepeatedData(d_vocab=53, n_ctx=40, min_repeat=3)
    tokens, determined = data.sequences(200, stream(0, "test"))
    assert tokens.shape == determined.shape == (200, 41)
    starts, lengths = set(), set()
    for row, known in zip(tokens.tolist(), determined.tolist(), strict=True):
        earlier = [[p for p in range(t) if row[p] == row[t]] for t in range(41)]
        second = [t for t in range(41) if earlier[t]]
        assert all(len(earlier[t]) == 1 for t in second)  # fresh tokens stand once
        # A token is determined exactly where the one before it is a copy too, from the place just before.
        assert known == [
            bool(earlier[t] and earlier[t - 1] and earlier[t][0] == earlier[t - 1][0] + 1) for t in range(41)
        ]
        lengths.add(second[0] - earlier[second[0]][0])
        starts.add(earlier[second[0]][0])
    assert starts == set(range(7))
    assert len(lengths) > 10
    assert min(lengths) >= 3


def test_a_small_vocabulary_repeats_too():
    tokens, determined = RepeatedData(d_vocab=5, n_ctx=40).sequences(10, stream(0, "test"))
    assert determined.any(1).all()
    assert tokens.max() < 5


def test_every_determined_token_is_trained_on_and_a_tenth_of_the_others():
    data = RepeatedData(d_vocab=53, n_ctx=40)
    tokens, determined = data.sequences(300, stream(0, "test"))
    inputs, targets = data.batch(300, stream(0, "test"))
    counted = targets != -100
    assert torch.equal(inputs, tokens[:, :-1])
    assert torch.equal(targets[counted], tokens[:, 1:][counted])
    assert counted[determined[:, 1:]].all()
    assert counted[~determined[:, 1:]].float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_a_model_that_knows_nothing_has_loss_ln_d_vocab():
    data = RepeatedData(d_vocab=53, n_ctx=13, validation_sequences=20)
    model = HookedGPT(tiny(53))
    with torch.no_grad():
        model.state_dict()["unembed.weight"].zero_()
    assert data.validation_loss(model) == pytest.approx(math.log(53), rel=1e-6)


@pytest.mark.parametrize("lengths", [(1, None), (4, 3), (4, 8)])
def test_blocks_that_do_not_fit_are_refused(lengths):
    with pytest.raises(ValueError, match=r"expected 2 ≤ min_repeat ≤ max_repeat ≤ 7"):
        RepeatedData(53, 13, *lengths)


# ------------------------------------------------------------------------------------------------------ loop


def test_training_learns_a_text(config, data):
    settings = TrainingConfig(steps=150, batch_size=8, warmup=10, eval_every=75, lr=2e-2)
    model = train(config, data, settings)
    history = model.card["history"]
    assert history["step"] == [75, 150]
    assert history["val_loss"][1] < history["val_loss"][0] < math.log(data.d_vocab)
    assert history["val_loss"][1] < 1.2
    assert model.card["loss"]["val"] == pytest.approx(text_loss(model, data.validation_tokens))
    assert model.to_string(model.to_tokens("the fox")) == "the fox"


def test_training_uses_and_changes_no_global_randomness(config, data):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = train(config, data, SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same_weights(one, train(config, data, SETTINGS))


def test_card_says_how_the_model_came_to_be(config, data, tmp_path):
    train(config, data, SETTINGS, out=tmp_path / "m.safetensors", command="circuits train …")
    card = storage.read(tmp_path / "m.safetensors").card
    assert card["command"] == "circuits train …"
    assert (card["steps"], card["seed"]) == (12, 4)
    assert card["data"]["file"] == "fox.txt"
    assert card["history"]["step"] == [5, 10, 12]
    assert card["history"]["lr"] == [SETTINGS.lr_at(step) for step in (4, 9, 11)]
    assert set(card["versions"]) == {"qkov", "torch", "python"}
    assert card["training"] == SETTINGS.to_dict()
    assert list(tmp_path.iterdir()) == [tmp_path / "m.safetensors"]  # the state of a finished run is gone


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"norm": None, "attn_only": True, "d_mlp": 0}])
def test_a_stopped_run_ends_bit_identical_to_an_uninterrupted_one(data, tmp_path, changes):
    config = tiny(data.d_vocab, **changes)
    train(config, data, SETTINGS, out=tmp_path / "whole.safetensors")
    out = tmp_path / "stopped.safetensors"
    with pytest.raises(Interrupted, match=r"stopped after 5 of 12 steps; the state is in .*stopped\.training"):
        train(config, data, SETTINGS, out=out, on_record=interrupt_at(5))
    assert not out.exists()
    with pytest.raises(Interrupted, match="stopped after 10 of 12"):
        train(config, data, SETTINGS, out=out, resume=True, on_record=interrupt_at(10))
    train(config, data, SETTINGS, out=out, resume=True)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()  # weights, losses and all


def test_a_run_stopped_between_evaluations_resumes_exactly(config, data, tmp_path, monkeypatch):
    whole = train(config, data, SETTINGS)
    batches = []

    def batch(self, size, generator):
        batches.append(size)
        if len(batches) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, size, generator)

    original = TextData.batch
    monkeypatch.setattr(TextData, "batch", batch)
    with pytest.raises(Interrupted, match="stopped after 8 of 12"):
        train(config, data, SETTINGS, out=tmp_path / "m.safetensors")
    model = train(config, data, SETTINGS, out=tmp_path / "m.safetensors", resume=True)
    assert same_weights(model, whole)
    assert model.card["history"] == whole.card["history"]
    assert len(batches) == 12


def test_a_run_that_breaks_can_go_on_from_its_last_evaluation(config, data, tmp_path):
    def break_at_ten(row):
        if row["step"] == 10:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, data, SETTINGS, out=tmp_path / "m.safetensors", on_record=break_at_ten)
    model = train(config, data, SETTINGS, out=tmp_path / "m.safetensors", resume=True)
    assert same_weights(model, train(config, data, SETTINGS))


def test_a_state_is_never_lost_to_a_run_that_begins_anew(config, data, tmp_path):
    out = tmp_path / "m.safetensors"
    with pytest.raises(Interrupted):
        train(config, data, SETTINGS, out=out, on_record=interrupt_at(5))
    state = state_path(out).read_bytes()
    with pytest.raises(FileExistsError, match="the state of an unfinished run: go on with it"):
        train(config, data, SETTINGS, out=out)
    assert state_path(out).read_bytes() == state


def test_resuming_another_run_is_refused_with_every_difference(config, data, tmp_path):
    out = tmp_path / "m.safetensors"
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        train(config, data, SETTINGS, out=out, resume=True)
    with pytest.raises(Interrupted):
        train(config, data, SETTINGS, out=out, on_record=interrupt_at(5))
    other = TextData.from_text(TEXT, 13, {"file": "dog.txt"})
    settings = TrainingConfig(**(SETTINGS.to_dict() | {"lr": 0.5}))
    with pytest.raises(ValueError, match=r"another run: act .*file was 'fox\.txt' and is now 'dog\.txt'; lr was 0\.01"):
        train(config.replace(act="relu"), other, settings, out=out, resume=True)


def test_what_is_no_training_state_is_refused(config, data, tmp_path):
    storage.save(HookedGPT(config), state_path(tmp_path / "m.safetensors"))
    with pytest.raises(storage.CheckpointError, match="holds a model, not a training state"):
        train(config, data, SETTINGS, out=tmp_path / "m.safetensors", resume=True)
    with pytest.raises(Interrupted):
        train(config, data, SETTINGS, out=tmp_path / "n.safetensors", on_record=interrupt_at(5))
    with pytest.raises(storage.CheckpointError, match="holds a training state, not a model"):
        storage.read(state_path(tmp_path / "n.safetensors"))


def test_a_series_of_checkpoints_shows_the_run(config, data, tmp_path):
    out = tmp_path / "m.safetensors"
    with pytest.raises(Interrupted):
        train(config, data, SETTINGS, out=out, save_every=4, on_record=interrupt_at(5))
    final = train(config, data, SETTINGS, out=out, save_every=4, resume=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"m-{step:06d}.safetensors" for step in (0, 4, 8, 12)), "m.safetensors"]
    series = [storage.read(tmp_path / name) for name in names]
    assert [model.card["steps"] for model in series] == [0, 4, 8, 12, 12]
    assert same_weights(series[0], HookedGPT(config, seed=4))
    assert same_weights(series[3], final)
    assert not same_weights(series[1], series[2])


def test_a_diverged_run_says_so_and_leaves_its_last_state(config, data, tmp_path):
    settings = TrainingConfig(steps=12, batch_size=3, warmup=0, eval_every=2, lr=1e30, clip=1e9)
    with pytest.raises(ValueError, match="the run diverged; try a learning rate below 1e"):
        train(config, data, settings, out=tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"d_vocab": 99}, {}, "the data has 29 tokens, but d_vocab is 99"),
        ({"n_ctx": 14}, {}, "sequences of 13 tokens, but n_ctx is 14"),
        ({}, {"save_every": 0, "out": "m.safetensors"}, "save_every must be at least 1"),
        ({}, {"resume": True}, "need out"),
        ({}, {"out": "m.pt"}, "ends in .safetensors"),
        ({}, {"out": "nowhere/m.safetensors"}, "no folder 'nowhere'"),
    ],
)
def test_requests_that_could_not_end_well_are_refused_at_once(config, data, changes, options, message):
    with pytest.raises((ValueError, OSError), match=message):
        train(config.replace(**changes), data, SETTINGS, **options)


def test_a_second_interrupt_is_raised_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as stopping:
        assert not stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_training_runs_outside_the_main_thread(config, data, tmp_path):
    thread = threading.Thread(target=train, args=(config, data, SETTINGS), kwargs={"out": tmp_path / "m.safetensors"})
    thread.start()
    thread.join()
    assert same_weights(storage.read(tmp_path / "m.safetensors"), train(config, data, SETTINGS))
