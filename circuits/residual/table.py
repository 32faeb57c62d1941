"""Components as the columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from circuits.components import Component

if TYPE_CHECKING:
    import pandas as pd


def component_columns(components: Sequence[Component], repeat: int = 1) -> dict[str, Any]:
    """Columns ``component`` (its text form), ``layer``, ``head`` and ``neuron``, each row `repeat` times.

    A column that no component fills is left out; a gap in one is a missing value.
    """
    import pandas as pd

    columns: dict[str, Any] = {"component": [str(c) for c in components for _ in range(repeat)]}
    for column, attribute in (("layer", "layer"), ("head", "head"), ("neuron", "index")):
        values = [getattr(c, attribute, None) for c in components for _ in range(repeat)]
        if any(value is not None for value in values):
            columns[column] = pd.array(values, dtype="Int64")
    return columns


def value_frame(components: Sequence[Component], axes: dict[str, int], values: dict[str, Any]) -> pd.DataFrame:
    """One row per component and cell of `axes`, for tensors ``[component *axes]``."""
    import numpy as np
    import pandas as pd

    shape = tuple(axes.values())
    cells = int(np.prod(shape, dtype=int))
    columns = component_columns(components, cells)
    for axis, index in zip(axes, np.indices(shape).reshape(len(shape), cells), strict=True):
        columns[axis] = np.tile(index, len(components))
    for name, tensor in values.items():
        columns[name] = tensor.detach().cpu().numpy().ravel()
    return pd.DataFrame(columns)
