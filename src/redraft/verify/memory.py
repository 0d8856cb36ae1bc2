"""Checks of slots: what one may hold from others, from its past, or from memory nobody wrote."""

from __future__ import annotations

from redraft.config import PolicyName
from redraft.ops import Array
from redraft.state import Committed
from redraft.verify.difference import CheckResult, Comparison
from redraft.verify.effort import Effort
from redraft.verify.rounds import SLOT, compare_with_fresh
from redraft.verify.trial import Subject, Trial

FILLS = (0x00, 0x3E, 0xFF)  # zero, a small number, and NaN in every floating-point format we hold


def row_independence(subject: Subject, effort: Effort) -> CheckResult:
    """A sequence's rows alone, one row a pass, and among the rows of other sequences: the same bytes."""
    compare = Comparison()
    length = subject.depth + 1
    for policy in subject.policies:
        for seed in effort.texts:
            texts = [subject.tokens(11 + length, seed=seed + 10 * slot) for slot in range(subject.num_slots)]
            together = subject.trial(policy)
            together.consume({slot: text[:11] for slot, text in enumerate(texts)})
            # the others' windows have other lengths, so that a row's place in the batch is not its own
            windows = {slot: text[11 : 11 + length - slot % length] for slot, text in enumerate(texts)}
            among = together.propose(windows)
            together.keep({slot: len(window) for slot, window in windows.items()})
            for slot, text in enumerate(texts):
                case = f"{policy}, among {subject.num_slots - 1} others"
                _compare_alone(compare, subject, policy, slot, text, (together, among[slot]), case)
            _compare_single_rows(compare, subject, policy, texts[0], among[0])
    evidence = f"{subject.num_slots} sequences alone, together, and row by row"
    return compare.result("row independence", evidence)


def _compare_alone(
    compare: Comparison,
    subject: Subject,
    policy: PolicyName,
    slot: int,
    text: tuple[int, ...],
    found: tuple[Trial, Array],
    case: str,
) -> None:
    together, rows = found
    alone = subject.trial(policy)
    alone.consume({slot: text[:11]})
    expected = alone.propose({slot: text[11 : 11 + len(rows)]})[slot]
    alone.keep({slot: len(rows)})
    compare.values(alone.value(slot), together.value(slot), slot=slot, case=case)
    compare.logits(expected, rows, slot=slot, position=11, case=case)


def _compare_single_rows(
    compare: Comparison, subject: Subject, policy: PolicyName, text: tuple[int, ...], rows: Array
) -> None:
    trial = subject.trial(policy)
    trial.consume({0: text[:11]})
    for i in range(len(rows)):
        row = trial.propose({0: text[11 + i : 12 + i]})[0]
        trial.keep({0: 1})
        compare.logits(row, rows[i : i + 1], slot=0, position=11 + i, case=f"{policy}, one row a pass")


def poisoned_pools(subject: Subject, effort: Effort) -> CheckResult:
    """Pools whose memory held other bytes before first use: the same rounds give the same bytes."""
    compare = Comparison()
    for policy in subject.policies:
        for seed in effort.texts:
            clean = _some_rounds(subject, policy, seed, FILLS[0])
            for fill in FILLS[1:]:
                dirty = _some_rounds(subject, policy, seed, fill)
                case = f"{policy}, memory filled with 0x{fill:02x}"
                for (value, rows), (other, other_rows) in zip(clean, dirty, strict=True):
                    compare.values(value, other, slot=SLOT, case=case)
                    compare.logits(rows, other_rows, slot=SLOT, position=value.position, case=case)
    fills = ", ".join(f"0x{fill:02x}" for fill in FILLS)
    return compare.result("poisoned pools", f"memory filled with {fills} before use: same bytes")


def _some_rounds(subject: Subject, policy: PolicyName, seed: int, fill: int) -> list[tuple[Committed, Array]]:
    """A prompt shorter than a conv window, a full round, a partial one → value and next logits after each."""
    trial = subject.trial(policy, fill=fill)
    text = subject.tokens(2 + 2 * (subject.depth + 1), seed)
    trial.consume({SLOT: text[:2]})
    seen, at = [], 2
    for kept in (subject.depth + 1, 1):
        trial.propose({SLOT: text[at : at + subject.depth + 1]})
        trial.keep({SLOT: kept})
        value = trial.value(SLOT)
        seen.append((value, trial.propose({SLOT: text[:1]})[SLOT]))
        at += kept
    return seen


