"""Where the states of slots come from and go to between steps: live slots, the prefix store, saved bytes.

Values are copied; the step itself, which alone commits, is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from redraft.config import EngineConfig
from redraft.engine.continuation import describe
from redraft.engine.prefix import PrefixStore
from redraft.engine.request import Generation, Status
from redraft.engine.scheduler import Scheduler
from redraft.errors import StateError
from redraft.runner import Runner
from redraft.speculate import Drafter
from redraft.state import Committed
from redraft.state.saved import SavedState


class Handover:
    """Gives slots states and takes states from them. Changes runner, drafter and scheduler it is given."""

    def __init__(
        self, runner: Runner, drafter: Drafter, scheduler: Scheduler, config: EngineConfig, arithmetic: str
    ) -> None:
        self.prefixes = PrefixStore(config.prefix_bytes) if config.prefix_bytes else None
        self._runner = runner
        self._drafter = drafter
        self._scheduler = scheduler
        self._config = config
        self._arithmetic = arithmetic

    def start(self, generation: Generation, slot: int, held: list[int]) -> int:
        """Bring a slot, whose state has consumed `held`, to the longest state at hand of a generation's
        tokens → its position. At least one token is left to evaluate, for its logits.
        """
        tokens = generation.tokens
        live = _num_shared(held, tokens[:-1])
        live = live if held and self._runner.can_rollback(slot, live) else 0
        kept = self.prefixes.lookup(tokens, longer_than=live) if self.prefixes else None
        if kept is not None:
            self._write(slot, kept)
            return kept.position
        if live:
            self._runner.rollback(slot, live)
            self._drafter.rewind(slot, live)
        else:
            self._runner.pool.reset(slot)
            self._drafter.reset(slot)
        return live

    def keep(self, slot: int, generation: Generation) -> None:
        """Put a copy of a slot's state into the prefix store, if there is one."""
        pool = self._runner.pool
        position = int(pool.position[slot])
        if self.prefixes is not None:
            self.prefixes.keep(
                generation.tokens[:position], pool.value_bytes(position), lambda: pool.read(slot)
            )

    def share(self, generation: Generation, answers: Sequence[Generation]) -> None:
        """Run answers on slots of their own with a copy of a generation's state. Those for which no slot is
        left, or that have no state to copy, wait and evaluate their tokens.
        """
        value = None if generation.slot is None else self._runner.pool.read(generation.slot)
        for answer in answers:
            claimed = self._scheduler.claim(None) if value is not None else None
            if claimed is None or value is None:
                self._scheduler.add(answer)
            else:
                self._occupy(claimed[0], value)
                self._scheduler.run(answer, claimed[0], value.position)

    def save(self, what: Generation | str) -> SavedState:
        """The committed value of a generation or a parked session, and what goes with it. Changes nothing."""
        if isinstance(what, Generation):
            if what.status is Status.FINISHED:
                raise StateError(f"request {what.number} is finished: save it before, or save its session")
            slot, tokens = what.slot, what.tokens
            about: dict[str, Any] = {"generation": describe(what)}
            value = self._nothing() if slot is None else self._runner.pool.read(slot)
        else:
            parked = self._scheduler.parked(what)
            if parked is None:
                raise StateError(
                    f"no slot keeps a state for session '{what}': it never ran, or was displaced"
                )
            slot, tokens = parked
            value, about = self._runner.pool.read(slot), {"session": what}
        types = self._config.kv_type, self._config.compute
        model = self._runner.model.fingerprint
        return SavedState(model, self._arithmetic, *types, list(tokens), value, about)

    def _nothing(self) -> Committed:
        layout = self._runner.pool.layout(0)
        return Committed(0, {name: np.zeros(shape, kind) for name, (shape, kind) in layout.items()})

    def opened(self, data: bytes) -> SavedState:
        """Saved bytes, checked to belong to this model and to fit its slots. Changes nothing."""
        saved = SavedState.from_bytes(data)
        saved.require(self._runner.model.fingerprint, self._arithmetic, self._config)
        self._runner.pool.require_fits(saved.value)
        return saved

    def settle(self, saved: SavedState, generation: Generation | None) -> None:
        """Write an opened state to a slot, and run its generation there, or park it for its session."""
        session = saved.about.get("session")
        claimed = self._scheduler.claim(session)
        if claimed is None:
            raise StateError("no slot is free for the saved state: finish, cancel or preempt a request first")
        slot, position = claimed[0], saved.value.position
        self._occupy(slot, saved.value)
        if generation is not None:
            self._scheduler.run(generation, slot, position)
        else:
            self._scheduler.park(slot, str(session), saved.tokens[:position])

    def _occupy(self, slot: int, value: Committed) -> None:
        """Write to a claimed slot, which is free again if that fails."""
        try:
            self._write(slot, value)
        except BaseException:
            self._scheduler.give_back(slot)
            raise

    def _write(self, slot: int, value: Committed) -> None:
        """Give a slot a copy of a state; the drafter has to catch up."""
        self._runner.pool.write(slot, value)
        self._drafter.reset(slot)


def _num_shared(held: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    differ = (i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b)
    return next(differ, min(len(held), len(tokens)))
