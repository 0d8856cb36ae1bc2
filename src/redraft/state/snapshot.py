"""`snapshot`: a plane for every position a round may stop at, as in llama.cpp; a commit selects one."""

from __future__ import annotations

from typing import Any

import numpy as np

from redraft.models import RecurrentSpec
from redraft.ops import Array, DeltaInputs, Records
from redraft.state.batch import Batch
from redraft.state.buffers import Buffer
from redraft.state.rollback import (
    LayerState,
    RollbackPolicy,
    fold,
    last_columns,
    record_buffers,
    records,
    state_shape,
)


class Snapshot(RollbackPolicy):
    """1+depth planes. A full round has a state more than there are free planes: the last token's effect waits
    as a record and a conv column in scratch, and becomes a state only if the whole round is consumed.
    """

    name = "snapshot"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plane = np.zeros(kwargs["num_slots"], np.int64)  # of the committed state
        self._num_planes = self.depth + 1
        self._num_kept = np.zeros(kwargs["num_slots"], np.int64)  # planes before it that hold its past

    @staticmethod
    def buffers(layer: RecurrentSpec, depth: int, dtype: str = "float32") -> tuple[Buffer, ...]:
        """1+depth states and conv windows, of which one is no rollback; with any depth, scratch for one
        token.
        """
        conv = (layer.conv_width - 1, layer.conv_channels)
        planes = (
            Buffer("state", "recurrent state", (depth + 1, *state_shape(layer)), dtype),
            Buffer("conv", "conv", (depth + 1, *conv), dtype),
        )
        if depth == 0:
            return planes
        tail = Buffer("conv tail", "scratch", (layer.conv_channels,), dtype)
        return *planes, *record_buffers(layer, 1, "tail", "scratch", dtype), tail

    def begin(self, batch: Batch) -> None:
        """A pass writes the planes after the committed one; going round, they reach its oldest past."""
        for n, slot in enumerate(batch.slots):
            end = int(batch.num_before[n] + batch.starts[n + 1] - batch.starts[n])
            spared = 0 if batch.advance[n] else max(self.depth - end, 0)
            self._num_kept[slot] = min(self._num_kept[slot], spared)

    def short_conv(self, layer: int, x: Array, taps: Array, batch: Batch) -> Array:
        """See `StateView.short_conv`."""
        arrays = self.arrays[layer]
        planes = arrays["conv"]
        start = (self._plane[batch.slots] + batch.num_before) % self._num_planes
        history = planes[batch.slots, start]  # [N, W − 1, C], a copy
        y = self.ops.short_conv(x, taps, history, batch.starts)
        for n, slot in enumerate(batch.slots):
            new = x[batch.rows(n)]
            if batch.advance[n]:
                planes[slot, start[n]] = last_columns(history[n], new)
                continue
            for t in range(len(new)):
                at = (start[n] + 1 + t) % self._num_planes
                if at == self._plane[slot]:
                    arrays["conv tail"][slot] = new[t]
                else:
                    planes[slot, at] = last_columns(history[n], new[: t + 1])
        return y

    def delta_rule(self, layer: int, inputs: DeltaInputs, batch: Batch) -> Array:
        """See `StateView.delta_rule`."""
        arrays = self.arrays[layer]
        tail = records(arrays, "tail") or Records(np.empty(0), np.empty(0), np.empty(0))
        return self.ops.delta_scan_planes(
            *inputs,
            windows=batch.windows,
            planes=arrays["state"],
            tail=tail,
            plane=(self._plane[batch.slots] + batch.num_before) % self._num_planes,
            advance=batch.advance,
            last=self._plane[batch.slots],
        )

    def commit(self, slot: int, num_consumed: int, num_proposed: int) -> bool:  # noqa: ARG002
        """Select the plane after the last consumed token; for a full round, make it first."""
        if num_consumed == self._num_planes:
            self._consume_tail(slot)
        self._plane[slot] = (self._plane[slot] + num_consumed) % self._num_planes
        self._num_kept[slot] = min(self._num_kept[slot] + num_consumed, self.depth)
        return True

    def num_kept(self, slot: int) -> int:
        """Planes of this sequence's own past that nothing has been written over."""
        return int(self._num_kept[slot])

    def go_back(self, slot: int, count: int) -> None:
        """Select an earlier plane."""
        self._plane[slot] = (self._plane[slot] - count) % self._num_planes
        self._num_kept[slot] -= count

    def _consume_tail(self, slot: int) -> None:
        free = self._plane[slot]  # its state is the oldest of the round, and dead with this commit
        last = (free + self.depth) % self._num_planes
        for layer in self.layers:
            arrays = self.arrays[layer]
            source = records(arrays, "tail")
            assert source is not None, "a full round of several tokens has a tail"
            arrays["state"][slot, free] = arrays["state"][slot, last]
            fold(self.ops, arrays["state"][slot, free], source, slot, 1)
            arrays["conv"][slot, free] = last_columns(
                arrays["conv"][slot, last], arrays["conv tail"][slot][None]
            )

    def read(self, layer: int, slot: int) -> LayerState:
        """A copy of the committed plane."""
        arrays, plane = self.arrays[layer], self._plane[slot]
        return LayerState(arrays["state"][slot, plane].copy(), arrays["conv"][slot, plane].copy())

    def write(self, layer: int, slot: int, value: LayerState) -> None:
        """Replace the committed plane."""
        arrays, plane = self.arrays[layer], self._plane[slot]
        arrays["state"][slot, plane], arrays["conv"][slot, plane] = value
        self._num_kept[slot] = 0
