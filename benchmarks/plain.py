"""Plain PyTorch: the GPT that one would write by hand for speed, with the weights of one of ours."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

import circuits
from circuits import HookedGPT


class PlainBlock(nn.Module):
    """Pre-norm block: fused QKV product, scaled-dot-product attention, MLP."""

    def __init__(self, config: circuits.GPTConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads = config.n_heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=config.bias_qkv)
        self.out = nn.Linear(d, d, bias=config.bias_out)
        self.up, self.down = nn.Linear(d, config.d_mlp), nn.Linear(config.d_mlp, d)
        self.act = nn.GELU(approximate="tanh" if config.act == "gelu_new" else "none")

    def forward(self, x: Tensor) -> Tensor:
        batch, pos, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(batch, pos, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(batch, pos, d))
        return x + self.down(self.act(self.up(self.ln2(x))))


class PlainGPT(nn.Module):
    """The whole model, for learned positions and LayerNorm."""

    def __init__(self, config: circuits.GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.d_vocab, config.d_model)
        self.pos_embed = nn.Embedding(config.n_ctx, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
        self.ln_final = nn.LayerNorm(config.d_model)
        self.unembed = nn.Linear(config.d_model, config.d_vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.pos_embed.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def plain_twin(model: HookedGPT) -> PlainGPT:
    """A plain model with the same weights (shared, not copied)."""
    config = model.config
    plain = PlainGPT(config).to(model.dtype)
    state = {}
    for name, tensor in model.state_dict().items():
        name = name.replace(".attn.qkv", ".qkv").replace(".attn.out", ".out").replace(".mlp.", ".")
        if name.endswith((".w", ".b")):
            name = name[:-1] + ("weight" if name.endswith("w") else "bias")
        state[name] = tensor
    if config.tie_embeddings:
        state["unembed.weight"] = state["embed.weight"]
    plain.load_state_dict(state, assign=True)
    return plain
