"""The figures of one arm at one concurrency.

A task is completed when every turn was answered with the text that the arm without speculation gave when it
ran alone. Tasks an hour = 3600 · concurrency · completed / Σ task times: what a host completes that keeps all
its places busy. A failed task does no work and keeps its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from redraft.decide.measure import RunResult, TaskRun, TurnResult

Texts = Mapping[str, tuple[tuple[int, ...], ...]]  # by task: the tokens of each turn


@dataclass(frozen=True)
class Summary:
    """Times in seconds; None where nothing was measured."""

    arm: str
    concurrency: int
    num_slots: int
    depth: int
    num_tasks: int
    num_completed: int
    failures: dict[str, int]
    tasks_per_hour: float
    wall_s: float
    task_s_median: float | None
    task_s_p90: float | None
    ttft_s_median: float | None
    tpot_s_median: float | None
    num_tokens: int
    num_drafted: int
    num_accepted: int
    tokens_per_step: float | None
    accepted_by_kind: dict[str, tuple[int, int]]  # drafted, accepted
    peak_bytes: dict[str, int]
    resident_bytes: int


def reference_texts(run: RunResult) -> Texts:
    """What every other run is held to."""
    return {task.task.name: tuple(turn.tokens for turn in task.turns) for task in run.tasks if task.complete}


def failure(task: TaskRun, reference: Texts) -> str | None:
    """Why a task did not complete; None if it did."""
    if task.error:
        return task.error
    if task.finished_s is None:
        return "unfinished"
    if task.task.name not in reference:
        return "no reference"
    if tuple(turn.tokens for turn in task.turns) != reference[task.task.name]:
        return "text differs"
    return None


def task_times(run: RunResult, reference: Texts) -> dict[str, tuple[float, bool]]:
    """By task that came to an end: its time, and whether it completed."""
    return {
        task.task.name: (task.finished_s - task.started_s, failure(task, reference) is None)
        for task in run.tasks
        if task.finished_s is not None
    }


def rate(times: Sequence[tuple[float, bool]], concurrency: int) -> float:
    """Completed tasks an hour."""
    total = sum(seconds for seconds, _ in times)
    return 3600 * concurrency * sum(done for _, done in times) / total if total else 0.0


def summarise(run: RunResult, reference: Texts) -> Summary:
    """All figures of a run."""
    times = task_times(run, reference)
    seconds = [s for s, _ in times.values()]
    turns = [turn for task in run.tasks for turn in task.turns]
    causes = Counter(cause for task in run.tasks if (cause := failure(task, reference)) is not None)
    return Summary(
        arm=run.arm.name,
        concurrency=run.concurrency,
        num_slots=run.arm.config.num_slots,
        depth=run.arm.config.depth,
        num_tasks=len(run.tasks),
        num_completed=sum(done for _, done in times.values()),
        failures=dict(causes),
        tasks_per_hour=rate(list(times.values()), run.concurrency),
        wall_s=run.wall_s,
        task_s_median=_median(seconds),
        task_s_p90=quantiles(seconds, n=10)[-1] if len(seconds) > 1 else _median(seconds),
        ttft_s_median=_median(
            [t.first_token_s - t.submitted_s for t in turns if t.first_token_s is not None]
        ),
        tpot_s_median=_median([tpot for turn in turns if (tpot := _tpot(turn)) is not None]),
        num_tokens=sum(len(turn.tokens) for turn in turns),
        num_drafted=sum(turn.num_drafted for turn in turns),
        num_accepted=sum(turn.num_accepted for turn in turns),
        tokens_per_step=_tokens_per_step(turns),
        accepted_by_kind=_accepted_by_kind(run.tasks),
        peak_bytes=run.bytes_by_category,
        resident_bytes=run.resident_bytes,
    )


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _tpot(turn: TurnResult) -> float | None:
    """(t_last − t_first) / (tokens − 1)."""
    if turn.first_token_s is None or turn.last_token_s is None or len(turn.tokens) < 2:
        return None
    return (turn.last_token_s - turn.first_token_s) / (len(turn.tokens) - 1)


def _tokens_per_step(turns: Sequence[TurnResult]) -> float | None:
    """Tokens from verify steps, by step; the first token of a turn comes from its prompt."""
    steps = sum(turn.num_steps for turn in turns)
    return sum(max(len(turn.tokens) - 1, 0) for turn in turns) / steps if steps else None


def _accepted_by_kind(tasks: Sequence[TaskRun]) -> dict[str, tuple[int, int]]:
    totals: dict[str, tuple[int, int]] = {}
    for task in tasks:
        drafted, accepted = totals.get(task.task.kind, (0, 0))
        drafted += sum(turn.num_drafted for turn in task.turns)
        totals[task.task.kind] = drafted, accepted + sum(turn.num_accepted for turn in task.turns)
    return totals