def sequence_isolation(subject: Subject, effort: Effort) -> CheckResult:
    """A parked slot's value does not move while the others consume prompts, verify, commit and are reset."""
    compare = Comparison()
    num_steps = 6 * len(effort.texts)
    for policy in subject.policies:
        for parked in {0, subject.num_slots - 1}:
            trial = subject.trial(policy)
            text = subject.tokens(11 + subject.depth + 1, seed=effort.texts[0])
            trial.consume({parked: text[:11]})
            trial.propose({parked: text[11:]})
            trial.keep({parked: subject.depth // 2 + 1})
            before = trial.value(parked)
            others = [slot for slot in range(subject.num_slots) if slot != parked]
            for step in range(num_steps):
                _work(subject, trial, others, step)
                case = f"{policy}, step {step} of the others"
                compare.values(before, trial.value(parked), slot=parked, case=case)
            following = trial.propose({parked: text[:1]})[parked]
            expected = subject.reference(text[: before.position] + text[:1]).logits[None]
            compare.logits(
                expected, following, slot=parked, position=before.position, case=f"{policy}, woken"
            )
    evidence = f"a parked slot through {num_steps} steps of {subject.num_slots - 1} others"
    return compare.result("sequence isolation", evidence)


def _work(subject: Subject, trial: Trial, slots: list[int], step: int) -> None:
    if step % 3 == 2:
        trial.reset(slots[step % len(slots)])
    trial.consume({slots[step % len(slots)]: subject.tokens(5, seed=step)})
    trial.propose(
        {slot: subject.tokens(1 + (step + slot) % (subject.depth + 1), seed=slot) for slot in slots}
    )
    trial.keep(dict.fromkeys(slots, 1))


def slot_reuse(subject: Subject, effort: Effort) -> CheckResult:
    """A slot that is reset is as new, whatever it held, also right after a commit or with a round open."""
    compare = Comparison()
    lengths = (1, 2, subject.depth + 1)
    for policy in subject.policies:
        for seed in effort.texts:
            for length in lengths:
                for is_open in (False, True):
                    trial = subject.trial(policy)
                    _use(subject, trial, SLOT, is_open=is_open)
                    trial.reset(SLOT)
                    text = subject.tokens(length, seed)
                    trial.consume({SLOT: text})
                    case = f"{policy}, {length} tokens in a used slot"
                    compare_with_fresh(compare, subject, trial, SLOT, text, case)
    evidence = f"sequences of {', '.join(map(str, lengths))} tokens in a used slot, against a new one"
    return compare.result("slot reuse", evidence)


def _use(subject: Subject, trial: Trial, slot: int, *, is_open: bool) -> None:
    """Leave a full round committed on a slot; with `is_open`, another proposed."""
    trial.consume({slot: subject.tokens(20, seed=107)})
    trial.propose({slot: subject.tokens(subject.depth + 1, seed=108)})
    trial.keep({slot: subject.depth + 1})
    if is_open:
        trial.propose({slot: subject.tokens(subject.depth, seed=109)})


def split_prefill(subject: Subject, effort: Effort) -> CheckResult:
    """A prompt cut into chunks gives the state and the logits of the whole prompt."""
    compare = Comparison()
    length = 70
    for policy in subject.policies:
        for seed in effort.texts:
            text = subject.tokens(length, seed)
            for chunk in (*effort.chunks, length):
                trial = subject.trial(policy)
                for at in range(0, length, chunk):
                    rows = trial.consume({SLOT: text[at : at + chunk]})[SLOT]
                case = f"{policy}, chunks of {chunk}"
                expected = subject.reference(text)
                compare.values(expected.value, trial.value(SLOT), slot=SLOT, case=case)
                compare.logits(expected.logits[None], rows[None], slot=SLOT, position=length - 1, case=case)
    chunks = ", ".join(map(str, effort.chunks))
    return compare.result("split prefill", f"a prompt of {length} tokens in chunks of {chunks} and whole")


def value_moved_to_dirty_slot(subject: Subject, effort: Effort) -> CheckResult:
    """A committed value written to a used slot, also one with a round open, goes on there as at home."""
    compare = Comparison()
    cases = [
        (p, seed, is_open) for p in subject.policies for seed in effort.texts for is_open in (False, True)
    ]
    for policy, seed, is_open in cases:
        text = subject.tokens(11 + subject.depth + 1, seed)
        trial = subject.trial(policy)
        trial.consume({SLOT: text[:11]})
        trial.propose({SLOT: text[11:]})
        trial.keep({SLOT: 1 + subject.depth // 2})
        _use(subject, trial, 0, is_open=is_open)
        value = trial.value(SLOT)
        trial.put(0, value)
        case = f"{policy}, slot {SLOT} to 0"
        compare.values(value, trial.value(0), slot=0, case=case)
        compare_with_fresh(compare, subject, trial, 0, text[: value.position], case)
    return compare.result("value moved to a dirty slot", "read, written to a used slot, continued")
