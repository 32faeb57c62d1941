"""What a path expansion returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtyping import Float, Int
from torch import Tensor

from circuits.components import Component, Head
from circuits.paths.counting import counted

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Route:
    """One way of a path through the positions of one prompt.

    Attributes:
        positions: Where the leaf is written, then where each head writes; the last is where the logit is read.
        value: What it adds, in logits.
    """

    positions: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Path:
    """One path through the model.

    Attributes:
        components: From the leaf to the last head before the logit. A leaf alone is read by the logit directly;
            ``ValueBias(l, h)`` is what that head's value bias writes; ``NormBias("ln1", l)`` enters the head after it.
        value: What it adds to the logit (difference), ``[batch]``.
        routes: On request, its largest ways through the positions of each prompt.
    """

    components: tuple[Component, ...]
    value: Float[Tensor, " batch"]
    routes: tuple[tuple[Route, ...], ...] = ()

    def __str__(self) -> str:
        return " → ".join(map(str, self.components))

    def __repr__(self) -> str:
        return f"Path({self}: {self.value.mean():+.4f})"


@dataclass(frozen=True, eq=False)
class OpenSuffix:
    """All paths that end in these heads and pass through at least one more head below them, taken together.

    Attributes:
        heads: The heads, from the earliest to the last.
        total: What those paths add up to, ``[batch]``; single ones may be larger.
        bound: No single one of them is larger than this (its mean size over the prompts); None where not computed.
    """

    heads: tuple[Head, ...]
    total: Float[Tensor, " batch"]
    bound: float | None


@dataclass(frozen=True, eq=False, repr=False)
class PathExpansion:
    """A logit (difference) as a sum over paths.

    Attributes:
        paths: The largest, by the mean size of their value over the prompts.
        total: The whole logit (difference), ``[batch]``.
        remainder: ``total − Σ paths``: all the other paths together, exactly.
        proven: Whether the list is proven to hold the largest paths; otherwise they are the largest found.
        proof: ``"enumeration"``: every path was looked at; ``"bound"``: no path that was not looked at can be larger
            than the last one listed; None.
        n_paths: How many paths there are.
        n_found: How many were looked at.
        unexpanded: What was not looked at, by its last heads, the largest totals first.
        error: The largest difference between `total` and everything found plus everything unexpanded.
        quantity: What was expanded, in words.
        position: The position of each prompt.
    """

    paths: tuple[Path, ...]
    total: Float[Tensor, " batch"]
    remainder: Float[Tensor, " batch"]
    proven: bool
    proof: Literal["enumeration", "bound"] | None
    n_paths: int
    n_found: int
    unexpanded: tuple[OpenSuffix, ...]
    error: float
    quantity: str
    position: Int[Tensor, " batch"]

    def to_frame(self) -> pd.DataFrame:
        """One row per path and prompt, the remainder last: ``path``, ``n_heads``, ``batch``, ``value``, ``share``."""
        import pandas as pd

        listed = [(str(p), sum(isinstance(c, Head) for c in p.components), p.value) for p in self.paths]
        rows = [
            {"path": text, "n_heads": n_heads, "batch": row, "value": v, "share": v / t if t else float("nan")}
            for text, n_heads, value in [*listed, ("remainder", None, self.remainder)]
            for row, (v, t) in enumerate(zip(value.tolist(), self.total.tolist(), strict=True))
        ]
        return pd.DataFrame(rows).astype({"n_heads": "Int64"})

    def __repr__(self) -> str:
        standing = f"proven the largest by {self.proof}" if self.proven else "the largest found, not proven"
        lines = [
            f"PathExpansion of the {self.quantity}: {len(self.paths)} of {counted(self.n_paths)} paths ({standing}; "
            f"{self.n_found:,} looked at), total {self.total.mean():+.4f}, remainder {self.remainder.mean():+.4f}, "
            f"error {self.error:.1e}"
        ]
        lines += [f"  {float(p.value.mean()):+.4f}  {p}" for p in self.paths[:10]]
        return "\n".join(lines + (["  …"] if len(self.paths) > 10 else []))
