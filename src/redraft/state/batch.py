"""One forward pass as the state layer sees it: which windows, where they start, what is already proposed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from redraft.ops import IntArray, Windows


class Window(NamedTuple):
    """Tokens to run on one slot.

    `num_logits`: of how many last rows the logits are wanted. `advance`: the window will be consumed in full,
    so the state may move at once and needs no record; its commit must follow.
    """

    slot: int
    tokens: list[int]
    num_logits: int
    advance: bool = False


@dataclass(frozen=True)
class Batch:
    """Windows laid out in rows. `num_before[n]`: tokens proposed on that slot earlier and not committed."""

    slots: IntArray  # [N]
    starts: IntArray  # [N + 1]
    positions: IntArray  # [B]
    num_before: IntArray  # [N]
    advance: NDArray[np.bool_]  # [N]

    @cached_property
    def windows(self) -> Windows:
        """Slots and row ranges, as the ops take them."""
        return Windows(self.slots, self.starts)

    def rows(self, n: int) -> slice:
        """The rows of window n."""
        return slice(int(self.starts[n]), int(self.starts[n + 1]))


def int_array(values: Any) -> IntArray:
    """Whole numbers as the ops take them."""
    return np.asarray(values, np.int64)
