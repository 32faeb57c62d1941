"""Theorem 5.2 of the lecture and what belongs to it: the exact parameter count."""

from __future__ import annotations

from torch import nn

from analysis.accounting import parameter_table
from analysis.claims.claim import Finding, applies, claim, equal, within
from analysis.claims.conventions import off_counts
from analysis.claims.subject import Subject, size_of
from circuits.config import GPTConfig

# The lecture's table for the course configuration: parameters, and share in percent as printed.
TABLE = ((16_512, 2.0), (262_656, 32.2), (526_848, 64.5), (2_048, 0.3), (8_576, 1.0))
TOTAL = 816_640


def _numel(*modules: nn.Module | None) -> int:
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def lecture_total(config: GPTConfig) -> int:
    """``2Vd + T_max d + L(12d² + 10d) + 2d``."""
    V, T, d, L = config.d_vocab, config.n_ctx, config.d_model, config.n_layers
    return 2 * V * d + T * d + L * (12 * d**2 + 10 * d) + 2 * d


@claim(
    "5.2a",
    "Theorem 5.2 (exact parameter count)",
    "The model has 2Vd + T_max d + L(12d² + 10d) + 2d parameters.",
    "numel() of all parameters minus the formula",
)
def theorem(on: Subject) -> Finding:
    """With d_ff = 4d, biases on the MLP maps and the attention output and none on W_Q, W_K, W_V or W_U,

    ``Vd + T_max d + L [(4d² + d) + (8d² + 5d) + 4d] + 2d + dV = 2Vd + T_max d + L (12d² + 10d) + 2d``.

    Across all heads queries, keys and values have ``3 H d (d/H) = 3d²`` weights; the output map d² + d. The MLP has
    8d² weights and 4d + d biases. Each LayerNorm has d gains and d shifts.
    """
    off = off_counts(on.model.config)
    applies(not off, off)
    return equal(size_of(on.given), lecture_total(on.model.config))


@claim(
    "5.2a.parts",
    "Theorem 5.2, proof",
    "Per block: attention 4d² + d, MLP 8d² + 5d, two LayerNorms 4d; outside: Vd + T_max d, 2d and dV.",
    "sum over the parts of |numel() − formula|",
)
def parts(on: Subject) -> Finding:
    """The proof counts part by part, and so does this row: each number against the modules that hold it."""
    config, model = on.model.config, on.given
    off = off_counts(config)
    applies(not off, off)
    d, V, L = config.d_model, config.d_vocab, config.n_layers
    blocks = list(model.blocks)
    there = {
        "embeddings": (_numel(model.embed, model.pos_embed), V * d + config.n_ctx * d),
        "attention": (_numel(*(b.attn for b in blocks)), L * (4 * d**2 + d)),
        "MLPs": (_numel(*(b.mlp for b in blocks)), L * (8 * d**2 + 5 * d)),
        "LayerNorms": (_numel(*(n for b in blocks for n in (b.ln1, b.ln2))), L * 4 * d),
        "final LayerNorm": (_numel(model.ln_final), 2 * d),
        "unembedding": (_numel(model.unembed), d * V),
    }
    wrong = {name: pair for name, pair in there.items() if pair[0] != pair[1]}
    note = ", ".join(f"{name} {found:,} against {expected:,}" for name, (found, expected) in wrong.items())
    return within(float(sum(abs(a - b) for a, b in there.values())), 0.0, note)


@claim(
    "5.2a.leading",
    "Section 5",
    "The leading block term is 12Ld²; biases and norms add 10Ld.",
    "weights of the blocks minus 12Ld², and their vectors minus 10Ld",
)
def leading_term(on: Subject) -> Finding:
    """Of a block's parameters, ``4d² + 8d²`` stand in matrices and ``d + 5d + 4d`` in vectors."""
    config = on.model.config
    off = off_counts(config)
    applies(not off, off)
    inside = list(on.given.blocks.parameters())
    matrices = sum(p.numel() for p in inside if p.ndim == 2)
    vectors = sum(p.numel() for p in inside if p.ndim == 1)
    L, d = config.n_layers, config.d_model
    off_by = abs(matrices - 12 * L * d**2) + abs(vectors - 10 * L * d)
    return within(float(off_by), 0.0, f"{matrices:,} in matrices, {vectors:,} in vectors")


@claim(
    "5.2a.table",
    "Section 5",
    "For (V, T_max, d, H, L) = (65, 64, 128, 4, 4) the total is 816,640, of which MLPs hold 64.5%.",
    "sum over the lecture's rows of |parameters − printed|",
)
def table(on: Subject) -> Finding:
    """The lecture's table: 16,512 embeddings, 262,656 attention, 526,848 MLPs, 2,048 block LayerNorms, 8,576 final
    LayerNorm and unembedding; 816,640 in all. Shares are compared to a tenth of a percent: the last is 1.05%, printed
    as 1.0%.
    """
    config = on.model.config
    applies(config == GPTConfig.course(), "this is not the course configuration")
    counted = parameter_table(on.given)
    rows = zip(counted.parameters.tolist(), counted.share.tolist(), TABLE, strict=True)
    off_by = abs(size_of(on.given) - TOTAL)
    for parameters, share, (printed, percent) in rows:
        off_by += abs(parameters - printed) + (abs(100 * share - percent) > 0.1)
    return within(float(off_by), 0.0, f"{size_of(on.given):,} in all; the last share is {counted.share[-1]:.2%}")


@claim(
    "5.3",
    "Aside 5.3 (weight tying)",
    "Tied, the unembedding is the transpose of the token embedding, W_U = Eᵀ.",
    "largest difference of W_U from Eᵀ, and parameters beyond those of the embedding",
)
def tying(on: Subject) -> Finding:
    """``W_U = Eᵀ``: one matrix of Vd parameters read both ways, counted once."""
    applies(on.model.config.tie_embeddings, "the unembedding is a matrix of its own, as in the course's baseline")
    model = on.given
    apart = float((model.W_U - model.W_E.T).abs().max())
    extra = model.unembed.weight is not None
    return within(apart + float(extra), 0.0, "one parameter" if not extra else "two parameters")
