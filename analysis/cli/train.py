"""`circuits train`: a GPT from a text or a task."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from circuits.config import ACTIVATIONS, GPTConfig, RotaryScaling
from circuits.training.settings import TrainingConfig

if TYPE_CHECKING:
    from circuits.training.data import Data

HELP = "train a GPT on a text or a task, and save it as one file"
EXAMPLES = (
    "circuits train --text tinyshakespeare.txt --out shakespeare.safetensors",
    "circuits train --text tinyshakespeare.txt --out shakespeare.safetensors --resume",
    "circuits train --task repeated --attn-only --n-layers 2 --norm none --out induction.safetensors --save-every 500",
)
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports

_COURSE = GPTConfig.course()
_SIZES = {
    "n_layers": "number of blocks",
    "d_model": "width of the residual stream",
    "n_heads": "query heads per layer",
    "n_ctx": "length of a sequence, in tokens",
}
_DERIVED_SIZES = {
    "d_head": "width of a head (default: d_model / n_heads)",
    "d_mlp": "hidden width of the MLP (default: 4 d_model)",
    "n_kv_heads": "key and value heads (default: n_heads)",
    "rotary_dim": "how many coordinates of a head turn (default: all)",
}
_WRITTEN = {  # what takes more than one word or number, and how it is written
    "window": ("N[,N…]", "how many positions a query sees, in all layers or in each: 256 or 256,all (default: all)"),
    "rotary_scaling": ("JSON", 'stretched frequencies, as {"kind": "linear", "factor": 2} (default: none)'),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "act": ACTIVATIONS,
    "norm": ("layernorm", "rmsnorm", "none"),
    "norm_placement": ("pre", "post"),
    "positions": ("learned", "rotary", "none"),
    "rotary_layout": ("half", "interleaved"),
    "parallel_blocks": ("none", "shared_norm", "two_norms"),
}
_SWITCHES = {
    "attn_only": "no MLPs",
    "gated_mlp": "gate the MLP",
    "bias_qkv": "biases on queries, keys and values",
    "bias_out": "bias on the attention output",
    "bias_mlp": "biases on the MLP's maps",
    "bias_unembed": "bias on the logits",
    "tie_embeddings": "one matrix embeds and unembeds",
    "final_norm": "normalise before the unembedding (default: for pre-norm)",
    "qk_norm": "normalise queries and keys",
    "branch_norm": "normalise what a branch writes",
}
_NUMBERS = {
    "norm_eps": "ε of the norms",
    "rotary_base": "base of the rotary frequencies",
    "attn_scale": "factor on the scores (default: 1 / sqrt(d_head))",
    "attn_softcap": "soft cap on the scores (default: none)",
    "logit_softcap": "soft cap on the logits (default: none)",
    "embed_scale": "factor on the token embedding",
}
_TRAINING = {
    "steps": "number of updates",
    "batch_size": "sequences per update",
    "lr": "highest learning rate",
    "final_lr": "where the cosine ends, as a fraction of lr",
    "warmup": "updates of linear warm-up (default: a tenth of the steps, at most 100)",
    "weight_decay": "AdamW's decay of matrices and embeddings",
    "beta1": "AdamW's decay of the first moment",
    "beta2": "AdamW's decay of the second moment",
    "init_scale": "factor on the initial matrices and embeddings, above 1 for models without norms",
    "clip": "largest norm of the gradient",
    "eval_every": "updates between two rows of the losses and two saves of the state (default: steps / 4, up to 250)",
    "seed": "seed of weights and batches",
}
_TASK = {
    "d_vocab": "vocabulary of a task",
    "min_repeat": "shortest repeated block of a task",
    "max_repeat": "longest repeated block of a task",
}
_TASK_DEFAULTS = {"d_vocab": 65, "min_repeat": 4, "max_repeat": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to train on, where to, and every field of the architecture and of the training, one option each."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", metavar="FILE", help="a UTF-8 text, one token per character, the last tenth held out")
    source.add_argument("--task", choices=("repeated",), help="repeated: random tokens in which a block stands twice")
    parser.add_argument("--out", metavar="PATH", required=True, help="the model's file, ending in .safetensors")
    parser.add_argument("--resume", action="store_true", help="go on from the state that a stopped run left by PATH")
    parser.add_argument("--save-every", type=int, metavar="N", help="keep the model of every N updates too")
    parser.add_argument("--device", default="cpu", help="where to train: cpu, cuda, mps (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--json", action="store_true", help="print the card of the trained model as JSON")
    training = parser.add_argument_group("training")
    for name, text in _TRAINING.items():
        default = getattr(TrainingConfig, name)
        _option(training, name, text, type=int if default is None else type(default), default=default)
    task = parser.add_argument_group("task")
    for name, text in _TASK.items():
        _option(task, name, text, type=int, default=_TASK_DEFAULTS[name])
    d = _COURSE
    sizes = f"(V, T_max, d, H, L) = ({d.d_vocab}, {d.n_ctx}, {d.d_model}, {d.n_heads}, {d.n_layers})"
    _add_architecture(
        parser.add_argument_group(
            "architecture",
            f"Fields of GPTConfig. By default the course configuration: {sizes} of a GPT in GPT-2's style (pre-norm "
            "LayerNorm, learned positions, exact GELU).",
        )
    )


def _add_architecture(group: argparse._ArgumentGroup) -> None:
    for name, text in _SIZES.items():
        _option(group, name, text, type=int, default=getattr(_COURSE, name))
    for name, text in _DERIVED_SIZES.items():
        _option(group, name, text, type=int, default=None)
    for name, (metavar, text) in _WRITTEN.items():
        _option(group, name, text, default=None, metavar=metavar)
    for name, choices in _CHOICES.items():
        default = getattr(_COURSE, name)
        _option(group, name, "default: %(default)s", choices=choices, default=default or "none")
    for name, text in _SWITCHES.items():
        default = None if name == "final_norm" else getattr(_COURSE, name)
        _option(group, name, text, action=argparse.BooleanOptionalAction, default=default)
    for name, text in _NUMBERS.items():
        default = None if name == "attn_scale" else getattr(_COURSE, name)
        _option(group, name, text, type=float, default=default)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(group: argparse._ArgumentGroup, name: str, text: str, **options: Any) -> None:
    number = options.get("type") is not None
    if number:
        options["metavar"] = "N" if options["type"] is int else "X"
    shown = number and options["default"] is not None
    group.add_argument(_flag(name), dest=name, help=f"{text} (default: %(default)s)" if shown else text, **options)


def run(args: argparse.Namespace) -> int:
    """Train, and print what came out."""
    import torch

    from circuits.placement import check_device
    from circuits.training import Interrupted, train

    settings = TrainingConfig(**{name: getattr(args, name) for name in _TRAINING})
    data = _data(args)
    config = _config(args, data.d_vocab)
    command = command_line(args)
    check_device(args.device)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"threads must be at least 1, not {args.threads}")
        torch.set_num_threads(args.threads)
    try:
        model = train(
            config,
            data,
            settings,
            out=args.out,
            resume=args.resume,
            save_every=args.save_every,
            command=command,
            device=args.device,
            progress=True,
            on_record=_show,
        )
    except Interrupted as stopped:
        print(f"circuits train: {stopped}\ngo on with: {command} --resume", file=sys.stderr)
        return INTERRUPTED
    _print_result(args, model.card)
    return 0


def _data(args: argparse.Namespace) -> Data:
    from circuits.training import RepeatedData, TextData

    if args.text is not None:
        given = [_flag(name) for name in _TASK if getattr(args, name) != _TASK_DEFAULTS[name]]
        if given:
            raise ValueError(f"{', '.join(given)} belong to --task; a text brings its own vocabulary")
        return TextData.from_file(args.text, args.n_ctx)
    return RepeatedData(args.d_vocab, args.n_ctx, args.min_repeat, args.max_repeat, seed=args.seed)


def _config(args: argparse.Namespace, d_vocab: int) -> GPTConfig:
    fields = {name: getattr(args, name) for name in (*_SIZES, *_DERIVED_SIZES, *_SWITCHES, *_NUMBERS)}
    fields |= {name: None if getattr(args, name) == "none" else getattr(args, name) for name in _CHOICES}
    fields["parallel_blocks"] = fields["parallel_blocks"] or False
    fields["window"] = None if args.window is None else _windows(args.window)
    fields["rotary_scaling"] = None if args.rotary_scaling is None else _scaling(args.rotary_scaling)
    return GPTConfig(d_vocab=d_vocab, **fields)


def _windows(text: str) -> int | tuple[int | None, ...]:
    """``"5"`` serves all layers, ``"5,all"`` says it for each."""
    words = [word.strip() for word in text.split(",")]
    if not all(word == "all" or word.isdecimal() for word in words):
        raise ValueError(f"--window takes whole numbers and 'all', such as 256 or 256,all, not {text!r}")
    sizes = tuple(None if word == "all" else int(word) for word in words)
    return sizes[0] if len(sizes) == 1 and sizes[0] is not None else sizes


def _scaling(text: str) -> RotaryScaling:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError:
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(
            f'--rotary-scaling takes fields in JSON, such as {{"kind": "linear", "factor": 2}}, not {text!r}'
        )
    return RotaryScaling.from_dict(fields)


def command_line(args: argparse.Namespace) -> str:
    """The command that repeats this run: what differs from the defaults, files by their names alone."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["circuits", "train"]
    for name, value in vars(args).items():
        if name in ("resume", "json", "command") or value == parser.get_default(name) or value is None:
            continue
        if isinstance(value, bool):
            words.append(_flag(name) if value else f"--no-{name.replace('_', '-')}")
        else:
            words += [_flag(name), Path(value).name if name in ("text", "out") else str(value)]
    return shlex.join(words)


def _show(row: dict[str, float]) -> None:
    """One line per evaluation on standard error, above the bar where there is one."""
    from tqdm import tqdm

    training = f"training loss {row['train_loss']:.4f} (mean since step {row['since']:.0f})"
    line = f"step {row['step']:.0f}: {training}, validation loss {row['val_loss']:.4f} nats"
    tqdm.write(line, file=sys.stderr)


def _print_result(args: argparse.Namespace, card: dict[str, Any]) -> None:
    if args.json:
        from analysis.cli.output import print_json

        print_json({"out": str(args.out), "card": card})
        return
    loss = card["loss"]
    print(
        f"{args.out}: {card['parameters']:,} parameters after {card['steps']} steps, "
        f"training loss {loss['train']:.4f}, validation loss {loss['val']:.4f} nats"
    )
