"""Keep, drop, drop above a concurrency, or undecided: from tasks paired by name, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from redraft.decide.arms import ArmPlan
from redraft.decide.measure import RunResult
from redraft.decide.summary import Texts, rate, reference_texts, task_times
from redraft.state import format_bytes

_NUM_RESAMPLES = 10_000
Decision = Literal["keep", "drop", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """Completed tasks an hour with speculation, over those of another arm; 95 % bootstrap interval over
    tasks.
    """

    concurrency: int
    against: str
    against_slots: int
    ratio: float
    low: float
    high: float

    @property
    def decision(self) -> Decision:
        """What the interval says: it lies above 1, below 1, or holds 1."""
        if self.low > 1:
            return "keep"
        return "drop" if self.high < 1 else "undecided"


@dataclass(frozen=True)
class Verdict:
    """The answer and its reason, each in one line."""

    decision: str
    reason: str
    comparisons: tuple[Comparison, ...]
    noise: float  # the same arm measured twice: the ratio of its rates, 1 without noise


def compare(
    one: RunResult, other: RunResult, reference: Texts, *, concurrency: int | None = None
) -> Comparison:
    """The ratio of the two rates, over tasks that both ran."""
    times, others = task_times(one, reference), task_times(other, reference)
    names = [name for name in times if name in others]
    sample = np.array([(*times[name], *others[name]) for name in names], float).reshape(-1, 4)
    scale = one.concurrency / other.concurrency
    picks = np.random.default_rng(0).integers(0, max(len(names), 1), (_NUM_RESAMPLES, len(names)))
    with np.errstate(divide="ignore", invalid="ignore"):
        totals = sample[picks].sum(axis=1)  # [resamples, 4]
        ratios = scale * (totals[:, 1] / totals[:, 0]) / (totals[:, 3] / totals[:, 2])
    low, high = np.nanpercentile(ratios, [2.5, 97.5]) if len(names) > 1 else (0.0, float("inf"))
    rates = [rate([t[name] for name in names], run.concurrency) for t, run in ((times, one), (others, other))]
    ratio = rates[0] / rates[1] if rates[1] else float("inf")
    slots = other.arm.config.num_slots
    return Comparison(concurrency or one.concurrency, other.arm.name, slots, ratio, float(low), float(high))


def judge(plan: ArmPlan, alone: Sequence[RunResult], full: Sequence[RunResult]) -> Verdict:
    """The verdict from the runs at concurrency 1 and at full concurrency, in the order of `plan.arms`."""
    reference = reference_texts(alone[0])
    at_one = compare(alone[1], alone[0], reference)
    at_slots = compare(full[1], full[0], reference)
    against_slots = compare(full[1], full[2], reference)
    with_slots = plan.extra_slots > 0
    worst = min((at_slots, against_slots), key=lambda c: c.ratio) if with_slots else at_slots
    noise = compare(alone[2], alone[0], reference).ratio
    return Verdict(
        decision=_decide(at_one, worst),
        reason=_reason(plan, at_one, worst, noise),
        comparisons=(at_one, at_slots, against_slots),
        noise=noise,
    )


def _decide(at_one: Comparison, at_full: Comparison) -> str:
    if at_full.concurrency == at_one.concurrency:
        return at_full.decision
    outcomes = at_one.decision, at_full.decision
    if outcomes == ("keep", "drop"):
        return f"drop above concurrency {at_one.concurrency}"
    return at_full.decision if len(set(outcomes)) == 1 else "undecided"


def _reason(plan: ArmPlan, at_one: Comparison, at_full: Comparison, noise: float) -> str:
    buys = (
        f"{plan.extra_slots} more slot{'s' * (plan.extra_slots != 1)}"
        if plan.extra_slots
        else f"no further slot (one needs {format_bytes(plan.slot_bytes)})"
    )
    return (
        f"speculation costs {format_bytes(plan.extra_bytes)}, which buys {buys}; "
        f"tasks an hour with it: {_times(at_one)} at concurrency 1, "
        f"{_times(at_full)} at {at_full.concurrency} "
        f"against '{at_full.against}' with {at_full.against_slots} slots; "
        f"the same arm measured twice differs by {abs(noise - 1):.1%}"
    )


def _times(comparison: Comparison) -> str:
    return f"×{comparison.ratio:.2f} [{comparison.low:.2f}, {comparison.high:.2f}]"


def as_mapping(verdict: Verdict) -> Mapping[str, object]:
    """For JSON."""
    return {
        "decision": verdict.decision,
        "reason": verdict.reason,
        "same_arm_twice": verdict.noise,
        "comparisons": [
            {**vars(comparison), "decision": comparison.decision} for comparison in verdict.comparisons
        ],
    }
