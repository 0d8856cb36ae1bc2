"""All checks of the state transitions, in the order in which a fault is easiest to read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from redraft.verify import keeping, memory, outputs, rounds
from redraft.verify.difference import CheckResult
from redraft.verify.effort import Effort
from redraft.verify.trial import Subject

Check = Callable[[Subject, Effort], CheckResult]

CHECKS: dict[str, Check] = {
    "row independence": memory.row_independence,
    "split prefill": memory.split_prefill,
    "verify is read-only": rounds.verify_is_read_only,
    "rejected tail leaves no trace": rounds.rejected_tail_leaves_no_trace,
    "rollback at every accept count": rounds.rollback_at_every_count,
    "dropped round": rounds.dropped_round,
    "round extended window by window": rounds.round_window_by_window,
    "poisoned pools": memory.poisoned_pools,
    "sequence isolation": memory.sequence_isolation,
    "slot reuse": memory.slot_reuse,
    "value moved to a dirty slot": memory.value_moved_to_dirty_slot,
    "saved and restored": keeping.saved_and_restored,
    "prefix hit": keeping.prefix_hit,
    "drafter independence": outputs.drafter_independence,
}


def run_check(name: str, subject: Subject, effort: Effort) -> CheckResult:
    """One check, timed. An exception inside it is a failure of the check, not of the program."""
    start = time.perf_counter()
    try:
        result = CHECKS[name](subject, effort)
    except Exception as error:
        result = CheckResult(name, False, f"stopped by {type(error).__name__}: {error}", 0)
    return replace(result, name=name, seconds=time.perf_counter() - start)


def run_checks(subject: Subject, effort: Effort) -> Iterator[CheckResult]:
    """All checks, one result at a time."""
    for name in CHECKS:
        yield run_check(name, subject, effort)
