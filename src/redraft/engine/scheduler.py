"""Who runs in the next step, on which slot, with how many tokens. Plain Python: no arrays, no model.

Decoding requests always run. Prompts share a budget of tokens a step, first come first served, so that a long
prompt runs beside decoding windows instead of before them. A slot stays with its session between requests
until another request needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from redraft.engine.request import Generation, Status


class Work(NamedTuple):
    """One generation's part of a step, fixed when the step is scheduled.

    Prompt tokens to consume, or (with none) a window to verify with at most `max_draft` guesses.
    `gives_token`: the step ends in a new token; always, but for a prompt that goes on.
    """

    generation: Generation
    slot: int
    prompt: list[int]
    gives_token: bool
    max_draft: int


class Parked(NamedTuple):
    """What an idle slot holds: the tokens its state has consumed."""

    session: str
    tokens: list[int]


class Plan(NamedTuple):
    """A step: slots that start from nothing, and the work on all slots."""

    fresh_slots: list[int]
    work: list[Work]


class Scheduler:
    """Slots, and the queue for them."""

    def __init__(self, *, num_slots: int, max_context: int, depth: int, prefill_chunk: int) -> None:
        self._max_context = max_context
        self._depth = depth
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}  # by slot, in order of admission
        self._free = deque(range(num_slots))
        self._parked: dict[int, Parked] = {}  # by slot, least recently used first
        self._num_slots = num_slots

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return len(self._running)

    def add(self, generation: Generation) -> None:
        """Queue a generation."""
        self._waiting.append(generation)

    def schedule(self) -> Plan:
        """Admit what fits, then give every running generation its part of the step."""
        fresh = self._admit()
        budget = self._prefill_chunk
        work = []
        for slot, generation in self._running.items():
            if generation.status is Status.DECODING:
                draft = self._max_draft(generation)
                work.append(Work(generation, slot, [], gives_token=True, max_draft=draft))
            elif budget > 0:
                first = generation.num_prefilled
                end = min(first + budget, generation.prefill_end)
                budget -= end - first
                last = end == generation.prefill_end
                prompt = generation.tokens[first:end]
                work.append(Work(generation, slot, prompt, gives_token=last, max_draft=0))
        return Plan(fresh, work)

    def _max_draft(self, generation: Generation) -> int:
        wanted = self._depth if generation.request.depth is None else generation.request.depth
        room = self._max_context - len(
            generation.tokens
        )  # one place more than drafts: the bonus has no row yet
        return max(0, min(wanted, generation.num_left - 1, room - 1))

    def _admit(self) -> list[int]:
        fresh = []
        while self._waiting:
            generation = self._waiting[0]
            slot, num_cached = self._find_slot(generation)
            if slot is None:
                break
            self._waiting.popleft()
            generation.slot = slot
            generation.start(num_cached)
            self._running[slot] = generation
            if num_cached == 0:
                fresh.append(slot)
        return fresh

    def _find_slot(self, generation: Generation) -> tuple[int | None, int]:
        """A slot, and how many prompt tokens its state has consumed already."""
        own = [s for s, parked in self._parked.items() if parked.session == generation.request.session]
        if own:
            held = self._parked.pop(own[0]).tokens
            goes_on = len(held) < generation.num_prompt and generation.tokens[: len(held)] == held
            return own[0], len(held) if goes_on else 0
        if self._free:
            return self._free.popleft(), 0
        if self._parked:
            slot = next(iter(self._parked))
            del self._parked[slot]
            return slot, 0
        return None, 0

    def release(self, generation: Generation, num_consumed: int) -> None:
        """A generation is over: park its slot for its session, with the tokens its state has consumed, or
        free it.
        """
        slot = generation.slot
        if slot is None:
            self._waiting.remove(generation)
            return
        del self._running[slot]
        session = generation.request.session
        if session is not None and num_consumed:
            self._parked[slot] = Parked(session, generation.tokens[:num_consumed])
        else:
            self._free.append(slot)
        self.check()

    def close_session(self, session: str) -> None:
        """Free the slot that an ended session holds."""
        for slot in [s for s, parked in self._parked.items() if parked.session == session]:
            del self._parked[slot]
            self._free.append(slot)

    def check(self) -> None:
        """Every slot is running, parked or free, and only one of them."""
        slots: Sequence[int] = [*self._running, *self._parked, *self._free]
        assert sorted(slots) == list(range(self._num_slots)), f"slots lost or doubled: {sorted(slots)}"
