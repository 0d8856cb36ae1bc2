"""Acceptance is equality: a draft token stands if and only if it is the target's own token at its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(draft: Sequence[int], choose_at: Callable[[int], int]) -> list[int]:
    """The target's own tokens along a window, up to and including the first that differs from the draft.

    `choose_at(i)` is the target's token after the window's row i, given the draft before it. The result has
    num_accepted + 1 tokens: the accepted prefix of the draft, and the bonus.
    """
    emitted: list[int] = []
    for i in range(len(draft) + 1):
        emitted.append(choose_at(i))
        if i < len(draft) and emitted[i] != draft[i]:
            break
    return emitted
