"""Sequences of operations on slots, as bug reports tell them; each operation is checked when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from checks import check_logits, check_next, check_state
from conftest import POLICIES, TABLE, model, tokens
from redraft.config import EngineConfig
from redraft.engine import Engine, Generation, Request
from redraft.errors import StateError
from redraft.runner import Runner
from redraft.speculate import Drafter, DraftQuery, Stateless
from redraft.state import Window
from redraft.state.saved import SavedState

FAMILY = "kimi_k3"
each_policy = pytest.mark.parametrize("policy", POLICIES)


class Slots:
    """Slots of one runner with the tokens that each should have seen. N, the rollback bound, is `depth`."""

    def __init__(self, policy: str, depth: int = 8, *, family: str = FAMILY, fill: int = 0xFF) -> None:
        config = EngineConfig(num_slots=3, max_context=160, depth=depth, policy=policy, fill=fill)  # type: ignore[arg-type]
        self.family = family
        self.runner = Runner(model(family), config, TABLE)
        for slot in range(3):
            self.runner.pool.reset(slot)
        self.seen: list[list[int]] = [[], [], []]

    def prefill(self, slot: int, count: int, seed: int = 1) -> None:
        self.joint({slot: tokens(count, seed=seed)}, advance=True)

    def decode(self, slot: int, *new: int) -> None:
        """Single steps."""
        for token in new:
            self.verify(slot, [token], 1)

    def verify(self, slot: int, window: Sequence[int], consumed: int) -> None:
        """Last token and drafts; so many of them are consumed."""
        self.joint({slot: list(window)}, {slot: consumed})

    def joint(
        self, windows: dict[int, list[int]], consumed: dict[int, int] | None = None, *, advance: bool = False
    ) -> None:
        """One pass over several slots."""
        made = [Window(slot, w, num_logits=len(w), advance=advance) for slot, w in windows.items()]
        for window, rows in zip(made, self.runner.forward(made), strict=True):
            for i, row in enumerate(rows):
                check_logits(self.family, row, self.seen[window.slot] + window.tokens[: i + 1])
        for slot, window_tokens in windows.items():
            count = (consumed or {}).get(slot, len(window_tokens))
            self.runner.commit([slot], [count])
            self.seen[slot] += window_tokens[:count]
        self.check()

    def rollback(self, slot: int, count: int) -> bool:
        """Exact, or refused with nothing changed, as announced → whether it was done."""
        position = len(self.seen[slot]) - count
        announced = self.runner.can_rollback(slot, position)
        status = self.runner.pool.status(slot)
        if announced:
            self.runner.rollback(slot, position)
            del self.seen[slot][position:]
        else:
            with pytest.raises(StateError, match="cannot go back"):
                self.runner.rollback(slot, position)
            assert self.runner.pool.status(slot) == status
        self.check()
        return announced

    def floor(self, slot: int) -> int:
        """How many tokens the slot can go back."""
        return len(self.seen[slot]) - self.runner.pool.status(slot).floor

    def saved(self, slot: int) -> bytes:
        value = self.runner.pool.read(slot)
        return SavedState("", "", "float32", "float32", self.seen[slot], value, {}).to_bytes()

    def restore(self, slot: int, data: bytes) -> None:
        saved = SavedState.from_bytes(data)
        self.runner.pool.write(slot, saved.value)
        self.seen[slot] = saved.tokens
        self.check()

    def check(self) -> None:
        for slot, seen in enumerate(self.seen):
            check_state(self.family, self.runner, slot, seen)

    def next(self, slot: int, token: int = 5) -> None:
        """The next logits, on a window that is dropped."""
        check_next(self.family, self.runner, slot, self.seen[slot], token)


class Scripted(Stateless):
    """Proposes what a function of the sequence says."""

    def __init__(self, script: Any) -> None:
        self._script = script

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [list(self._script(list(q.tokens)))[: q.max_draft] for q in queries]


def knowing(text: Sequence[int], wrong_at: frozenset[int] = frozenset()) -> Scripted:
    """Knows a text, and errs at some positions of it."""
    known = [(token + 1) % 264 if i in wrong_at else token for i, token in enumerate(text)]
    return Scripted(lambda seen: known[len(seen) :] if list(text[: len(seen)]) == seen else [])


def made_engine(drafter: Drafter | None = None, *, family: str = FAMILY, **settings: Any) -> Engine:
    config = EngineConfig(**{"num_slots": 2, "max_context": 160, "depth": 4, "fill": 0xFF, **settings})
    return Engine(model(family), config, TABLE, drafter=drafter)


def ask(made: Engine, prompt: Sequence[int], params: Any, **more: Any) -> Generation:
    generation = made.submit(Request(tokens=tuple(prompt), params=params, **more))
    made.run()
    return generation


def cold(prompt: Sequence[int], params: Any, family: str = FAMILY) -> list[int]:
    """The answer of an engine without drafts, store, neighbours or a past."""
    return ask(made_engine(family=family, num_slots=1, depth=0, prefill_chunk=200), prompt, params).output
