"""Training: a GPT from a text or a task, resumably.

Every name is imported from its module when first used, so that the settings alone load no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from circuits._lazy import attach

if TYPE_CHECKING:
    from circuits.training.data import (
        Data as Data,
        RepeatedData as RepeatedData,
        TextData as TextData,
        text_loss as text_loss,
    )
    from circuits.training.loop import train as train
    from circuits.training.settings import TrainingConfig as TrainingConfig
    from circuits.training.state import Interrupted as Interrupted
else:
    _PUBLIC = {
        "Data": "circuits.training.data",
        "Interrupted": "circuits.training.state",
        "RepeatedData": "circuits.training.data",
        "TextData": "circuits.training.data",
        "TrainingConfig": "circuits.training.settings",
        "text_loss": "circuits.training.data",
        "train": "circuits.training.loop",
    }
    __all__ = list(_PUBLIC)
    __getattr__, __dir__ = attach(__name__, _PUBLIC)
