"""A slow GPT, written out one position and one head at a time, that shares no code with the package.

It reads the fields of a config and a dictionary of weights, nothing else, and shows the value at every hook name as the
design defines it. An edit of any of those values is carried on by ordinary arithmetic: there is no fast path, no mask
tensor and no batching that could go wrong in the same way as the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Vector = torch.Tensor
Edit = Callable[[str, torch.Tensor, int], "torch.Tensor | None"]


def run(
    config: Any,
    state: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    edit: Edit | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [batch pos d_vocab], and hook name -> value with a leading batch axis.

    ``edit(name, value, item)`` may return another value for that hook of batch item ``item`` (no batch axis).
    """
    logits, shown = [], []
    for item, row in enumerate(tokens.tolist()):
        real = [True] * len(row) if attention_mask is None else [bool(m) for m in attention_mask[item].tolist()]
        sequence = Sequence(config, state, row, real, edit, item)
        logits.append(sequence.logits())
        shown.append(sequence.shown)
    return torch.stack(logits), {name: torch.stack([values[name] for values in shown]) for name in shown[0]}


def loss(logits: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> float:
    """Mean of −log p(next token) in nats over the pairs of neighbours that are both real."""
    total, count = 0.0, 0
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1] - 1):
            if attention_mask is not None and not (attention_mask[b, t] and attention_mask[b, t + 1]):
                continue
            row = logits[b, t].tolist()
            top = max(row)
            total += top + math.log(sum(math.exp(x - top) for x in row)) - row[int(tokens[b, t + 1])]
            count += 1
    return total / count


