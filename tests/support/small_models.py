"""Small models for tests of pages: sizes that all differ, predictions far from uniform, tokens that are hostile."""

import torch

from circuits import GPTConfig, HookedGPT

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "\"'><svg onload=document.title='owned'>",
    "&lt;b&gt;",
    " the",
    "\n",
    "]]>--><!--",
    "\u202egnp.exe\u2028",
    "{{7*7}}${8*8}",
)


class HostileTokenizer:
    """Token i is the i-th hostile string; texts are ids."""

    d_vocab, bos_token_id, prepend_bos = len(HOSTILE), None, False

    def encode(self, text, prepend_bos=None):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return "".join(self.str_tokens(ids))

    def str_tokens(self, ids):
        return [HOSTILE[i] for i in ids]

    def to_dict(self):
        return {"kind": "hostile"}


def small_model(**changes):
    config = GPTConfig(n_layers=2, d_model=7, n_heads=3, d_head=5, d_mlp=11, n_ctx=13, d_vocab=17).replace(**changes)
    model = HookedGPT(config, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the nearly uniform predictions of a fresh model
            parameter.add_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
            )
    return model
