"""Where a pass can be entered: the point before which nothing that an intervention changes has been computed."""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

from circuits import names as vocabulary
from circuits.config import GPTConfig


class Stage(IntEnum):
    """Points of entry inside a block, in the order of the pass. What stands before one is taken from the clean run."""

    EMBED = 0  # before the first block
    START = 1  # the stream before the block
    HEADS = 2  # every head's z
    MID = 3  # the stream between attention and MLP, or what a parallel block's MLP reads
    POST = 4  # the MLP's activations
    OUT = 5  # what the MLP adds
    END = 6  # the stream after the block


Entry = tuple[int, Stage]

_OF_FIELD = {
    Stage.HEADS: "z result ln1_post_scale ln1_post_normalized attn_out",
    Stage.MID: "resid_mid mlp_in ln2_scale ln2_normalized pre pre_linear",
    Stage.POST: "post ln2_post_scale ln2_post_normalized",
    Stage.OUT: "mlp_out",
    Stage.END: "resid_post",
}


@lru_cache(maxsize=64)
def entries(config: GPTConfig) -> dict[str, Entry]:
    """Hook name -> the entry of a pass in which it is the first to change, for every name of an architecture."""
    stages = {field: stage for stage, fields in _OF_FIELD.items() for field in fields.split()}
    if config.norm_placement == "post":  # there the norms stand after the additions
        stages |= {f"ln1_{part}": Stage.HEADS for part in ("scale", "normalized")}
        stages |= {f"ln2_{part}": Stage.OUT for part in ("scale", "normalized")}
    last = config.n_layers - 1
    found = {
        vocabulary.EMBED: (0, Stage.EMBED),
        vocabulary.POS_EMBED: (0, Stage.EMBED),
        vocabulary.FINAL_SCALE: (last, Stage.END),
        vocabulary.FINAL_NORMALIZED: (last, Stage.END),
    }
    for layer in range(config.n_layers):
        names = vocabulary.block_names(layer)
        for field in names.__slots__:
            if field != "layer":
                found[getattr(names, field)] = (layer, stages.get(field, Stage.START))
    present = set(vocabulary.hook_names(config))
    return {name: entry for name, entry in found.items() if name in present}


def clean_names(entry: Entry, config: GPTConfig) -> list[str]:
    """The activations of the clean run that a pass entered here goes on from."""
    layer, stage = entry
    n, parallel = vocabulary.block_names(layer), bool(config.parallel_blocks)
    # What stands before the MLP's output is added: one stream, or the two summands of a parallel block.
    before_mlp = [n.resid_pre, n.attn_out] if parallel else [n.resid_mid]
    match stage:
        case Stage.EMBED:
            return []
        case Stage.START:
            return [n.resid_pre]
        case Stage.HEADS:
            return [n.resid_pre, n.z, n.mlp_out] if parallel else [n.resid_pre, n.z]
        case Stage.MID:
            return before_mlp
        case Stage.POST:
            return [*before_mlp, n.post]
        case Stage.OUT:
            return [*before_mlp, n.mlp_out]
        case Stage.END:
            return [n.resid_pre, n.resid_post] if parallel else [n.resid_post]
