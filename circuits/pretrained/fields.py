"""Reading a `config.json`: values with their family's defaults, and a refusal by name of what has no equal here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from circuits.config import Activation, RotaryScaling

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


class UnsupportedModel(ValueError):
    """A model, or a value in its config, that has no equal here; the message names it and what is supported."""


class Fields:
    """The fields of a `config.json`.

    A file lists only what differs from its family's defaults, so every reading gives the default. A null is a value:
    ``"sliding_window": null`` is no window, whatever the default.

    Attributes:
        data: The fields as they stand in the file.
        model_type: The family, for messages.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.model_type = str(data.get("model_type"))

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the family's default."""
        return self.data.get(name, default)

    def size(self, name: str, default: int) -> int:
        """A whole number.

        Raises:
            UnsupportedModel: Something else stands there.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.unsupported(name, value, "a whole number")
        return value

    def number(self, name: str, default: float) -> float:
        """A number.

        Raises:
            UnsupportedModel: Something else stands there.
        """
        return self._number(name, self.get(name, default))

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.unsupported(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or False.

        Raises:
            UnsupportedModel: Something else stands there.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.unsupported(name, value, "true or false")
        return value

    def only(self, name: str, supported: Any) -> None:
        """Refuse every value of a field but one, which is also the default.

        Raises:
            UnsupportedModel: Another value; the message names the field and both values.
        """
        value = self.get(name, supported)
        if value != supported:
            raise self.unsupported(name, value, repr(supported))

    def unsupported(self, name: str, value: Any, supported: str) -> UnsupportedModel:
        """The refusal of a value."""
        return UnsupportedModel(f"{self.model_type}: {name} {value!r} is not supported (supported: {supported})")

    # --- what several families share ---

    def activation(self, name: str, default: str) -> Activation:
        """The MLP's nonlinearity."""
        value = self.get(name, default)
        if value not in ACTIVATIONS:
            raise self.unsupported(name, value, ", ".join(ACTIVATIONS))
        return ACTIVATIONS[value]

    def rotary(
        self,
        d_head: int,
        n_ctx: int,
        *,
        fraction: float = 1.0,
        base_name: str = "rope_theta",
        fraction_name: str = "partial_rotary_factor",
    ) -> dict[str, Any]:
        """Rotary positions, as fields of `GPTConfig`.

        Newer files hold ``rope_parameters``; older ones ``rope_theta``, a partial width and ``rope_scaling``, under
        names that differ by family.
        """
        parameters = self.get("rope_parameters") or self.get("rope_scaling") or {}
        base = self._number(base_name, parameters.get("rope_theta", self.get(base_name, 10_000.0)))
        part = self._number(fraction_name, parameters.get("partial_rotary_factor", self.get(fraction_name, fraction)))
        return {
            "positions": "rotary",
            "rotary_base": base,
            "rotary_dim": int(d_head * part),
            "rotary_scaling": self.rotary_scaling(parameters, n_ctx),
        }

    def rotary_scaling(self, parameters: Mapping[str, Any], n_ctx: int) -> RotaryScaling | None:
        """How frequencies were stretched, from a ``rope_scaling`` or ``rope_parameters``; `n_ctx` is a default.

        Raises:
            UnsupportedModel: A kind that has no equal here.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind == "default":
            return None
        if kind == "linear":
            return RotaryScaling(kind="linear", factor=self._number("rope_scaling factor", parameters.get("factor")))
        if kind != "llama3":
            raise self.unsupported("rope_type", kind, "'default', 'linear', 'llama3'")
        factors = {
            name: self._number(f"rope_scaling {name}", parameters.get(name))
            for name in ("factor", "low_freq_factor", "high_freq_factor")
        }
        original = parameters.get("original_max_position_embeddings", n_ctx)
        return RotaryScaling(kind="llama3", original_n_ctx=original, **factors)

    def windows(self, n_layers: int, default: list[str], size: int) -> tuple[int | None, ...]:
        """How far each layer sees, from ``layer_types`` and ``sliding_window``."""
        kinds = self.get("layer_types") or default
        window = self.get("sliding_window", size)
        if len(kinds) != n_layers:
            raise self.unsupported("layer_types", kinds, f"{n_layers} entries, one for each layer")
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.unsupported("layer_types", kind, "'full_attention', 'sliding_attention'")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
