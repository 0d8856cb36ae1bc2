"""`replay`, the default: one state a slot and a record of each proposed token.

A commit sets a cursor. The next pass over the state folds the consumed records in, by the very operations
that the scan performs, in the same read that its own window needs anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from redraft.models import RecurrentSpec
from redraft.ops import Array, DeltaInputs, IntArray
from redraft.state.batch import Batch
from redraft.state.buffers import Buffer
from redraft.state.rollback import (
    LayerState,
    RollbackPolicy,
    fold,
    record_buffers,
    records,
    state_shape,
)


class Replay(RollbackPolicy):
    """The conv window is a ring of W−1+depth columns. The round's last possible token finds its ring place
    taken by the oldest committed column, which must stay until the commit: its column waits in `conv tail`
    (scratch).
    """

    name = "replay"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        num_slots = kwargs["num_slots"]
        self._pending = {
            layer: np.zeros(num_slots, np.int64) for layer in self.layers
        }  # committed, not folded
        self._cursor = {
            layer: np.zeros(num_slots, np.int64) for layer in self.layers
        }  # oldest committed column
        self._num_kept = np.zeros(num_slots, np.int64)

    @staticmethod
    def buffers(layer: RecurrentSpec, depth: int, dtype: str = "float32") -> tuple[Buffer, ...]:
        """One state and W−1+depth conv columns; with any depth, depth+1 records and a column of scratch."""
        columns = layer.conv_width - 1 + depth
        base = (
            Buffer("state", "recurrent state", state_shape(layer), dtype),
            Buffer("conv", "conv", (columns, layer.conv_channels), dtype),
        )
        if depth == 0:
            return base
        tail = Buffer("conv tail", "scratch", (layer.conv_channels,), dtype)
        return *base, *record_buffers(layer, depth + 1, "record", "rollback", dtype), tail

    def _columns(self, layer: int, slot: int, first: int, count: int) -> IntArray:
        """Ring indices of `count` columns, counted from the oldest committed one."""
        ring = self.arrays[layer]["conv"].shape[1]
        return np.asarray((self._cursor[layer][slot] + first + np.arange(count)) % ring)

    def begin(self, batch: Batch) -> None:
        """A pass folds the pending records and writes over the oldest columns: no way back from here."""
        self._num_kept[batch.slots] = 0

    def short_conv(self, layer: int, x: Array, taps: Array, batch: Batch) -> Array:
        """See `StateView.short_conv`."""
        arrays = self.arrays[layer]
        return self.ops.short_conv_ring(
            x,
            taps,
            windows=batch.windows,
            ring=arrays["conv"],
            tail=arrays.get("conv tail"),
            cursor=self._cursor[layer][batch.slots],
            num_before=batch.num_before,
            advance=batch.advance,
        )

    def delta_rule(self, layer: int, inputs: DeltaInputs, batch: Batch) -> Array:
        """See `StateView.delta_rule`."""
        o = self.ops.delta_scan(
            *inputs,
            windows=batch.windows,
            state=self.arrays[layer]["state"],
            records=records(self.arrays[layer], "record"),
            num_folded=self._pending[layer][batch.slots],
            num_replayed=batch.num_before,
            advance=batch.advance,
        )
        self._pending[layer][batch.slots] = 0
        return o

    def commit(self, slot: int, num_consumed: int, num_proposed: int) -> bool:  # noqa: ARG002
        """Move the cursors; the records are folded by the next pass."""
        for layer, arrays in self.arrays.items():
            if num_consumed == self.depth + 1:  # the oldest committed column is no longer needed
                arrays["conv"][slot, self._columns(layer, slot, 0, 1)] = arrays["conv tail"][slot]
            self._cursor[layer][slot] = self._columns(layer, slot, num_consumed, 1)[0]
            self._pending[layer][slot] = num_consumed
        self._num_kept[slot] = min(num_consumed, self.depth)  # a full round has lost its oldest column
        return True

    def num_kept(self, slot: int) -> int:
        """The tokens of the last commit, until the next pass folds them."""
        return int(self._num_kept[slot])

    def num_pending(self, slot: int) -> int:
        """The most over the layers: an interrupted pass has folded some of them."""
        return max((int(pending[slot]) for pending in self._pending.values()), default=0)

    def go_back(self, slot: int, count: int) -> None:
        """Lower the cursors: the last records will not be folded, and their columns follow the window."""
        for layer in self.layers:
            self._cursor[layer][slot] = self._columns(layer, slot, -count, 1)[0]
            self._pending[layer][slot] -= count
        self._num_kept[slot] -= count

    def read(self, layer: int, slot: int) -> LayerState:
        """A copy of the committed value, pending records folded in."""
        arrays = self.arrays[layer]
        state = arrays["state"][slot].copy()
        if pending := int(self._pending[layer][slot]):
            source = records(arrays, "record")
            assert source is not None, "only records can be pending"
            fold(self.ops, state, source, slot, pending)
        keep = self.layers[layer].conv_width - 1
        return LayerState(state, arrays["conv"][slot, self._columns(layer, slot, 0, keep)].copy())

    def write(self, layer: int, slot: int, value: LayerState) -> None:
        """Replace the committed value."""
        arrays, keep = self.arrays[layer], self.layers[layer].conv_width - 1
        arrays["state"][slot] = value.state
        arrays["conv"][slot, self._columns(layer, slot, 0, keep)] = value.conv
        self._pending[layer][slot] = self._num_kept[slot] = 0