class Sequence:
    """One prompt on its way through the model."""

    def __init__(
        self,
        config: Any,
        state: dict[str, torch.Tensor],
        tokens: list[int],
        real: list[bool],
        edit: Edit | None,
        item: int,
    ) -> None:
        self.config, self.state, self.tokens, self.real = config, state, tokens, real
        self.edit, self.item = edit, item
        self.length = len(tokens)
        # The first real token stands at position 0, whatever is in front of it.
        self.positions = [max(sum(real[: t + 1]) - 1, 0) for t in range(self.length)]
        self.shown: dict[str, torch.Tensor] = {}

    def show(self, name: str, value: torch.Tensor) -> torch.Tensor:
        changed = None if self.edit is None else self.edit(name, value, self.item)
        self.shown[name] = value if changed is None else changed
        return self.shown[name]

    def logits(self) -> torch.Tensor:
        config, state = self.config, self.state
        stream = self.embed()
        for layer in range(config.n_layers):
            stream = self.block(layer, stream)
        if config.final_norm:
            stream = self.norm("ln_final", stream)
        unembed = state["embed.weight" if config.tie_embeddings else "unembed.weight"]
        out = []
        for t in range(self.length):
            row = unembed @ stream[t]
            if config.bias_unembed:
                row = row + state["unembed.bias"]
            out.append([capped(x, config.logit_softcap) for x in row.tolist()])
        return torch.tensor(out, dtype=stream.dtype)

    def embed(self) -> torch.Tensor:
        config, state = self.config, self.state
        rows = [config.embed_scale * state["embed.weight"][token] for token in self.tokens]
        stream = self.show("hook_embed", torch.stack(rows))
        if config.positions != "learned":
            return stream
        rows = [state["pos_embed.weight"][p] for p in self.positions]
        return stream + self.show("hook_pos_embed", torch.stack(rows))

    def block(self, layer: int, stream: torch.Tensor) -> torch.Tensor:
        config, at = self.config, f"blocks.{layer}."
        stream = self.show(at + "hook_resid_pre", stream)
        pre = config.norm is not None and config.norm_placement == "pre"
        post = config.norm is not None and config.norm_placement == "post"
        read = self.norm(at + "ln1", stream) if pre else stream
        heads = self.attention(layer, stream, read)
        if config.branch_norm:
            heads = self.norm(at + "ln1_post", heads)
        attn_out = self.show(at + "hook_attn_out", heads)
        if config.attn_only:
            after = stream + attn_out
            return self.show(at + "hook_resid_post", self.norm(at + "ln1", after) if post else after)
        if config.parallel_blocks:
            mlp_out = self.mlp_branch(layer, stream, read)
            return self.show(at + "hook_resid_post", stream + attn_out + mlp_out)
        middle = stream + attn_out
        middle = self.show(at + "hook_resid_mid", self.norm(at + "ln1", middle) if post else middle)
        after = middle + self.mlp_branch(layer, middle, read)
        return self.show(at + "hook_resid_post", self.norm(at + "ln2", after) if post else after)

    # Attention

    def attention(self, layer: int, stream: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """What the heads and the output bias add up to, [pos d_model]."""
        config, at = self.config, f"blocks.{layer}."
        q = self.project(layer, "q", 0, config.n_heads, stream, read)
        k = self.project(layer, "k", config.n_heads, config.n_kv_heads, stream, read)
        v = self.project(layer, "v", config.n_heads + config.n_kv_heads, config.n_kv_heads, stream, read)
        if config.qk_norm:
            q = self.norm(at + "attn.q_norm", q, rms=True)
            k = self.norm(at + "attn.k_norm", k, rms=True)
        if config.positions == "rotary":
            q = self.show(at + "attn.hook_rot_q", self.rotate(q))
            k = self.show(at + "attn.hook_rot_k", self.rotate(k))
        pattern = self.pattern(layer, q, k)
        z = self.show(at + "attn.hook_z", self.mix(pattern, v))
        return self.write(layer, z)

    def project(
        self, layer: int, which: str, first: int, n: int, stream: torch.Tensor, read: torch.Tensor
    ) -> torch.Tensor:
        """[pos head d_head]; the fused matrix holds heads ``first`` to ``first + n`` of this kind."""
        config, state, at = self.config, self.state, f"blocks.{layer}."
        copies = torch.stack([torch.stack([stream[t]] * n) for t in range(self.length)])
        inputs = self.show(f"{at}hook_{which}_input", copies)
        out = []
        for t in range(self.length):
            heads = []
            for h in range(n):
                # An input that was edited is normalised for itself.
                edited = not torch.equal(inputs[t, h], stream[t])
                x = self.own_norm(at + "ln1", inputs[t, h]) if edited else read[t]
                rows = slice((first + h) * config.d_head, (first + h + 1) * config.d_head)
                value = state[at + "attn.qkv.weight"][rows] @ x
                if config.bias_qkv:
                    value = value + state[at + "attn.qkv.bias"][rows]
                heads.append(value)
            out.append(torch.stack(heads))
        return self.show(f"{at}attn.hook_{which}", torch.stack(out))

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.tolist()
        turned = [[rotated(self.config, head, p) for head in rows[t]] for t, p in enumerate(self.positions)]
        return torch.tensor(turned, dtype=x.dtype)

    def sees(self, layer: int, query: int, key: int) -> bool:
        window = self.config.window[layer]
        return key <= query and self.real[key] and (window is None or query - key < window)

    def pattern(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        config, at, n = self.config, f"blocks.{layer}.", self.length
        group = config.n_heads // config.n_kv_heads
        seen = [[j for j in range(n) if self.sees(layer, i, j)] for i in range(n)]
        queries, keys = q.tolist(), k.tolist()
        scores = [[[-math.inf] * n for _ in range(n)] for _ in range(config.n_heads)]
        for h in range(config.n_heads):
            for i in range(n):
                for j in seen[i]:
                    product = sum(a * b for a, b in zip(queries[i][h], keys[j][h // group], strict=True))
                    scores[h][i][j] = capped(config.attn_scale * product, config.attn_softcap)
        # Whatever an edit made of them, a query's scores of what it does not see are −∞, and its weights on it 0.
        shown = self.show(at + "attn.hook_attn_scores", torch.tensor(scores, dtype=q.dtype))
        shown = self.hide(at + "attn.hook_attn_scores", shown, seen, -math.inf).tolist()
        pattern = [[[0.0] * n for _ in range(n)] for _ in range(config.n_heads)]
        for h in range(config.n_heads):
            for i in range(n):
                weights = softmax([shown[h][i][j] for j in seen[i]])
                for j, weight in zip(seen[i], weights, strict=True):
                    pattern[h][i][j] = weight
        edited = self.show(at + "attn.hook_pattern", torch.tensor(pattern, dtype=q.dtype))
        return self.hide(at + "attn.hook_pattern", edited, seen, 0.0)

    def hide(self, name: str, value: torch.Tensor, seen: list[list[int]], hidden: float) -> torch.Tensor:
        value = value.clone()
        for i in range(self.length):
            for j in range(self.length):
                if j not in seen[i]:
                    value[:, i, j] = hidden
        self.shown[name] = value
        return value

    def mix(self, pattern: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = self.config.n_heads // self.config.n_kv_heads
        weights, values = pattern.tolist(), v.tolist()
        z = [[[0.0] * self.config.d_head for _ in range(self.config.n_heads)] for _ in range(self.length)]
        for h in range(self.config.n_heads):
            for i in range(self.length):
                for j in range(i + 1):
                    for e, value in enumerate(values[j][h // group]):
                        z[i][h][e] += weights[h][i][j] * value
        return torch.tensor(z, dtype=v.dtype)

    def write(self, layer: int, z: torch.Tensor) -> torch.Tensor:
        config, at = self.config, f"blocks.{layer}.attn."
        weight, d_head = self.state[at + "out.weight"], config.d_head
        results = []
        for t in range(self.length):
            heads = [weight[:, h * d_head : (h + 1) * d_head] @ z[t, h] for h in range(config.n_heads)]
            results.append(torch.stack(heads))
        result = self.show(at + "hook_result", torch.stack(results))
        out = []
        for t in range(self.length):
            total = sum(result[t, h] for h in range(config.n_heads))
            out.append(total + self.state[at + "out.bias"] if config.bias_out else total)
        return torch.stack(out)

    # MLP

    def mlp_branch(self, layer: int, stream: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """What the MLP adds to the stream; ``shared`` is what a parallel block with one norm has read already."""
        config, at = self.config, f"blocks.{layer}."
        inputs = self.show(at + "hook_mlp_in", stream)
        if config.norm is None or config.norm_placement == "post":
            read = inputs
        elif config.parallel_blocks == "shared_norm":
            rows = []
            for t in range(self.length):
                edited = not torch.equal(inputs[t], stream[t])
                rows.append(self.own_norm(at + "ln1", inputs[t]) if edited else shared[t])
            read = torch.stack(rows)
        else:
            read = self.norm(at + "ln2", inputs)
        out = self.mlp(at + "mlp.", read)
        if config.branch_norm:
            out = self.norm(at + "ln2_post", out)
        return self.show(at + "hook_mlp_out", out)

    def mlp(self, at: str, read: torch.Tensor) -> torch.Tensor:
        config, state = self.config, self.state
        up = torch.stack([state[at + "up.weight"] @ x for x in read])
        if config.bias_mlp:
            up = torch.stack([row + state[at + "up.bias"] for row in up])
        if config.gated_mlp:
            pre = self.show(at + "hook_pre", torch.stack([state[at + "gate.weight"] @ x for x in read]))
            linear = self.show(at + "hook_pre_linear", up)
            post = torch.stack([activation(config.act, pre[t]) * linear[t] for t in range(self.length)])
        else:
            pre = self.show(at + "hook_pre", up)
            post = torch.stack([activation(config.act, pre[t]) for t in range(self.length)])
        post = self.show(at + "hook_post", post)
        out = torch.stack([state[at + "down.weight"] @ x for x in post])
        return torch.stack([row + state[at + "down.bias"] for row in out]) if config.bias_mlp else out

    # Norms

    def norm(self, at: str, x: torch.Tensor, rms: bool = False) -> torch.Tensor:
        """Normalise the last axis, one vector at a time, showing scale and normalised value."""
        rms = rms or self.config.norm == "rmsnorm"
        centered = [row if rms else row - row.mean() for row in x.reshape(-1, x.shape[-1])]
        scales = [torch.sqrt((row * row).mean() + self.config.norm_eps) for row in centered]
        scale = self.show(at + ".hook_scale", torch.stack(scales).reshape(*x.shape[:-1], 1)).reshape(-1)
        rows = [row / scale[i] for i, row in enumerate(centered)]
        normalized = self.show(at + ".hook_normalized", torch.stack(rows).reshape(x.shape))
        out = [self.gain(at, row, rms) for row in normalized.reshape(-1, x.shape[-1])]
        return torch.stack(out).reshape(x.shape)

    def own_norm(self, at: str, x: Vector) -> Vector:
        """One vector through a pre-norm, shown nowhere."""
        if self.config.norm is None or self.config.norm_placement == "post":
            return x
        rms = self.config.norm == "rmsnorm"
        x = x if rms else x - x.mean()
        return self.gain(at, x / torch.sqrt((x * x).mean() + self.config.norm_eps), rms)

    def gain(self, at: str, x: Vector, rms: bool) -> Vector:
        x = x * self.state[at + ".w"]
        return x if rms else x + self.state[at + ".b"]


def capped(x: float, cap: float | None) -> float:
    return x if cap is None else cap * math.tanh(x / cap)


def softmax(row: list[float]) -> list[float]:
    top = max(row, default=0.0)
    powers = [math.exp(x - top) for x in row]
    return [p / sum(powers) for p in powers]


def activation(act: str, x: Vector) -> Vector:
    if act == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if act == "silu":
        return x / (1 + torch.exp(-x))
    if act == "gelu_new":
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if act == "gelu":
        return x / 2 * (1 + torch.erf(x / math.sqrt(2)))
    raise ValueError(act)


def rotated(config: Any, x: list[float], position: int) -> list[float]:
    """One head's numbers with each of its planes turned by position × frequency."""
    out = list(x)
    half = config.rotary_dim // 2
    for i in range(half):
        a, b = (i, i + half) if config.rotary_layout == "half" else (2 * i, 2 * i + 1)
        angle = position * frequency(config, i)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def frequency(config: Any, plane: int) -> float:
    """Radians per position, after whatever scaling the config asks for."""
    unscaled: float = config.rotary_base ** (-2 * plane / config.rotary_dim)
    scaling = config.rotary_scaling
    if scaling is None:
        return unscaled
    if scaling.kind == "linear":
        return unscaled / scaling.factor
    # Llama 3: periods that fitted into the old context stay, long ones are divided, those between are blended.
    turns = scaling.original_n_ctx * unscaled / (2 * math.pi)
    if turns > scaling.high_freq_factor:
        return unscaled
    if turns < scaling.low_freq_factor:
        return unscaled / scaling.factor
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept * unscaled + (1 - kept) * unscaled / scaling.factor
