"""A model's description as its file gives it, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redraft.errors import ModelFileError

_MISSING: Any = object()


class Metadata:
    """Values by key; `prefix` is put before each key that is asked for."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def get(self, key: str, default: Any = _MISSING) -> Any:
        """The value; an error names the key where there is neither value nor default."""
        value = self.values.get(self.prefix + key)
        if value is not None:
            return value
        if default is _MISSING:
            raise ModelFileError(
                f"the model's description lacks '{self.prefix}{key}': the file is incomplete"
            )
        return default

    def integer(self, key: str, default: Any = _MISSING) -> int:
        """A whole number, at least 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(f"'{self.prefix}{key}' must be a whole number, not {value!r}")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFileError(f"'{self.prefix}{key}' must be a number, not {value!r}")
        return float(value)

    def per_layer(self, key: str, num_layers: int, default: Any = _MISSING) -> list[int]:
        """One whole number a layer, from a list or from one number for all."""
        value = self.get(key, default)
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers:
            raise ModelFileError(f"'{self.prefix}{key}' has {len(values)} values for {num_layers} layers")
        return [int(v) for v in values]

    def require(self, key: str, expected: Any, default: Any = _MISSING) -> None:
        """Raise unless the value is the one supported."""
        value = self.get(key, expected if default is _MISSING else default)
        if value != expected:
            raise ModelFileError(f"'{self.prefix}{key}' is {value!r}; only {expected!r} is supported")
