"""One block whose attention and MLP read the same stream: what a lane leaves alone stays clean."""

from __future__ import annotations

from torch import Tensor

from circuits.block import TransformerBlock
from circuits.rerun.layout import Flat, merged
from circuits.rerun.passing import INSIDE, Passing
from circuits.rerun.stages import Stage, clean_names, entries
from circuits.run import Run


def through(passing: Passing, block: TransformerBlock, begun: Flat | None) -> Flat | None:
    """The stream after the block, of the lanes under way and of those that begin in it, each stage by itself."""
    flats = []
    if begun is not None:
        on = passing.attended(block, begun)
        flats.append(Flat(on.layout, (block.from_heads(on.x, on.z, on.run, on.normed),)))
    for stage in INSIDE:
        names = clean_names((block.names.layer, stage), passing.clean.model.config)
        beginning = passing.beginning(block, stage, names)
        if beginning is None:
            continue
        tap = passing.tap(block, beginning.layout)
        at = dict(zip(names, beginning.values, strict=True))
        tap.before_block = at[block.names.resid_pre]
        run = Run(beginning.layout.columns[None], None, tap=tap)
        flats.append(Flat(beginning.layout, (_enter(block, stage, at, run, _edits_mlp(passing, block)),)))
    return merged(flats) if flats else None


def _enter(block: TransformerBlock, stage: Stage, at: dict[str, Tensor], run: Run, edits_mlp: bool) -> Tensor:
    """The stream after the block, from clean values up to the stage."""
    n = block.names
    if stage is Stage.END:
        return run.tap(n.resid_post, at[n.resid_post])
    x = at[n.resid_pre]
    attn_out = at.get(n.attn_out)
    if stage is Stage.HEADS:
        attn_out = block.attention_write(block.attn.combine(at[n.z], n, run), run)
    assert attn_out is not None
    if stage is Stage.MID or (stage is Stage.HEADS and edits_mlp):
        mlp_out = block.mlp_branch(x, run, block.normalised(x) if block.ln2 is None else None)
    elif stage is Stage.POST:
        mlp_out = block.mlp_write(at[n.post], run)
    else:
        mlp_out = at[n.mlp_out] if stage is Stage.HEADS else run.tap(n.mlp_out, at[n.mlp_out])
    return run.tap(n.resid_post, x + attn_out + mlp_out)


def _edits_mlp(passing: Passing, block: TransformerBlock) -> bool:
    """Whether lanes that begin at the heads edit the MLP of the block too."""
    layer, stages = block.names.layer, entries(passing.clean.model.config)
    lanes = passing.by_entry.get((layer, Stage.HEADS), ())
    names = [placed.name for lane in lanes for placed in lane.by_layer.get(layer, ())]
    return any(Stage.MID <= stages[name][1] < Stage.END for name in names)
