"""Path expansion: a logit as a sum over the ways that information takes through the heads."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import names
from circuits.cache import ActivationCache
from circuits.model import HookedGPT
from circuits.paths.counting import Counts, count
from circuits.paths.frozen import FrozenRun, freeze, needed_names
from circuits.paths.result import OpenSuffix, Path, PathExpansion
from circuits.paths.routes import largest_routes
from circuits.paths.search import Found, Search
from circuits.residual.positions import Position, Positions, resolve_positions
from circuits.residual.readout import Readout, Tokens, logit_readout
from circuits.residual.requirements import check_linear, require_finite
from circuits.validity import require_whole

BUDGET = 2048


@torch.no_grad()
def expand_paths(
    model: HookedGPT,
    cache: ActivationCache,
    correct: Tokens,
    wrong: Tokens | None = None,
    position: Position = -1,
    top: int | None = 20,
    *,
    routes: int = 0,
    budget: int = BUDGET,
) -> PathExpansion:
    """Split a logit, or the lead of one logit over another, into paths leaf → head → … → head → logit.

    Attention patterns and norm scales are frozen at the run's own, MLP outputs are sources. Then the logit is a sum
    over paths, each ``Π attention ⊗ Π W_OV`` (Elhage et al. 2021). The leaves are the embeddings, the MLPs' outputs and
    every bias on the way: a head's value bias and the shift of the norm it reads through (carried by the actual
    attention row sums), output biases, the final norm's shift and `b_U`. Where the model caps its logits, the logit
    before the cap is expanded.

    Going backwards from the logit, the paths that end in the same heads share one direction in the stream, and their
    total is its inner product with what stands there. So what has not been looked at is known exactly, and paths plus
    remainder equal the logit. Large totals do not bound single paths, which may cancel: the result is `proven` only
    where every path was looked at, or a bound on norms shows that no other can be as large.

    Args:
        model: A pre-norm model, or one without norms.
        cache: Of the run in question, with the activations that `needed_names` lists.
        correct: The token, its id or its text: one for all prompts, or one for each.
        wrong: The token to compare with, likewise.
        position: One position, or one for each prompt: −1 is the last real token.
        top: How many paths to list, the largest first, by the mean size of their value over the prompts; None for all.
        routes: How many of the largest ways through the positions to find for each listed path and prompt.
        budget: How many suffixes to expand. Where that is enough for all of them, every path is looked at. Each costs a
            product of all positions up to the last with the output weights below it, so give long prompts less.

    Raises:
        KeyError: The cache lacks activations; the message says which, and how to capture them.
        ValueError: A post-norm model, a cache of another architecture; all paths asked for, but too many for the
            budget; NaN or infinities in activations or weights, with the first place.
        IndexError: A token or position that does not exist.
    """
    _check_arguments(position, top, routes, budget)
    check_linear(model, cache)
    used = needed_names(model.config)
    cache.require(*used)
    at = resolve_positions(position, cache, cache[names.EMBED].shape, model.W_E)
    readout = logit_readout(model, cache, correct, wrong, at)
    require_finite(f"the {readout.quantity}", readout.total, model, cache, [*used, *readout.used])
    run = freeze(model, cache, at)
    counts = count(run, len(readout.constants))
    if top is None and counts.expansions > budget:
        raise ValueError(
            f"all {counts.paths:,} paths were asked for, which takes {counts.expansions:,} expansions, more than the "
            f"budget of {budget:,}; raise the budget, or ask for the top of them"
        )
    search = _begin(run, readout, at, top)
    search.go(budget, counts)
    require_finite(f"the expansion of the {readout.quantity}", search.found, model, cache, used)
    return _result(search, readout, at, counts, routes)


def _begin(run: FrozenRun, readout: Readout, at: Positions, top: int | None) -> Search:
    """The direction of the logit, and the paths that pass through no head."""
    assert at.index is not None
    u = _direction(readout)
    root = run.writes.new_zeros(run.writes.shape[1:])
    rows = torch.arange(len(root), device=at.device)
    root[rows, at.own()[:, 0]] = u
    search = Search(run, root, top, found=torch.zeros_like(readout.total[:, 0]))
    for leaf, write in zip(run.leaves, run.writes, strict=True):
        search.offer((leaf,), (), (write[rows, at.own()[:, 0]] * u).sum(-1))
    for constant, value in readout.constants:
        search.offer((constant,), (), value.expand_as(readout.total)[:, 0].clone())
    return search


def _direction(readout: Readout) -> Float[Tensor, "batch d_model"]:
    """The direction of the logit in the stream, divided by the final norm's scale."""
    direction = readout.direction.expand(len(readout.total), 1, -1)[:, 0]
    return direction if readout.scale is None else direction / readout.scale


def _result(search: Search, readout: Readout, at: Positions, counts: Counts, routes: int) -> PathExpansion:
    total = readout.total[:, 0]
    found = sorted(search.best, key=lambda path: -path.size)
    paths = tuple(_path(path, search.run, readout, at, routes) for path in found)
    left = sorted(search.unexpanded(), key=lambda entry: -float(entry.deeper.abs().mean()))
    known = search.found + sum((entry.deeper for entry in left), torch.zeros_like(total))
    threshold = search.threshold
    by_bound = bool(left) and all(entry.bound <= threshold for entry in left)
    assert at.index is not None
    return PathExpansion(
        paths=paths,
        total=total,
        remainder=total - sum((path.value for path in paths), torch.zeros_like(total)),
        proven=not left or by_bound,
        proof="bound" if by_bound else None if left else "enumeration",
        n_paths=counts.paths,
        n_found=search.n_found,
        unexpanded=tuple(OpenSuffix(entry.suffix, entry.deeper, entry.bound) for entry in left),
        error=float((total - known).abs().max()),
        quantity=readout.quantity,
        position=at.index,
    )


def _path(found: Found, run: FrozenRun, readout: Readout, at: Positions, routes: int) -> Path:
    if routes == 0:
        return Path(found.components, found.value)
    places = at.own()[:, 0].tolist()
    ways = largest_routes(run, found.components, found.suffix, found.value, _direction(readout), places, routes)
    return Path(found.components, found.value, ways)


def _check_arguments(position: Position, top: int | None, routes: int, budget: int) -> None:
    if position is None:
        raise ValueError("paths lead to one position of each prompt: give position a number, or one for each prompt")
    for name, value, least in (("top", top, 1), ("routes", routes, 0), ("budget", budget, 1)):
        if value is not None:
            require_whole(name, value, least)
