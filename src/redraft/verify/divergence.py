"""Two greedy answers that should be equal: are they, and if not, what does the difference mean?

Engines whose arithmetic depends on the batch flip tokens that are nearly tied. Such a flip is a tie, not a
corruption; only a difference with a margin is evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from redraft.verify.answer import Answer, Step

# Nats between two tokens. Rounding in 16-bit arithmetic flips gaps up to about this; a state that is not that
# of the text shows gaps from 0.6 up.
TIE_MARGIN = 0.25
MIN_ALIGNED = 3  # tokens that must agree after a shift before we call it one
MAX_SHIFT = 3  # tokens left out at one place


class Kind(StrEnum):
    """What a difference means. The first three are the classes of findings."""

    STATE = "state"  # the text goes on from a state that is not that of the text before it
    TOKEN = "token"  # the right sequence, with tokens lost, doubled, cut off or miscounted
    DISTRIBUTION = "distribution"  # log-probabilities or samples are not those of the model
    TIE = "tie"  # rounding may have decided
    UNKNOWN = "unknown"  # no margin is known, so it may be a tie


@dataclass(frozen=True)
class Divergence:
    """The first difference of two answers: at which token, with what gap in nats, as a sentence."""

    kind: Kind
    position: int
    gap: float | None
    text: str


def diverge(expected: Answer, found: Answer) -> Divergence | None:
    """Compare two greedy answers to one prompt; None if their texts are equal."""
    if expected.text == found.text:
        return None
    if not expected.steps or not found.steps:
        at = _first(expected.text, found.text)
        excerpt = f"'{found.text[at : at + 20]}' instead of '{expected.text[at : at + 20]}'"
        return Divergence(Kind.UNKNOWN, at, None, f"from character {at}: {excerpt}; no margins are known")
    ours, theirs = ([step.token for step in answer.steps] for answer in (expected, found))
    at = _first(ours, theirs)
    if at == min(len(ours), len(theirs)):
        return _lengths(expected, found, at)
    return _tokens(expected, found, at)


def _tokens(expected: Answer, found: Answer, at: int) -> Divergence:
    """Two different tokens at one place."""
    what = f"token {at} is {found.steps[at].token!r} instead of {expected.steps[at].token!r}"
    if not expected.has_margins and not found.has_margins:
        return Divergence(Kind.UNKNOWN, at, None, f"{what}; no margins are known")
    gap = _gap(expected, found, at)
    if gap is None or gap <= TIE_MARGIN:
        return Divergence(Kind.TIE, at, gap, f"{what}, at a near-tie")
    shift = _shift(*([step.token for step in answer.steps[at:]] for answer in (expected, found)))
    kind, cause = (Kind.TOKEN, f": {shift}") if shift else (Kind.STATE, "")
    return Divergence(kind, at, gap, f"{what}{cause}, with a margin of {gap:.2f} nats")


def _lengths(expected: Answer, found: Answer, at: int) -> Divergence:
    """One answer is the beginning of the other, or both have the same tokens."""
    shorter, longer = sorted((expected, found), key=lambda answer: len(answer.steps))
    if len(longer.steps) == at:
        return Divergence(Kind.TOKEN, at, None, "equal tokens make different texts")
    what = f"{len(found.steps)} tokens instead of {len(expected.steps)}, equal so far"
    if shorter.finish_reason == "stop":  # an end token is not among the tokens, but it has a margin
        if not longer.has_margins:
            return Divergence(Kind.UNKNOWN, at, None, f"{what}; no margins are known")
        first, second = sorted(longer.steps[at].top.values(), reverse=True)[:2]
        if first - second <= TIE_MARGIN:
            return Divergence(Kind.TIE, at, first - second, f"{what}, at a near-tie")
    return Divergence(Kind.TOKEN, at, None, what)


def _first(a: Sequence[str], b: Sequence[str]) -> int:
    shortest = min(len(a), len(b))
    return next((i for i in range(shortest) if a[i] != b[i]), shortest)


def _gap(expected: Answer, found: Answer, at: int) -> float | None:
    """The smaller of the gaps that the answers report between their tokens at `at`; None: perhaps little."""
    pairs = [(expected, found.steps[at].token), (found, expected.steps[at].token)]
    gaps = [_distance(answer.steps[at], other) for answer, other in pairs if answer.has_margins]
    return min(gaps) if None not in gaps else None  # type: ignore[type-var]


def _distance(step: Step, other: str) -> float | None:
    """How much likelier a step's own token was than another; None if that may be little."""
    if other in step.top:
        return abs(step.logprob - step.top[other])
    at_least = step.logprob - min(step.top.values())  # the other is below everything listed
    return at_least if at_least > TIE_MARGIN else None


def _shift(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Whether the rest is the same but for tokens left out or put in."""
    if count := _left_out(ours, theirs):
        return f"{count} left out, the rest is equal"
    if count := _left_out(theirs, ours):
        return f"{count} put in, the rest is equal"
    return ""


def _left_out(whole: Sequence[str], part: Sequence[str]) -> int:
    """How many tokens of `whole` to leave out, a few at a place, so that `part` is left; 0: it cannot be."""
    i = j = matched = 0
    while i < len(whole) and j < len(part):
        ahead = next((n for n in range(MAX_SHIFT + 1) if whole[i + n : i + n + 1] == part[j : j + 1]), None)
        if ahead is None:
            return 0
        i, j, matched = i + ahead + 1, j + 1, matched + 1
    left_out = i - j
    return left_out if matched >= max(MIN_ALIGNED, 2 * left_out) else 0
