"""`checkpoint`: a window runs on the state in place, and a copy keeps the value from before the round.

While the round is open, the copy is the committed state. A commit of everything drops it; any other restores
it, and the consumed tokens are run through the model again. Once a round is committed, nothing before it is
kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from redraft.models import RecurrentSpec
from redraft.ops import Array, DeltaInputs
from redraft.state.batch import Batch
from redraft.state.buffers import Buffer
from redraft.state.rollback import LayerState, RollbackPolicy, last_columns, state_shape


class Checkpoint(RollbackPolicy):
    """One state and one copy of it, whatever the depth."""

    name = "checkpoint"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = np.zeros(
            kwargs["num_slots"], np.bool_
        )  # the copy, not the state, is the committed value

    @staticmethod
    def buffers(layer: RecurrentSpec, depth: int, dtype: str = "float32") -> tuple[Buffer, ...]:
        """A state and a conv window; with any depth, the same again."""
        state, conv = state_shape(layer), (layer.conv_width - 1, layer.conv_channels)
        live = (Buffer("state", "recurrent state", state, dtype), Buffer("conv", "conv", conv, dtype))
        if depth == 0:
            return live
        return (
            *live,
            Buffer("state copy", "rollback", state, dtype),
            Buffer("conv copy", "rollback", conv, dtype),
        )

    def begin(self, batch: Batch) -> None:
        """Bring a starting window's state to the committed value; copy it unless the window advances."""
        for n, slot in enumerate(batch.slots):
            if batch.num_before[n]:
                continue
            if self._open[slot]:
                self._restore(slot)
            if not batch.advance[n]:
                self._move(slot, "state", "state copy")
                self._move(slot, "conv", "conv copy")
                self._open[slot] = True

    def _move(self, slot: int, source: str, target: str) -> None:
        for arrays in self.arrays.values():
            arrays[target][slot] = arrays[source][slot]

    def _restore(self, slot: int) -> None:
        self._move(slot, "state copy", "state")
        self._move(slot, "conv copy", "conv")
        self._open[slot] = False

    def short_conv(self, layer: int, x: Array, taps: Array, batch: Batch) -> Array:
        """See `StateView.short_conv`."""
        conv = self.arrays[layer]["conv"]
        history = conv[batch.slots]  # [N, W − 1, C], a copy
        y = self.ops.short_conv(x, taps, history, batch.starts)
        for n, slot in enumerate(batch.slots):
            conv[slot] = last_columns(history[n], x[batch.rows(n)])
        return y

    def delta_rule(self, layer: int, inputs: DeltaInputs, batch: Batch) -> Array:
        """See `StateView.delta_rule`."""
        nothing = np.zeros(len(batch.slots), np.int64)
        return self.ops.delta_scan(
            *inputs,
            windows=batch.windows,
            state=self.arrays[layer]["state"],
            records=None,
            num_folded=nothing,
            num_replayed=nothing,
            advance=np.ones(len(batch.slots), np.bool_),
        )

    def commit(self, slot: int, num_consumed: int, num_proposed: int) -> bool:
        """Keep the state if all was consumed; else ask for the consumed tokens again, from the copy."""
        if num_consumed == num_proposed:
            self._open[slot] = False
        return num_consumed == num_proposed

    def read(self, layer: int, slot: int) -> LayerState:
        """A copy of the committed value."""
        arrays, suffix = self.arrays[layer], " copy" if self._open[slot] else ""
        return LayerState(arrays[f"state{suffix}"][slot].copy(), arrays[f"conv{suffix}"][slot].copy())

    def write(self, layer: int, slot: int, value: LayerState) -> None:
        """Replace the committed value."""
        arrays = self.arrays[layer]
        arrays["state"][slot], arrays["conv"][slot] = value
        self._open[slot] = False
