"""The residual stream as a sum of component writes, and what each of them does to the logits.

`decompose` shows the writes, `direct_logit_attribution` their inner products with a readout direction, `logit_lens` the
readout of the stream at every depth. `needed_names` says which activations a cache must hold for them.
"""

from __future__ import annotations

from circuits.residual.attribution import LogitAttribution, direct_logit_attribution
from circuits.residual.decomposition import Decomposition, decompose
from circuits.residual.lens import LogitLens, logit_lens
from circuits.residual.requirements import Unit, needed_names

__all__ = [
    "Decomposition",
    "LogitAttribution",
    "LogitLens",
    "Unit",
    "decompose",
    "direct_logit_attribution",
    "logit_lens",
    "needed_names",
]
