"""The prefix store: states of token prefixes kept in host memory for later requests, under a byte budget.

An entry is found by its tokens, compared in full, and carries its own position; one whose position is not
the number of its tokens is no entry. Knows neither slots nor requests: a caller keeps and gets copies.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from redraft.state import Committed


@dataclass(frozen=True)
class PrefixStats:
    """Counts since the start, and what is held now."""

    num_lookups: int
    num_hits: int
    num_tokens_saved: int  # not evaluated thanks to hits
    num_entries: int
    num_bytes: int


class PrefixStore:
    """At most `max_bytes` of kept states and their tokens; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Committed] = OrderedDict()  # least recently used first
        self._lengths: Counter[int] = Counter()  # of the keys
        self._num_bytes = 0
        self._num_lookups = self._num_hits = self._num_tokens_saved = 0

    @property
    def stats(self) -> PrefixStats:
        """Lookups, hits, tokens saved, bytes held."""
        return PrefixStats(
            self._num_lookups, self._num_hits, self._num_tokens_saved, len(self._entries), self._num_bytes
        )

    def lookup(self, tokens: Sequence[int], longer_than: int = 0) -> Committed | None:
        """The state of the longest kept prefix of `tokens` that leaves at least one token to evaluate.

        None unless it is longer than `longer_than`, the tokens that need no evaluation anyway. The value is
        shared: do not modify it.
        """
        self._num_lookups += 1
        whole = _key(tokens)
        step = len(_key([0]))
        for length in sorted(self._lengths, reverse=True):
            if not longer_than < length // step < len(tokens):
                continue
            key = whole[:length]
            value = self._entries.get(key)
            if value is None:
                continue
            if value.position * step != length:
                self._drop(key)
                continue
            self._entries.move_to_end(key)
            self._num_hits += 1
            self._num_tokens_saved += value.position - longer_than
            return value
        return None

    def keep(self, tokens: Sequence[int], value_bytes: int, read: Callable[[], Committed]) -> None:
        """Keep the state that `read` copies, of `value_bytes`, under the tokens it has consumed.

        Room is made first, so that the budget holds at every moment; a state that exceeds it alone is not
        kept.
        """
        key = _key(tokens)
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        needed = len(key) + value_bytes
        if not key or needed > self._max_bytes:
            return
        while self._num_bytes + needed > self._max_bytes:
            self._drop(next(iter(self._entries)))
        value = read()
        assert _size(key, value) == needed, "a state has the size that its layout declares"
        self._entries[key] = value
        self._lengths[len(key)] += 1
        self._num_bytes += needed

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= _size(key, self._entries.pop(key))
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


def _size(key: bytes, value: Committed) -> int:
    return len(key) + sum(array.nbytes for array in value.arrays.values())
