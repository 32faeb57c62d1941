"""Recompute what an intervention can change, and nothing else.

An intervention at layer l and position t can change only what lies at layers ≥ l and positions ≥ t. The passes here
start from the streams, keys and values of one clean run, at that layer and that position, for many interventions at
once; they are the model's own blocks with another `Run`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.arguments import require_model, whole_numbers
from circuits.model import HookedGPT
from circuits.rerun.clean import clean_pass
from circuits.rerun.edits import Add, Apply, CutKeys, Edit, From, Keep, ProjectOut, Put, Scale, Within, Zero
from circuits.rerun.engine import may_run_along, recompute, run_along
from circuits.rerun.intervention import Intervened, Intervention
from circuits.rerun.prepare import lanes_of, needs
from circuits.tokens import check_mask, check_tokens, real_positions

__all__ = [
    "Add",
    "Apply",
    "CutKeys",
    "Edit",
    "From",
    "Intervened",
    "Intervention",
    "Keep",
    "ProjectOut",
    "Put",
    "Scale",
    "Within",
    "Zero",
    "rerun",
]


@torch.no_grad()
def rerun(
    model: HookedGPT,
    tokens: Int[Tensor, "batch pos"],
    interventions: Sequence[Intervened],
    *,
    attention_mask: Tensor | None = None,
    positions: int | Sequence[int] | None = None,
    freeze: Iterable[str] = (),
) -> Float[Tensor, "set batch read d_vocab"]:
    """Logits under each intervention, equal to those of a full pass with the same edits as hooks.

    Args:
        model: The model.
        tokens: The batch.
        interventions: Interventions, each by itself, or sequences of interventions that apply together, in the order
            given where they edit one activation.
        attention_mask: 1 for tokens, 0 for padding.
        positions: The positions whose logits are wanted (counted over each row's real tokens, negative ones from the
            last); only these are computed in the last block and unembedded. None: all.
        freeze: ``"patterns"`` holds every attention pattern at the clean run, ``"norms"`` every norm's scale.

    Raises:
        TypeError, KeyError, ValueError, IndexError: What this model and batch cannot have, by name.
    """
    require_model(model)
    if model.in_scope_of_hooks:
        raise ValueError("rerun takes its interventions as arguments; leave the `with model.hooks(...)` block first")
    tokens = check_tokens(tokens, model.config)
    mask = check_mask(attention_mask, tokens)
    lanes = lanes_of(model, tokens, mask, interventions, freeze)
    read = None if positions is None else _read_positions(positions, tokens, mask)
    wanted = needs(model, lanes)
    if may_run_along(model, lanes, read, tokens.shape[1]):
        clean, changed = run_along(model, tokens, mask, lanes, read, wanted)
    else:
        clean = clean_pass(model, tokens, mask, wanted)
        changed = recompute(clean, lanes, read)
    final = (
        clean.final if read is None else clean.final.gather(1, read[..., None].expand(-1, -1, clean.final.shape[-1]))
    )
    logits = model.unembed_normalised(final).expand(len(lanes), -1, -1, -1).clone()
    logits[changed.lane, changed.row, changed.slot] = model.unembed_normalised(changed.final)
    return logits


def _read_positions(
    positions: int | Sequence[int], tokens: Int[Tensor, "batch pos"], mask: Tensor | None
) -> Int[Tensor, "batch read"]:
    """Columns of the positions for each row, counted over its real tokens; negative ones from the last.

    Raises:
        TypeError: Something else than whole numbers.
        IndexError: A position that some row does not have.
        ValueError: The same position twice, or none.
    """
    wanted = whole_numbers("position", positions)
    columns = torch.stack([real_positions(position, tokens, mask) for position in wanted], dim=1)
    ordered = columns.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"positions {wanted} name one position twice")
    return columns
