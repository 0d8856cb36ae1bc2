"""One model and its state: run windows, commit what was consumed. Knows no request and no drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

from redraft.config import EngineConfig
from redraft.models import Model
from redraft.ops import Array, Ops
from redraft.state import Buffer, StatePool, Window
from redraft.state.batch import int_array


class Runner:
    """`forward` proposes, `commit` disposes."""

    def __init__(self, model: Model, config: EngineConfig, ops: Ops) -> None:
        self.model = model
        self.pool = StatePool(model.spec, config, ops)
        self._round: dict[int, list[int]] = {}  # tokens proposed on each slot since its last commit

    def forward(self, windows: Sequence[Window], *, extend: bool = False) -> list[Array]:
        """Run windows → for each, the logits [num_logits, vocab] of its last rows.

        Committed state keeps its value, except under windows that advance. Without `extend`, a window starts
        from the committed state, and what was proposed on its slot before is dropped.
        """
        batch = self.pool.begin(windows, extend=extend)
        tokens = int_array([token for window in windows for token in window.tokens])
        ends = batch.starts[1:].tolist()
        spans = [range(end - w.num_logits, end) for w, end in zip(windows, ends, strict=True)]
        logits = self.model.forward(tokens, self.pool.view(batch), int_array(list(chain(*spans))))
        self.pool.end(batch)
        for window, before in zip(windows, batch.num_before, strict=True):
            self._round[window.slot] = [*self._round.get(window.slot, [])[:before], *window.tokens]
        bounds = accumulate((w.num_logits for w in windows), initial=0)
        return [logits[first:end] for first, end in pairwise(bounds)]

    def commit(self, slots: Sequence[int], num_consumed: Sequence[int]) -> None:
        """Make the first `num_consumed` tokens proposed on each slot its history.

        Where the policy cannot keep part of a round, the consumed tokens are run again from the restored
        state.
        """
        again = [
            Window(slot, self._round[slot][:count], num_logits=0, advance=True)
            for slot, count in zip(slots, num_consumed, strict=True)
            if not self.pool.commit(slot, count)
        ]
        if again:
            self.forward(again)
            for window in again:
                self.pool.commit(window.slot, len(window.tokens))
        for slot in slots:
            self._round.pop(slot, None)

    def rollback(self, slot: int, position: int) -> None:
        """Take a slot back to `position`, exactly, or raise `StateError` with nothing changed: see
        `StatePool.rollback`.
        """
        self.pool.rollback(slot, position)
        self._round.pop(slot, None)

    def can_rollback(self, slot: int, position: int) -> bool:
        """Whether `rollback` would succeed."""
        return self.pool.can_rollback(slot, position)

    def buffers(self) -> list[Buffer]:
        """Every buffer: the weights as one, then the state."""
        return [Buffer("weights", "weights", (self.model.weight_bytes,), "uint8"), *self.pool.buffers()]
