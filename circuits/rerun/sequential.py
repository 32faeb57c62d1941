"""One block whose MLP reads what its attention wrote: lanes join the others at the stage where they begin."""

from __future__ import annotations

from torch import Tensor

from circuits.block import TransformerBlock
from circuits.rerun.layout import Flat, merged
from circuits.rerun.passing import INSIDE, Passing
from circuits.rerun.stages import Stage, clean_names
from circuits.run import Run


def through(passing: Passing, block: TransformerBlock, begun: Flat | None) -> Flat | None:
    """The stream after the block, of the lanes under way and of those that begin in it.

    From one stage to the next all go on together, so that each weight is applied once.
    """
    flat, run = None, None
    # Where all that the block adds is edited, the stream before it comes along.
    extra = [block.names.resid_pre] if block.names.layer in passing.whole_blocks else []
    if begun is not None:
        attended = passing.attended(block, begun)
        flat = Flat(attended.layout, (attended.x, attended.z, *[attended.x for _ in extra]))
    for stage in INSIDE:
        names = clean_names((block.names.layer, stage), passing.clean.model.config)
        if flat is not None:
            passing.kept(names, flat)
        beginning = passing.beginning(block, stage, names + extra)
        if beginning is not None:
            flat, run = merged([beginning] if flat is None else [flat, beginning]), None
        if flat is None:
            continue
        if run is None:
            tap = passing.tap(block, flat.layout)
            run = Run(flat.layout.columns[None], None, tap=tap)
            tap.before_block = flat.values[-1] if extra else None
        n = len(names)
        flat = Flat(flat.layout, _step(block, stage, flat.values[:n], run) + flat.values[n:])
    return None if flat is None else Flat(flat.layout, flat.values[:1])


def _step(block: TransformerBlock, stage: Stage, values: tuple[Tensor, ...], run: Run) -> tuple[Tensor, ...]:
    """From what a pass goes on from at a stage to the same at the next."""
    n, x = block.names, values[0]
    if stage is Stage.HEADS:
        attn_out = block.attention_write(block.attn.combine(values[1], n, run), run)
        return (block.after_attention(x + attn_out, run),)
    if stage is Stage.END:
        return (run.tap(n.resid_post, x),)
    if block.mlp is None:
        return values
    if stage is Stage.MID:
        mid = run.tap(n.resid_mid, x)
        return mid, block.neurons(mid, run)
    if stage is Stage.POST:
        return x, block.mlp_normed(values[1], run)
    return (block.after_mlp(x + run.tap(n.mlp_out, values[1]), run),)
