"""One transformer block: ``Y = X + MHA(LN₁(X))``, ``X' = Y + MLP(LN₂(Y))`` (lecture 3.1), and its known variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from circuits.attention import Attention
from circuits.config import GPTConfig
from circuits.layers import MLPLayer, Norm
from circuits.names import block_names
from circuits.run import Run

Stream = Float[Tensor, "batch pos d_model"]
# The stream behind an attention, at the positions that are still read: all of them, unless the run says otherwise.
Onward = Float[Tensor, "batch query d_model"]


class TransformerBlock(nn.Module):
    """Attention and MLP on the residual stream.

    Attributes:
        ln1: The norm before attention (after it, where norms stand after the additions); None without norms.
        ln2: The same for the MLP; None where it has none of its own.
        ln1_post: Norm on what attention adds, where the architecture has one; `ln2_post` likewise for the MLP.
    """

    ln1: Norm | None
    ln2: Norm | None
    ln1_post: Norm | None
    ln2_post: Norm | None
    mlp: MLPLayer | None

    def __init__(self, config: GPTConfig, layer: int, **factory: object) -> None:
        super().__init__()
        self.names = block_names(layer)
        self.pre = config.norm is not None and config.norm_placement == "pre"
        self.post = config.norm is not None and config.norm_placement == "post"
        self.parallel = bool(config.parallel_blocks)
        present = {
            "ln1": config.norm is not None,
            "ln2": config.norm is not None and config.has_mlp and config.parallel_blocks != "shared_norm",
            "ln1_post": config.branch_norm,
            "ln2_post": config.branch_norm and config.has_mlp,
        }
        self.attn = Attention(config, layer, **factory)
        self.mlp = MLPLayer(config, **factory) if config.has_mlp else None
        for name, there in present.items():
            norm = Norm(config.norm, config.d_model, config.norm_eps, **factory) if there and config.norm else None
            self.register_module(name, norm)

    def forward(self, x: Stream, run: Run) -> Onward:
        """The stream after the block."""
        tap, names = run.tap, self.names
        x = tap(names.resid_pre, x)
        normed = self.attention_read(x, run)
        return self.from_heads(run.wanted(x), self.heads(x, normed, run), run, run.wanted(normed))

    def attention_read(self, x: Stream, run: Run) -> Stream:
        """What the heads read of the stream: ``LN₁(x)`` in a pre-norm block, the stream itself elsewhere."""
        if not (self.pre and self.ln1 is not None):
            return x
        return self.ln1.tapped(x, run.tap, self.names.ln1_scale, self.names.ln1_normalized)

    def heads(self, x: Stream, normed: Stream, run: Run) -> Float[Tensor, "batch query head d_head"]:
        """`z` of every head on the stream `x`, given ``LN₁(x)``."""
        n, attn = self.names, self.attn
        q_read = self._own_read(n.q_input, run.wanted(x), run.wanted(normed), attn.n_heads, run)
        k_read = self._own_read(n.k_input, x, normed, attn.n_kv_heads, run)
        v_read = self._own_read(n.v_input, x, normed, attn.n_kv_heads, run)
        return attn.heads((q_read, k_read, v_read), n, run)

    def from_heads(self, x: Stream, z: Tensor, run: Run, normed: Stream | None = None) -> Stream:
        """The rest of the block, once the heads have their `z`; `normed` as for `from_attn_out`."""
        return self.from_attn_out(x, self.attention_write(self.attn.combine(z, self.names, run), run), run, normed)

    def from_attn_out(self, x: Stream, attn_out: Stream, run: Run, normed: Stream | None = None) -> Stream:
        """The rest of the block, once attention has its output; `normed` is ``LN₁(x)``, for blocks that share it."""
        if self.mlp is None:
            return run.tap(self.names.resid_post, self.after_attention(x + attn_out, run))
        if self.parallel:
            mlp_out = self.mlp_branch(x, run, normed if self.ln2 is None else None)
            return run.tap(self.names.resid_post, x + attn_out + mlp_out)
        return self.from_resid_mid(self.after_attention(x + attn_out, run), run)

    def from_resid_mid(self, mid: Stream, run: Run) -> Stream:
        """The rest of a sequential block, once the stream holds what attention wrote."""
        mid = run.tap(self.names.resid_mid, mid)
        return self.from_mlp_out(mid, self.mlp_branch(mid, run), run)

    def from_mlp_out(self, mid: Stream, mlp_out: Stream, run: Run) -> Stream:
        """The end of a sequential block."""
        return run.tap(self.names.resid_post, self.after_mlp(mid + mlp_out, run))

    def attention_write(self, out: Stream, run: Run) -> Stream:
        """What is added to the stream, given the output of the attention layer."""
        n = self.names
        if self.ln1_post is not None:
            out = self.ln1_post.tapped(out, run.tap, n.ln1_post_scale, n.ln1_post_normalized)
        return run.tap(n.attn_out, out)

    def mlp_branch(self, x: Stream, run: Run, shared: Stream | None = None) -> Stream:
        """What the MLP adds to the stream `x`; `shared` is ``LN₁(x)`` where both branches read through one norm."""
        return self.mlp_write(self.neurons(x, run, shared), run)

    def neurons(self, x: Stream, run: Run, shared: Stream | None = None) -> Float[Tensor, "batch query d_mlp"]:
        """The MLP's activations on the stream `x`, likewise."""
        assert self.mlp is not None
        return self.mlp.neurons(self._mlp_read(x, run, shared), self.names, run.tap)

    def mlp_write(self, post: Float[Tensor, "batch query d_mlp"], run: Run) -> Stream:
        """What is added to the stream, given the MLP's activations."""
        return run.tap(self.names.mlp_out, self.mlp_normed(post, run))

    def mlp_normed(self, post: Float[Tensor, "batch query d_mlp"], run: Run) -> Stream:
        """The same before anybody sees it."""
        assert self.mlp is not None
        n, out = self.names, self.mlp.write(post, self.names, run.tap)
        if self.ln2_post is None:
            return out
        return self.ln2_post.tapped(out, run.tap, n.ln2_post_scale, n.ln2_post_normalized)

    def _mlp_read(self, x: Stream, run: Run, shared: Stream | None) -> Stream:
        n, tap = self.names, run.tap
        if shared is not None:
            return self._read_through_shared_norm(x, shared, run)
        x = tap(n.mlp_in, x)
        return self.ln2.tapped(x, tap, n.ln2_scale, n.ln2_normalized) if self.pre and self.ln2 is not None else x

    def after_attention(self, x: Stream, run: Run) -> Stream:
        """The stream after attention was added: normalised there in a post-norm block, as it is elsewhere."""
        if self.post and self.ln1 is not None:
            return self.ln1.tapped(x, run.tap, self.names.ln1_scale, self.names.ln1_normalized)
        return x

    def after_mlp(self, x: Stream, run: Run) -> Stream:
        """The stream after the MLP was added, likewise."""
        if self.post and self.ln2 is not None:
            return self.ln2.tapped(x, run.tap, self.names.ln2_scale, self.names.ln2_normalized)
        return x

    def _own_read(self, name: str, x: Stream, normed: Stream, heads: int, run: Run) -> Tensor:
        """What the heads read: the shared `normed`, or for each head its own where its input was edited."""
        if not run.tap.touches(name):
            return normed
        per_head = x.unsqueeze(2).expand(-1, -1, heads, -1)
        return _reread(name, per_head, normed.unsqueeze(2).expand_as(per_head), self.normalised, run, normed)

    def _read_through_shared_norm(self, x: Stream, normed: Stream, run: Run) -> Tensor:
        if not run.tap.touches(self.names.mlp_in):
            return normed
        return _reread(self.names.mlp_in, x, normed, self.normalised, run, normed)

    def normalised(self, x: Tensor) -> Tensor:
        """``LN₁(x)`` in a pre-norm block, `x` elsewhere, unseen by any hook."""
        normed: Tensor = self.ln1(x) if self.pre and self.ln1 is not None else x
        return normed


def _reread(
    name: str, x: Tensor, normed: Tensor, normalise: Callable[[Tensor], Tensor], run: Run, shared: Tensor
) -> Tensor:
    """Show the read `x` under `name`; where an edit changed it, what is read is the edit, normalised for itself.

    Unchanged reads keep the shared normalised value, so that looking changes nothing and an edit of the norm's own
    hooks still reaches every head and position that was not given an input of its own.
    """
    tap = run.tap
    new = tap(name, x.detach() if tap.grad and not tap.edits(name) else x)
    if tap.edits(name):
        changed = (new != x).any(-1, keepdim=True)
        return torch.where(changed, normalise(new), normed)
    if tap.grad:
        # Value and total gradient are the shared ones; the shown read gets the gradient through its own norm.
        own = normalise(new)
        return normed + (own - own.detach())
    return shared


class Blocks(nn.ModuleList):
    """The blocks of a model, in order."""

    def __getitem__(self, layer: int) -> TransformerBlock:  # type: ignore[override]  # one block, never a slice of them
        return cast(TransformerBlock, super().__getitem__(layer))

    def __iter__(self) -> Iterator[TransformerBlock]:
        return cast(Iterator[TransformerBlock], super().__iter__())
