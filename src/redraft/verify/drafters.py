"""Drafters that misbehave in known ways: an output that depends on one of them is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.speculate import DraftQuery, NGram, Stateless


class AlwaysWrong(Stateless):
    """Proposes tokens that the model hardly ever chooses."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See `Drafter.propose`."""
        return [
            [(31 * query.tokens[-1] + 7 * i + 3) % self._vocab_size for i in range(query.max_draft)]
            for query in queries
        ]


class EverySecondStep(NGram):
    """Looks up, but returns nothing every second step: steps without a draft between steps with one."""

    def __init__(self) -> None:
        super().__init__(max_match=4, min_match=1)
        self._step = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See `Drafter.propose`."""
        self._step += 1
        return [[] for _ in queries] if self._step % 2 else super().propose(queries)


class KnownFuture(Stateless):
    """Knows the right outputs, and is right for 0, 1, 2 … tokens in turn before it errs: every accept count
    occurs.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._sequences = [list(sequence) for sequence in sequences]
        self._vocab_size = vocab_size
        self._step = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See `Drafter.propose`."""
        self._step += 1
        return [self._draft(list(query.tokens), query.max_draft) for query in queries]

    def _draft(self, seen: list[int], max_draft: int) -> list[int]:
        known = next((s for s in self._sequences if s[: len(seen)] == seen), seen)
        draft = known[len(seen) : len(seen) + max_draft]
        right = self._step % (max_draft + 1)
        return draft[:right] + [(token + 1) % self._vocab_size for token in draft[right:]]
