"""One full-width head beside several narrower ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from analysis.accounting.parameters import HasConfig, config_of
from analysis.results import Result, result
from circuits.config import GPTConfig


@result
class HeadSplit(Result):
    """One projection budget divided among different numbers of heads (lecture, remark 1.4).

    Attributes:
        splits: Numbers of heads.
        d_head: Width of each head.
        attention_parameters: Weights of `W_Q`, `W_K`, `W_V`, `W_O` of one layer: the same for every split.
        rank_bound: Greatest rank that one head's `W_QK` and `W_OV` can have.
        distributions: Attention distributions for each query position.
        mixing_flops: Work of scores and aggregation of one layer on one sequence of n_ctx tokens: the same too.
    """

    splits: tuple[int, ...]
    d_head: Int[Tensor, " split"]
    attention_parameters: Int[Tensor, " split"]
    rank_bound: Int[Tensor, " split"]
    distributions: Int[Tensor, " split"]
    mixing_flops: Int[Tensor, " split"]


def compare_head_splits(subject: GPTConfig | HasConfig, splits: Sequence[int] | None = None) -> HeadSplit:
    """Lay one full-width head beside several heads of the same total width ``n_heads × d_head``.

    Parameters and work do not change; what changes is how many distributions there are and how large a rank each head's
    circuits can have. Every split is taken with as many key heads as query heads.

    Args:
        subject: A configuration or a model.
        splits: Numbers of heads; by default 1 and the configuration's own.

    Raises:
        ValueError: A number of heads that does not divide the total width.
    """
    config = config_of(subject)
    width = config.n_heads * config.d_head
    chosen = tuple(dict.fromkeys((1, config.n_heads))) if splits is None else tuple(splits)
    for heads in chosen:
        if heads < 1 or width % heads:
            raise ValueError(f"{heads} heads do not divide the width n_heads × d_head = {width}")
    d_head = torch.tensor([width // heads for heads in chosen])
    ones = torch.ones_like(d_head)
    return HeadSplit(
        splits=chosen,
        d_head=d_head,
        attention_parameters=4 * config.d_model * width * ones,
        rank_bound=d_head.clamp(max=config.d_model),
        distributions=torch.tensor(chosen),
        mixing_flops=4 * config.n_ctx**2 * width * ones,
    )
