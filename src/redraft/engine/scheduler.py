"""Who runs in the next step, on which slot, with how many tokens. Plain Python: no arrays, no model.

Decoding requests always run. Prompts share a budget of tokens a step, first come first served, so that a long
prompt runs beside decoding windows instead of before them. A slot stays with its session between requests
until another request needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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


Start = Callable[[Generation, int, list[int]], int]  # generation, slot, tokens its state holds → tokens kept


class Scheduler:
    """Slots, and the queue for them."""

    def __init__(
        self, *, num_slots: int, max_context: int, depth: int, prefill_chunk: int, interval: int = 0
    ) -> None:
        """`interval`: a prompt chunk does not cross a multiple of it (0: no such limit)."""
        self._max_context = max_context
        self._depth = depth
        self._prefill_chunk = prefill_chunk
        self._interval = interval
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

    def schedule(self, start: Start) -> list[Work]:
        """Admit what fits, then give every running generation its part of the step.

        `start` brings an admitted generation's slot to a state of its first tokens and says of how many.
        """
        self._admit(start)
        budget = self._prefill_chunk
        work = []
        for slot, generation in self._running.items():
            if generation.status is Status.DECODING:
                draft = self._max_draft(generation)
                work.append(Work(generation, slot, [], gives_token=True, max_draft=draft))
            elif budget > 0:
                first = generation.num_prefilled
                end = min(first + budget, generation.prefill_end)
                if self._interval:
                    end = min(end, (first // self._interval + 1) * self._interval)
                budget -= end - first
                last = end == generation.prefill_end
                prompt = generation.tokens[first:end]
                work.append(Work(generation, slot, prompt, gives_token=last, max_draft=0))
        return work

    def _max_draft(self, generation: Generation) -> int:
        wanted = self._depth if generation.request.depth is None else generation.request.depth
        room = self._max_context - len(
            generation.tokens
        )  # one place more than drafts: the bonus has no row yet
        return max(0, min(wanted, generation.num_left - 1, room - 1))

    def _admit(self, start: Start) -> None:
        while self._waiting:
            generation = self._waiting[0]
            claimed = self.claim(generation.request.session)
            if claimed is None:
                break
            try:
                num_held = start(generation, *claimed)
            except BaseException:
                self.give_back(claimed[0])
                raise
            self._waiting.popleft()
            self.run(generation, claimed[0], num_held)

    def claim(self, session: str | None) -> tuple[int, list[int]] | None:
        """Take a slot that nobody runs on: the session's own, a free one, or the least recently used parked
        one → the slot, and the tokens that its state has consumed (none where that is of no use).

        The caller has to `run`, `park` or `give_back` it.
        """
        for slot, parked in self._parked.items():
            if parked.session == session:
                del self._parked[slot]
                return slot, parked.tokens
        if self._free:
            return self._free.popleft(), []
        if self._parked:
            slot = next(iter(self._parked))
            del self._parked[slot]
            return slot, []
        return None

    def run(self, generation: Generation, slot: int, num_held: int) -> None:
        """Run a generation on a claimed slot, whose state has consumed its first `num_held` tokens."""
        generation.slot = slot
        generation.start(num_held)
        self._running[slot] = generation

    def park(self, slot: int, session: str, tokens: list[int]) -> None:
        """Keep a claimed slot, whose state has consumed `tokens`, for a session; an earlier one is freed."""
        self.close_session(session)
        self._parked[slot] = Parked(session, tokens)

    def parked(self, session: str) -> tuple[int, list[int]] | None:
        """The slot that waits for a session, and the tokens its state has consumed."""
        return next(((s, p.tokens) for s, p in self._parked.items() if p.session == session), None)

    def give_back(self, slot: int) -> None:
        """Free a claimed slot."""
        self._free.append(slot)

    def preempt(self, generation: Generation) -> None:
        """Take a running generation's slot away and put it at the end of the queue."""
        slot = generation.slot
        assert slot is not None, "checked by the engine"
        del self._running[slot]
        self._free.append(slot)
        generation.slot = None
        generation.status = Status.WAITING
        self._waiting.append(generation)
        self.check()

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
            self.park(slot, session, generation.tokens[:num_consumed])
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
