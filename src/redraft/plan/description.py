"""A model's description with the checks a planner needs: sizes that are sizes, lists that are lists. Any
value may be absurd, and must then be named in an error rather than lead to an absurd plan.
"""

from __future__ import annotations

from typing import Any

from redraft.errors import ModelFileError
from redraft.models import Metadata

MAX_LAYERS = 10_000
MAX_SIZE = 2**31


class Description(Metadata):
    """See `Metadata`."""

    def size(self, *keys: str, default: int | None = None, lowest: int = 1) -> int:
        """A whole number from `lowest` to 2³¹, under the first of several spellings of its key that is there.

        Without a default, an absent number is an error that names the usual spelling.
        """
        for key in keys:
            if self.get(key, None) is not None:
                return self._checked(key, self.integer(key), lowest)
        if default is None:
            self.get(keys[0])  # raises
        assert default is not None, "an absent number without a default has raised"
        return default

    def optional(self, key: str, default: int = 0) -> int:
        """A whole number, 0 or more."""
        return self.size(key, default=default, lowest=0)

    def _checked(self, key: str, value: int, lowest: int) -> int:
        if not lowest <= value <= MAX_SIZE:
            raise ModelFileError(f"'{self.prefix}{key}' must be {lowest} to {MAX_SIZE}, not {value}")
        return value

    def num_layers(self, key: str) -> int:
        """The number of layers."""
        count = self.size(key)
        if count > MAX_LAYERS:
            raise ModelFileError(f"'{self.prefix}{key}' must be at most {MAX_LAYERS}, not {count}")
        return count

    def sequence(self, key: str) -> list[Any] | None:
        """A list, or None where there is none."""
        value = self.get(key, None)
        if value is not None and not isinstance(value, list):
            raise ModelFileError(f"'{self.prefix}{key}' must be a list, not {value!r}")
        return value

    def part(self, key: str) -> Description | None:
        """A description inside this one, or None where there is none."""
        value = self.get(key, None)
        if value is not None and not isinstance(value, dict):
            raise ModelFileError(f"'{self.prefix}{key}' must be an object, not {value!r}")
        return None if value is None else Description(value)

    def sizes(self, key: str, num_layers: int, default: int | None = None) -> list[int]:
        """One whole number a layer, 0 or more, from a list or from one number for all."""
        value = self.get(key) if default is None else self.get(key, default)
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers:
            raise ModelFileError(f"'{self.prefix}{key}' has {len(values)} values for {num_layers} layers")
        for one in values:
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= MAX_SIZE:
                raise ModelFileError(
                    f"'{self.prefix}{key}' must hold whole numbers to {MAX_SIZE}, not {one!r}"
                )
        return values
