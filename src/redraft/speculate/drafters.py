"""Who guesses the next tokens. A drafter can only change speed: whatever it guesses is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from redraft.config import EngineConfig, SamplingParams
from redraft.models import Model
from redraft.ops import Ops
from redraft.runner import Runner
from redraft.speculate.sampling import choose
from redraft.state import DRAFT_CATEGORY, Buffer, Window


class DraftQuery(NamedTuple):
    """One sequence: all its tokens so far, and how many more may be guessed (0: only keep up with it)."""

    slot: int
    tokens: Sequence[int]
    num_prompt: int
    params: SamplingParams
    max_draft: int


class Drafter(Protocol):
    """Proposes tokens for several sequences; is told what was consumed."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """For each query, at most `max_draft` tokens that may follow its last one. Commits nothing."""

    def commit(self, slots: Sequence[int], num_consumed: Sequence[int]) -> None:
        """The target consumed so many tokens of the window [last, draft …] on each slot."""

    def reset(self, slot: int) -> None:
        """The slot begins a new sequence."""

    def rewind(self, slot: int, position: int) -> None:
        """Of the slot's sequence only the first `position` tokens remain."""

    def buffers(self) -> list[Buffer]:
        """Memory that the drafter owns."""


class Stateless:
    """The parts of a drafter that keeps nothing between calls."""

    def commit(self, slots: Sequence[int], num_consumed: Sequence[int]) -> None:
        """Nothing to do."""

    def reset(self, slot: int) -> None:
        """Nothing to do."""

    def rewind(self, slot: int, position: int) -> None:
        """Nothing to do."""

    def buffers(self) -> list[Buffer]:
        """None."""
        return []


class NoDraft(Stateless):
    """No speculation."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """No guesses."""
        return [[] for _ in queries]


class NGram(Stateless):
    """Looks the last tokens up in the sequence's own history and proposes what followed them there.

    The longest match of `max_match` … `min_match` tokens counts, and of these the latest.
    """

    def __init__(self, max_match: int = 4, min_match: int = 2) -> None:
        self._max_match = max_match
        self._min_match = min_match

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [self._lookup(list(q.tokens), q.max_draft) if q.max_draft else [] for q in queries]

    def _lookup(self, tokens: list[int], max_draft: int) -> list[int]:
        for length in range(min(self._max_match, len(tokens) - 1), self._min_match - 1, -1):
            suffix, last = tokens[-length:], tokens[-1]
            for end in range(len(tokens) - 2, length - 2, -1):
                if tokens[end] == last and tokens[end - length + 1 : end + 1] == suffix:
                    return tokens[end + 1 : end + 1 + max_draft]
        return []


class DraftModel:
    """A smaller model with its own state on the same slot numbers, rolled back by the same means as the
    target's.

    It samples with the target's noise, one token at a time, each window extending the round before anything
    is committed. Its state may lag the target's by one token, the last draft of a fully accepted window; the
    next round begins with that token. A slot further behind catches up by a chunk and proposes nothing in
    that step. Where its own context ends it proposes nothing more.
    """

    def __init__(self, model: Model, config: EngineConfig, ops: Ops, vocab_size: int | None = None) -> None:
        """`vocab_size`: of the target, where padding makes them differ; only shared tokens are proposed."""
        self._num_shared = min(model.spec.vocab_size, vocab_size or model.spec.vocab_size)
        self._runner = Runner(model, config, ops)
        self._chunk = config.prefill_chunk
        self._max_context = min(config.max_context, model.spec.max_context)
        self._ops = ops
        self._lag: dict[int, int] = {}  # of slots with an open round: tokens it began behind the target

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See `Drafter.propose`."""
        self._lag = {}
        room = [self._max_context - len(q.tokens) + 1 for q in queries]  # the last guess needs no row
        queries = [
            q._replace(max_draft=max(0, min(q.max_draft, r))) for q, r in zip(queries, room, strict=True)
        ]
        drafts: list[list[int]] = [[] for _ in queries]
        windows: dict[int, Window] = {}  # by query
        for i, query in enumerate(queries):
            unseen = query.tokens[int(self._runner.pool.position[query.slot]) :]
            pending = [min(token, self._num_shared - 1) for token in unseen]
            if query.max_draft and len(pending) <= 2:
                windows[i] = Window(query.slot, pending, num_logits=1)
            elif room[i] > 0 and (behind := pending[:-1][: self._chunk]):
                windows[i] = Window(query.slot, behind, num_logits=0, advance=True)
            if i in windows:
                self._lag[query.slot] = len(pending) - 1
        self._extend(queries, windows, drafts)
        return drafts

    def _extend(
        self, queries: Sequence[DraftQuery], windows: dict[int, Window], drafts: list[list[int]]
    ) -> None:
        extend = False
        while windows:
            logits = self._runner.forward(list(windows.values()), extend=extend)
            following: dict[int, Window] = {}
            for (i, window), rows in zip(windows.items(), logits, strict=True):
                if window.advance:
                    continue
                query = queries[i]
                context = [*query.tokens, *drafts[i]]
                drafts[i].append(
                    choose(rows[-1][: self._num_shared], query.params, context, query.num_prompt, self._ops)
                )
                if len(drafts[i]) < query.max_draft:
                    following[i] = Window(query.slot, drafts[i][-1:], num_logits=1)
            windows, extend = following, True

    def commit(self, slots: Sequence[int], num_consumed: Sequence[int]) -> None:
        """See `Drafter.commit`."""
        pool = self._runner.pool
        own = {
            slot: min(self._lag[slot] + count, pool.num_proposed(slot))
            for slot, count in zip(slots, num_consumed, strict=True)
            if slot in self._lag
        }
        self._runner.commit(list(own), list(own.values()))
        self._lag = {}

    def reset(self, slot: int) -> None:
        """See `Drafter.reset`."""
        self._runner.pool.reset(slot)

    def rewind(self, slot: int, position: int) -> None:
        """See `Drafter.rewind`. A state that cannot go back begins anew and catches up."""
        if self._runner.can_rollback(slot, position):
            self._runner.rollback(slot, position)
        elif self._runner.pool.position[slot] > position:
            self.reset(slot)

    def buffers(self) -> list[Buffer]:
        """The model's weights and state, under the draft's categories."""
        return [
            b._replace(name=f"draft {b.name}", category=DRAFT_CATEGORY[b.category])
            for b in self._runner.buffers()
        ]
