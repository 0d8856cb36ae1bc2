"""What a check finds: byte comparisons counted, the first difference located."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.ops import Array
from redraft.state import Committed


@dataclass(frozen=True)
class Difference:
    """Where two values that must be equal first differ, in the order of the layers.

    `position` is a place in the sequence, where the tensor has one row for each; `index` is the place in the
    tensor, or in its row. `layer` is None for logits and tokens, which belong to the whole model.
    """

    case: str
    tensor: str
    slot: int
    layer: int | None = None
    position: int | None = None
    index: tuple[int, ...] = ()
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"layer {self.layer}, "
        position = "" if self.position is None else f", position {self.position}"
        index = f", index {list(self.index)}" if self.index else ""
        values = f": {self.found} instead of {self.expected}" if self.expected else ""
        return f"{layer}{self.tensor}, slot {self.slot}{position}{index}{values} ({self.case})"


@dataclass(frozen=True)
class CheckResult:
    """One check: passed or not, how much was compared, and where the first difference is.

    `limit` says what the check cannot show on this model; empty if there is no such limit.
    """

    name: str
    passed: bool
    evidence: str
    num_comparisons: int
    difference: Difference | None = None
    limit: str = ""
    seconds: float = 0.0


class Comparison:
    """Compares bytes, counts comparisons and keeps the first difference."""

    def __init__(self) -> None:
        self.num_comparisons = 0
        self.first: Difference | None = None

    def values(self, expected: Committed, found: Committed, *, slot: int, case: str) -> None:
        """Compare the committed values of two sequences: position, then every tensor, layer by layer."""
        self.num_comparisons += 1
        if expected.position != found.position:
            numbers = str(expected.position), str(found.position)
            self._keep(Difference(case, "number of committed tokens", slot, None, None, (), *numbers))
            return
        for name in sorted(expected.arrays, key=_layer_and_tensor):
            layer, tensor = _layer_and_tensor(name)
            has_rows = tensor in ("keys", "values")
            self._arrays(
                expected.arrays[name], found.arrays[name],
                case=case, tensor=tensor, slot=slot, layer=layer, first_position=0 if has_rows else None,
            )  # fmt: skip

    def logits(self, expected: Array, found: Array, *, slot: int, position: int, case: str) -> None:
        """Compare rows of logits [T, vocab]; the first row belongs to `position`."""
        self._arrays(
            expected, found, case=case, tensor="logits", slot=slot, layer=None, first_position=position
        )

    def tokens(self, expected: list[int], found: list[int], *, slot: int, position: int, case: str) -> None:
        """Compare two outputs; their first token is at `position` of the sequence."""
        self.num_comparisons += 1
        if expected == found:
            return
        pairs = enumerate(zip(expected, found, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(found)))
        numbers = [str(tokens[at]) if at < len(tokens) else "the end" for tokens in (expected, found)]
        self._keep(Difference(case, "token", slot, None, position + at, (), *numbers))

    def _arrays(
        self,
        expected: Array,
        found: Array,
        *,
        case: str,
        tensor: str,
        slot: int,
        layer: int | None,
        first_position: int | None,
    ) -> None:
        self.num_comparisons += 1
        if expected.shape != found.shape or expected.dtype != found.dtype:
            shapes = f"{expected.dtype}{list(expected.shape)}", f"{found.dtype}{list(found.shape)}"
            self._keep(Difference(case, tensor, slot, layer, None, (), *shapes))
            return
        index = first_difference(expected, found)
        if index is None:
            return
        values = f"{float(expected[index]):.9g}", f"{float(found[index]):.9g}"
        position = None if first_position is None else first_position + index[0]
        inside = index if first_position is None else index[1:]
        self._keep(Difference(case, tensor, slot, layer, position, inside, *values))

    def _keep(self, difference: Difference) -> None:
        if self.first is None:
            self.first = difference

    def result(self, name: str, evidence: str, limit: str = "") -> CheckResult:
        """The check's result; `evidence` says what was equal, and gives way to the difference if there is
        one.
        """
        text = evidence if self.first is None else str(self.first)
        return CheckResult(name, self.first is None, text, self.num_comparisons, self.first, limit)


def first_difference(expected: Array, found: Array) -> tuple[int, ...] | None:
    """Index of the first element whose bytes differ; None if there is none. Equal NaNs are equal."""
    differs: Any = _as_bytes(expected) != _as_bytes(found)
    if not differs.any():
        return None
    flat = int(np.argmax(differs)) // expected.dtype.itemsize
    return tuple(int(i) for i in np.unravel_index(flat, expected.shape))


def _as_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _layer_and_tensor(name: str) -> tuple[int, str]:
    """'state.3' → (3, 'state')."""
    tensor, _, layer = name.rpartition(".")
    return int(layer), tensor
