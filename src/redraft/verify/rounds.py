"""Checks of one round: what a window may change, and what is left of it after a commit or without one.

Every reference is a fresh sequence that only ever saw the surviving tokens.
"""

from __future__ import annotations

from redraft.config import PolicyName
from redraft.ops import Array
from redraft.state import Committed
from redraft.verify.difference import CheckResult, Comparison
from redraft.verify.effort import Effort
from redraft.verify.trial import Subject, Trial

ONLY_ROWS = "no recurrent layers: attention rows only, and dropping rows needs no rollback"
SLOT = 1  # where a round is tried; not 0, so that a stray write to slot 0 is not hidden


def limit_of(subject: Subject) -> str:
    """What a rollback check cannot show on this model."""
    return "" if subject.is_recurrent else ONLY_ROWS


def compare_with_fresh(
    compare: Comparison, subject: Subject, trial: Trial, slot: int, tokens: tuple[int, ...], case: str
) -> None:
    """State of `slot` against a fresh sequence of `tokens`, then the logits of one more token. Leaves that
    token proposed.
    """
    compare.values(subject.reference(tokens).value, trial.value(slot), slot=slot, case=case)
    following = subject.tokens(1, seed=len(tokens))
    rows = trial.propose({slot: following})[slot]
    expected = subject.reference(tokens + following).logits[None]
    compare.logits(expected, rows, slot=slot, position=len(tokens), case=case)


