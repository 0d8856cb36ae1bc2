"""What `redraft plan` prints, and the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from redraft.plan import Frontier, Plan, Trade, plan
from redraft.plan.launch import launch_line
from redraft.plan.sizes import human, mib
from redraft.plan.solve import most_slots, trade_sentence
from redraft.plan.table import bars, frontier_table, label, print_plan

if TYPE_CHECKING:
    from redraft.plan.check import Checked


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything that was worked out. `plans` are those compared, `labels` their names, `remarks` say who is
    missing. `frontier` is there with a budget; `solve` shows it all; `checked` is there with `--check`.
    """

    model: str
    draft: str | None
    chosen: Plan
    plans: list[Plan]
    labels: list[str]
    remarks: list[str]
    trades: list[Trade]
    frontier: Frontier | None
    solve: bool
    checked: Checked | None


def as_mapping(answer: Answer) -> dict[str, Any]:
    """Plain values: the plan's own, and what was asked for beside it."""
    result = answer.chosen.to_json()
    result["comparison"] = [
        {
            "engine": item.settings.engine,
            "depth": item.settings.depth,
            "total_MiB": mib(item.total_bytes),
            "groups": item.group_bytes(),
        }
        for item in answer.plans
    ]
    if answer.trades:
        result["trade"] = {
            "sentence": trade_sentence(answer.trades),
            "engines": {
                item.engine: {"cost_bytes": item.cost_bytes, "more_slots": item.more_slots}
                for item in answer.trades
            },
        }
    if answer.frontier is not None:
        result["frontier"] = vars(answer.frontier) | {
            "points": [vars(point) for point in answer.frontier.points]
        }
    if answer.checked is not None:
        result["check"] = vars(answer.checked)
    return result


def print_answer(console: Console, answer: Answer) -> None:
    """The plan, the bars, the trade in words, what fits, launch lines, and the check."""
    print_plan(console, answer.chosen)
    console.print()
    for line in bars(answer.plans, answer.labels, min(console.width, 110)):
        console.print(line, soft_wrap=True)
    for remark in answer.remarks:
        console.print(f"note: {remark}", soft_wrap=True)
    console.print()
    if answer.trades:
        console.print(trade_sentence(answer.trades), soft_wrap=True)
    if answer.frontier is not None:
        _print_fit(console, answer.chosen, answer.frontier, solve=answer.solve)
    _print_launch_lines(console, answer)
    if answer.checked is not None:
        _print_check(console, answer.chosen, answer.checked)


def _print_fit(console: Console, chosen: Plan, found: Frontier, *, solve: bool) -> None:
    fits = chosen.total_bytes <= found.usable_bytes
    console.print(
        f"budget {human(found.budget_bytes)}, usable {human(found.usable_bytes)} after a safety margin of "
        f"{found.margin_percent:g} %: this plan's {human(chosen.total_bytes)} "
        f"{'fit' if fits else 'do not fit'}",
        soft_wrap=True,
    )
    if not solve:
        return
    if not found.points:
        console.print("nothing fits beside the weights, not even one slot")
        return
    console.print(f"what fits on {chosen.settings.engine} (the most slots of each context and depth):")
    console.print(frontier_table(found))


def _print_launch_lines(console: Console, answer: Answer) -> None:
    """One line an engine: as asked for or, when solving, with the most slots that fit."""
    own = answer.chosen.settings.engine
    shown = [answer.chosen, *(item for item in answer.plans if item.settings.engine != own)]
    if answer.solve and answer.frontier is not None:
        shown = _fitted(console, shown, answer.frontier.usable_bytes)
    console.print()
    for item in shown:
        line = launch_line(item, answer.model, answer.draft)
        console.print(f"{item.settings.engine}: {line}", soft_wrap=True, markup=False)


def _fitted(console: Console, plans: list[Plan], usable_bytes: int) -> list[Plan]:
    fitted = []
    for item in plans:
        if slots := most_slots(item.spec, item.settings, usable_bytes):
            fitted.append(plan(item.spec, replace(item.settings, slots=slots)))
        else:
            console.print(f"{item.settings.engine}: not one slot fits at this depth and context")
    return fitted


def _print_check(console: Console, chosen: Plan, found: Checked) -> None:
    planned = sum(found.state_planned.values())
    for line in (
        f"\nchecked by loading {chosen.spec.name} ({label(chosen.settings)})",
        f"  weights   in the file {mib(found.weights_in_file)} MiB, loaded {mib(found.weights_loaded)} MiB",
        f"  state     planned {mib(planned)} MiB, allocated {mib(found.state_allocated)} MiB "
        f"({found.state_allocated - planned} bytes of cursors more)",
        f"  resident  grew by {mib(found.resident_growth)} MiB for {mib(found.weights_loaded + planned)} MiB "
        f"loaded and planned, from {mib(found.resident_before)} MiB before",
    ):
        console.print(line, soft_wrap=True)
