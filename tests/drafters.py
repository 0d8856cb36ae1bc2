"""Drafters that misbehave in known ways."""

from __future__ import annotations

from collections.abc import Sequence

from redraft.speculate import DraftQuery, NGram, Stateless


class AlwaysWrong(Stateless):
    """Proposes tokens that a random model hardly ever chooses."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        return [
            [(31 * query.tokens[-1] + 7 * i + 3) % 264 for i in range(query.max_draft)] for query in queries
        ]


class EverySecondStep(NGram):
    """Returns nothing every second step, as lookup drafters do."""

    def __init__(self) -> None:
        super().__init__(max_match=4, min_match=1)
        self._step = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        self._step += 1
        return [[] for _ in queries] if self._step % 2 else super().propose(queries)


class Prophet(Stateless):
    """Knows what will come, and is right for 0, 1, 2 … tokens in turn before it errs: every accept count
    occurs.
    """

    def __init__(self, futures: Sequence[Sequence[int]]) -> None:
        self._futures = [list(future) for future in futures]
        self._step = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        self._step += 1
        drafts = []
        for query in queries:
            seen = list(query.tokens)
            future = next((f for f in self._futures if f[: len(seen)] == seen), seen)
            draft = future[len(seen) : len(seen) + query.max_draft]
            right = self._step % (query.max_draft + 1)
            drafts.append(draft[:right] + [(token + 1) % 264 for token in draft[right:]])
        return drafts
