"""The full QK and OV circuits of one head, with the terms that biases add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.arguments import require_model
from circuits.attention import Attention
from circuits.components import Head, check_component
from circuits.factored import FactoredMatrix
from circuits.finite import check_result
from circuits.folded import HeadWeights, head_weights
from circuits.full_circuits.entries import TopEntries, top_entries
from circuits.full_circuits.sources import check_source, folded_bias, read_by_unembedding, read_source
from circuits.head_circuits import turned
from circuits.model import HookedGPT


@dataclass(frozen=True, eq=False)
class FullCircuit:
    """A head's circuit between tokens (or positions).

    Attributes:
        kind: ``"QK"`` (rows: queries, columns: keys) or ``"OV"`` (rows: sources attended to, columns: logits).
        head: The head.
        rows: What the rows are: ``"token"``, ``"position"`` or ``"mlp0"``.
        columns: What the columns are; ``"logit"`` for OV.
        matrix: The circuit, as factors of inner size d_head.
        row_term: QK: what the key bias adds for each query; softmax does not see it. 0 for OV.
        column_term: QK: what the query bias adds for each key. OV: what the value bias adds to each logit.
        constant: QK: query bias times key bias.
        scale: What the scores are multiplied by (`attn_scale`); 1 for OV.
        raw: Whether these are the bare weights.
        note: What was read in.
    """

    kind: str
    head: Head
    rows: str
    columns: str
    matrix: FactoredMatrix
    row_term: Float[Tensor, " row"]
    column_term: Float[Tensor, " column"]
    constant: float
    scale: float
    raw: bool
    note: str

    @property
    def shape(self) -> torch.Size:
        """Rows and columns."""
        return self.matrix.shape

    def with_biases(self) -> FactoredMatrix:
        """The circuit and its bias terms as one matrix, of inner size d_head + 2."""
        A, B = self.matrix.A, self.matrix.B
        rows = (self.row_term + self.constant)[:, None]
        columns = self.column_term[None]
        return FactoredMatrix(
            torch.cat([A, rows, torch.ones_like(rows)], dim=1),
            torch.cat([B, torch.ones_like(columns), columns]),
            note=f"{self.note}, biases added",
        )

    def top_entries(self, k: int = 20, by: str = "value", *, biases: bool = False) -> TopEntries:
        """The k largest entries, found in blocks; see `circuits.full_circuits.top_entries`.

        Args:
            k: How many.
            by: ``"value"``, ``"magnitude"`` or ``"lowest"``.
            biases: Count the bias terms in.
        """
        return top_entries(self.with_biases() if biases else self.matrix, k, by)

    def __repr__(self) -> str:
        size = " × ".join(f"{name} {n}" for name, n in zip((self.rows, self.columns), self.shape, strict=True))
        return f"FullCircuit({self.kind} of {self.head}, {size} through {self.matrix.mdim}, {self.note})"


@torch.no_grad()
def full_ov(model: HookedGPT, layer: int, head: int, source: str = "token", raw: bool = False) -> FullCircuit:
    """``W_E W_OV W_U``: row i is what attending to token i with weight 1 adds to the logits (Elhage et al. 2021).

    By default the norm that the head reads through, the final norm and any norm on the branch's output are read in,
    each at a scale of 1, and `W_U` is centred over the vocabulary; logits are meant before any soft cap.

    Args:
        model: A model.
        layer: The layer.
        head: A query head.
        source: ``"token"``, ``"position"``, or ``"mlp0"``: tokens as the first MLP leaves them.
        raw: The bare weights.

    Raises:
        IndexError: A layer or head that the model does not have.
        ValueError: A source that does not exist, or weights that are not finite (where first).
    """
    require_model(model)
    where = _head(model, layer, head)
    check_source(model, source, where.layer)
    weights = head_weights(model, raw, layers=[where.layer])
    block = model.blocks[where.layer]
    W_V, W_O = weights.W_V[0, where.head], weights.W_O[0, where.head]
    shared = where.head // model.config.group_size
    b_V = _bias_of(block.attn, "V", shared, model, where.layer, raw)
    matrix = FactoredMatrix(
        read_source(model, source, W_V, raw), read_by_unembedding(model, W_O, raw), note=_note(weights, "OV", raw)
    )
    column_term = read_by_unembedding(model, (b_V @ W_O)[None], raw)[0]
    return _checked(
        model,
        FullCircuit(
            kind="OV",
            head=where,
            rows=source,
            columns="logit",
            matrix=matrix,
            row_term=torch.zeros_like(matrix.A[:, 0]),
            column_term=column_term,
            constant=0.0,
            scale=1.0,
            raw=raw,
            note=matrix.note,
        ),
    )


@torch.no_grad()
def full_qk(
    model: HookedGPT,
    layer: int,
    head: int,
    query: str = "token",
    key: str = "token",
    offset: int | None = None,
    raw: bool = False,
) -> FullCircuit:
    """``W_E W_QK W_Eᵀ``: how much a query token asks for a key token, before `attn_scale` (Elhage et al. 2021).

    ``scale · (matrix + row_term + column_term + constant)`` are the scores of tokens that stand alone in the stream, at
    norm scales of 1. Under query and key norms that holds at frozen scales only, and the note says so.

    Args:
        model: A model.
        layer: The layer.
        head: A query head.
        query: ``"token"``, ``"position"`` or ``"mlp0"``.
        key: Likewise.
        offset: Rotary models: query minus key position; by default 0.
        raw: The bare weights.

    Raises:
        IndexError: A layer or head that the model does not have.
        ValueError: A source that does not exist, an offset without rotary positions, weights that are not finite.
    """
    require_model(model)
    where = _head(model, layer, head)
    for source in (query, key):
        check_source(model, source, where.layer)
    weights = head_weights(model, raw, 0 if offset is None else offset, layers=[where.layer])
    attn, config = model.blocks[where.layer].attn, model.config
    W_Q, W_K = weights.W_Q[0, where.head], weights.W_K[0, where.head]
    b_Q = _bias_of(attn, "Q", where.head, model, where.layer, raw)
    b_Q = turned(b_Q[None], config, offset)[0]
    b_K = _bias_of(attn, "K", where.head // config.group_size, model, where.layer, raw)
    queries = read_source(model, query, W_Q, raw)
    keys = read_source(model, key, W_K, raw)
    note = _note(weights, "QK", raw)
    return _checked(
        model,
        FullCircuit(
            kind="QK",
            head=where,
            rows=query,
            columns=key,
            matrix=FactoredMatrix(queries, keys.mT, note=note),
            row_term=queries @ b_K,
            column_term=keys @ b_Q,
            constant=float(b_Q @ b_K),
            scale=config.attn_scale,
            raw=raw,
            note=note,
        ),
    )


def _head(model: HookedGPT, layer: int, head: int) -> Head:
    where = Head(layer, head)
    check_component(where, model.config)
    return where


def _bias_of(attn: Attention, part: str, index: int, model: HookedGPT, layer: int, raw: bool) -> Tensor:
    """A head's bias as the scores or the values get it: with the norm's shift, and the gains of query or key norms."""
    W = getattr(attn, f"W_{part}")[index].detach()
    biases = getattr(attn, f"b_{part}")
    pre = model.config.norm_placement == "pre"
    bias = folded_bias(None if biases is None else biases[index], W, model.blocks[layer].ln1 if pre else None, raw)
    gain = {"Q": attn.q_norm, "K": attn.k_norm}.get(part)
    return bias if raw or gain is None else bias * gain.w.detach().to(bias.dtype)


def _note(weights: HeadWeights, kind: str, raw: bool) -> str:
    return weights.note if raw or kind == "QK" else f"{weights.note}, W_U centred over the vocabulary"


def _checked(model: HookedGPT, circuit: FullCircuit) -> FullCircuit:
    parts = (circuit.matrix.A, circuit.matrix.B, circuit.row_term, circuit.column_term)
    check_result(f"the {circuit.kind} circuit of {circuit.head}", model, *parts, torch.tensor(circuit.constant))
    return circuit
