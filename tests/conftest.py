"""What every test shares.

Neither package may be imported at the top of this file: jaxtyping's import hook is installed after it is read, and what
was imported before would run without shape checks.
"""

import os

# Tests touch no network; a test about the hub replaces the client. Read when the hub client is first imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=25, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
