"""What `redraft decide` prints and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from redraft.cli.json_file import write_json
from redraft.cli.tables import bytes_table
from redraft.decide import ArmPlan, RunResult, Summary, Verdict, judge, summarise
from redraft.decide.summary import reference_texts
from redraft.decide.verdict import as_mapping
from redraft.state import format_bytes


def print_plan(console: Console, plan: ArmPlan, setting: Mapping[str, Any]) -> None:
    """What will be measured, before it is."""
    config = plan.speculation.config
    console.print(
        f"{setting['model']}, draft {setting['draft']}, depth {config.depth}, {config.policy}; "
        f"{setting['num_tasks']} tasks, context {config.max_context}, {config.num_slots} slots",
        soft_wrap=True,
    )
    for arm in plan.arms:
        console.print(f"  {arm.name:<15} {arm.config.num_slots:>3} slots  {format_bytes(arm.num_bytes):>12}")
    if plan.extra_slots == 0:
        console.print(
            f"  speculation's {format_bytes(plan.extra_bytes)} buy no further slot "
            f"({format_bytes(plan.slot_bytes)}): 'more slots' repeats the first arm and shows the noise",
            soft_wrap=True,
        )


def report(
    console: Console,
    plan: ArmPlan,
    alone: list[RunResult],
    full: list[RunResult],
    *,
    whole: bool,
    json_out: Path | None,
    setting: dict[str, Any],
) -> None:
    """Print tables and verdict, write the JSON file; exit with 1 if texts differ, 130 if interrupted."""
    reference = reference_texts(alone[0])
    summaries = [summarise(run, reference) for run in (*alone, *full)]
    verdict = judge(plan, alone, full) if whole else None
    _print_summaries(console, summaries)
    by_arm = {summary.arm: summary.peak_bytes for summary in summaries}
    console.print(bytes_table("bytes by buffer", by_arm))
    if verdict is None:
        console.print("[yellow]interrupted:[/] no verdict from part of the queue")
    else:
        console.print(f"[bold]verdict: {verdict.decision}[/] — {verdict.reason}", soft_wrap=True)
    if json_out is not None:
        write_json(json_out, _figures(setting, plan, summaries, verdict))
    if verdict is None:
        raise typer.Exit(130)
    if any("text differs" in summary.failures for summary in summaries):
        Console(stderr=True).print("[red]texts differ between arms:[/] run 'redraft verify' and report this")
        raise typer.Exit(1)


_COLUMNS: dict[str, Callable[[Summary], str]] = {
    "arm": lambda s: s.arm,
    "conc.": lambda s: str(s.concurrency),
    "done": lambda s: f"{s.num_completed}/{s.num_tasks}",
    "tasks/h": lambda s: f"{s.tasks_per_hour:.0f}",
    "task s": lambda s: _number(s.task_s_median, 2),
    "p90": lambda s: _number(s.task_s_p90, 2),
    "TTFT s": lambda s: _number(s.ttft_s_median, 2),
    "TPOT ms": lambda s: _number(None if s.tpot_s_median is None else 1000 * s.tpot_s_median, 1),
    "drafted": lambda s: str(s.num_drafted),
    "accepted": lambda s: (
        f"{s.num_accepted}" + (f" ({s.num_accepted / s.num_drafted:.0%})" if s.num_drafted else "")
    ),
    "tok/step": lambda s: _number(s.tokens_per_step, 2),
}
_LEFT_OUT_FIRST = ("p90", "TTFT s", "drafted")  # where a terminal is narrow


def summary_table(summaries: Sequence[Summary], width: int) -> Table:
    """A row for each run; in a narrow terminal fewer columns, each whole."""
    table = _table(summaries, list(_COLUMNS))
    wide = Console(width=1000)
    if wide.measure(table).maximum <= width:
        return table
    return _table(summaries, [head for head in _COLUMNS if head not in _LEFT_OUT_FIRST])


def _table(summaries: Sequence[Summary], heads: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for summary in summaries:
        table.add_row(*(_COLUMNS[head](summary) for head in heads))
    return table


def _print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    console.print(summary_table(summaries, console.width))
    for s in summaries:
        for cause, count in s.failures.items():
            console.print(f"  {s.arm}, concurrency {s.concurrency}: {count} × {cause}", style="yellow")
    resident = max(s.resident_bytes for s in summaries)
    console.print(
        f"resident set of the process, with the state of all arms: {format_bytes(resident)}", style="dim"
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _figures(
    setting: dict[str, Any], plan: ArmPlan, summaries: Sequence[Summary], verdict: Verdict | None
) -> dict[str, Any]:
    return {
        **setting,
        "arms": [
            {"name": arm.name, "slots": arm.config.num_slots, "bytes": arm.num_bytes} for arm in plan.arms
        ],
        "extra_bytes": plan.extra_bytes,
        "slot_bytes": plan.slot_bytes,
        "extra_slots": plan.extra_slots,
        "runs": [asdict(summary) for summary in summaries],
        "verdict": None if verdict is None else as_mapping(verdict),
    }
