"""Memory is declared before it is allocated: a plan sums what an engine will hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy by name)
import numpy as np
from numpy.typing import NDArray

Category = Literal[
    "weights",
    "KV",
    "recurrent state",
    "conv",
    "rollback",
    "scratch",
    "draft weights",
    "draft KV",
    "draft state",
    "prefix store",
]
DRAFT_CATEGORY: dict[Category, Category] = {
    "weights": "draft weights",
    "KV": "draft KV",
    "recurrent state": "draft state",
    "conv": "draft state",
    "rollback": "draft state",
    "scratch": "draft state",
}


class Buffer(NamedTuple):
    """One array that the engine owns. `scratch` holds nothing from one step to the next."""

    name: str
    category: Category
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Exact size."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def allocate(buffer: Buffer, num_slots: int, fill: int | None) -> NDArray[Any]:
    """An array [num_slots, *buffer.shape], zero or with every byte set to `fill`."""
    shape = (num_slots, *buffer.shape)
    if fill is None:
        return np.zeros(shape, buffer.dtype)
    array = np.empty(shape, buffer.dtype)
    array.view(np.uint8)[...] = fill
    return array


def bytes_by_category(buffers: Iterable[Buffer]) -> dict[str, int]:
    """Sum of bytes for each category that occurs, in order of first occurrence."""
    totals: dict[str, int] = {}
    for buffer in buffers:
        totals[buffer.category] = totals.get(buffer.category, 0) + buffer.num_bytes
    return totals


def format_bytes(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