def verify_is_read_only(subject: Subject, effort: Effort) -> CheckResult:
    """A pass over a window leaves every slot's committed value as it is, also right after a commit."""
    compare = Comparison()
    num_windows = 0
    for policy in subject.policies:
        trial = subject.trial(policy)
        text = subject.tokens(11 + 2 * (subject.depth + 1), seed=effort.texts[0])
        trial.consume(dict.fromkeys(range(subject.num_slots), text[:11]))
        for kept in (1, subject.depth // 2 + 1, subject.depth + 1):
            for length in (1, subject.depth + 1):
                before = [trial.value(slot) for slot in range(subject.num_slots)]
                trial.propose({SLOT: text[11 : 11 + length]})
                num_windows += 1
                for slot, value in enumerate(before):
                    case = f"{policy}, window of {length}"
                    compare.values(value, trial.value(slot), slot=slot, case=case)
            trial.keep({SLOT: kept})
    evidence = f"{num_windows} windows, each slot's value before and after"
    return compare.result("verify is read-only", evidence, limit_of(subject))


def rejected_tail_leaves_no_trace(subject: Subject, effort: Effort) -> CheckResult:
    """Windows with the same kept beginning and other tails leave equal state and next logits."""
    compare = Comparison()
    cases = [(p, s, k) for p in subject.policies for s in effort.texts for k in range(1, subject.depth + 1)]
    for policy, seed, kept in cases:
        text = subject.tokens(11 + subject.depth + 1, seed)
        values, logits = _two_tails(subject, policy, text, kept)
        case = f"{policy}, {kept} of {subject.depth + 1} kept"
        compare.values(*values, slot=SLOT, case=case)
        compare.logits(*logits, slot=SLOT, position=11 + kept, case=case)
    evidence = f"{len(cases)} pairs of windows that differ only in their rejected tail"
    return compare.result("rejected tail leaves no trace", evidence, limit_of(subject))


def _two_tails(
    subject: Subject, policy: PolicyName, text: tuple[int, ...], kept: int
) -> tuple[tuple[Committed, Committed], tuple[Array, Array]]:
    values, logits = [], []
    for seed in (101, 102):
        trial = subject.trial(policy)
        trial.consume({SLOT: text[:11]})
        trial.propose({SLOT: text[11 : 11 + kept] + subject.tokens(subject.depth + 1 - kept, seed)})
        trial.keep({SLOT: kept})
        values.append(trial.value(SLOT))
        logits.append(trial.propose({SLOT: text[:1]})[SLOT])
    return (values[0], values[1]), (logits[0], logits[1])


def rollback_at_every_count(subject: Subject, effort: Effort) -> CheckResult:
    """Of a round m = 1 … depth + 1 tokens are kept, then of another: state and logits of a fresh sequence."""
    compare = Comparison()
    cases = [
        (policy, depth, prefix, seed)
        for policy in subject.policies
        for depth in effort.depths
        for prefix in effort.prefixes
        for seed in effort.texts
    ]
    num_rounds = 0
    for policy, depth, prefix, seed in cases:
        text = subject.tokens(prefix + 2 * (depth + 1), seed)
        for kept in range(1, depth + 2):
            trial = subject.trial(policy, depth=depth)
            trial.consume({SLOT: text[:prefix]})
            trial.propose({SLOT: text[prefix : prefix + kept] + subject.tokens(depth + 1 - kept, seed=103)})
            trial.keep({SLOT: kept})
            case = f"{policy}, depth {depth}, {kept} kept after {prefix}"
            compare_with_fresh(compare, subject, trial, SLOT, text[: prefix + kept], case)
            second = depth + 2 - kept
            end = prefix + kept + second
            trial.propose({SLOT: text[prefix + kept : end] + subject.tokens(depth + 1 - second, seed=104)})
            trial.keep({SLOT: second})
            case = f"{case}, then {second}"
            compare.values(subject.reference(text[:end]).value, trial.value(SLOT), slot=SLOT, case=case)
            num_rounds += 2
    evidence = f"{num_rounds} rounds, every accept count; state and next logits of a fresh sequence"
    return compare.result("rollback at every accept count", evidence, limit_of(subject))


def dropped_round(subject: Subject, effort: Effort) -> CheckResult:
    """Rounds that are never committed leave nothing: a later round is what it would be without them."""
    compare = Comparison()
    num_dropped = 0
    for policy in subject.policies:
        for seed in effort.texts:
            text = subject.tokens(11 + subject.depth + 2, seed)
            trial = subject.trial(policy)
            trial.consume({SLOT: text[:10]})
            trial.propose({SLOT: (text[10], *subject.tokens(subject.depth, seed=105))})
            trial.keep({SLOT: 1})
            for length in (subject.depth + 1, 1, (subject.depth + 1) // 2):
                trial.propose({SLOT: subject.tokens(length, seed=106 + length)})
                num_dropped += 1
            case = f"{policy}, after dropped rounds"
            compare_with_fresh(compare, subject, trial, SLOT, text[:11], case)
            trial.propose({SLOT: text[11:13]})
            trial.keep({SLOT: 2})
            compare_with_fresh(compare, subject, trial, SLOT, text[:13], f"{case}, then 2 kept")
    evidence = f"{num_dropped} rounds dropped, then one kept"
    return compare.result("dropped round", evidence, limit_of(subject))


def round_window_by_window(subject: Subject, effort: Effort) -> CheckResult:
    """Windows that extend a round, as a draft model does, are one long window; any part of it may be kept."""
    compare = Comparison()
    cases = [(p, s, k) for p in subject.policies for s in effort.texts for k in range(1, subject.depth + 2)]
    for policy, seed, kept in cases:
        text = subject.tokens(11 + subject.depth + 1, seed)
        first = 11 + max(1, subject.depth // 3)
        whole, parts = subject.trial(policy), subject.trial(policy)
        for trial in (whole, parts):
            trial.consume({SLOT: text[:11]})
        expected = whole.propose({SLOT: text[11:]})[SLOT]
        case = f"{policy}, {kept} kept"
        rows = parts.propose({SLOT: text[11:first]})[SLOT]
        compare.logits(expected[: len(rows)], rows, slot=SLOT, position=11, case=case)
        for at in range(first, len(text)):
            rows = parts.propose({SLOT: text[at : at + 1]}, extend=True)[SLOT]
            compare.logits(expected[at - 11 : at - 10], rows, slot=SLOT, position=at, case=case)
        parts.keep({SLOT: kept})
        value = subject.reference(text[: 11 + kept]).value
        compare.values(value, parts.value(SLOT), slot=SLOT, case=case)
    evidence = f"{len(cases)} rounds grown token by token, against one window"
    return compare.result("round extended window by window", evidence, limit_of(subject))
