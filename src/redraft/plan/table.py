"""A plan in the terminal: its terms, and bars that compare it with others."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from redraft.plan.palette import MARKS
from redraft.plan.settings import PlanSettings
from redraft.plan.sizes import human, mib
from redraft.plan.solve import Frontier
from redraft.plan.term import Plan


def print_plan(console: Console, plan: Plan) -> None:
    """Terms with their formulas and accuracy, the total, and remarks."""
    console.print(f"{plan.spec.name} on {label(plan.settings)}", soft_wrap=True)
    console.print(terms_table(plan))
    if plan.settings.engine != "redraft":
        words = ", ".join(f"{name} {value}" for name, value in plan.printed.items())
        console.print(f"in the words of its own log: {words}", soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)


def label(settings: PlanSettings) -> str:
    """A configuration in one line."""
    speculation = f"depth {settings.depth}"
    if settings.depth:
        speculation += f" ({settings.rollback}{', ' + settings.drafter if settings.drafter else ''})"
    devices = f", one of {settings.tp} devices" if settings.tp > 1 else ""
    return (
        f"{settings.engine}: {settings.slots} slots × {settings.context} tokens, {speculation}, "
        f"KV {settings.kv}{devices}"
    )


def terms_table(plan: Plan) -> Table:
    """One row a term; what lies in host memory beside the device comes last."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("term", "left"), ("MiB", "right"), ("accuracy", "left"), ("formula", "left")):
        table.add_column(name, justify=justify, no_wrap=name != "formula")  # type: ignore[arg-type]
    for host in (False, True):
        for term in plan.terms:
            if term.host == host:
                accuracy = "exact" if term.exact else "estimate"
                formula = term.formula if term.exact else f"{term.formula} ({term.basis})"
                table.add_row(
                    f"{'host: ' if host else ''}{term.name}", mib(term.num_bytes), accuracy, formula
                )
        if not host:
            table.add_row("total", mib(plan.total_bytes), "", human(plan.total_bytes), style="bold")
    return table


def bars(plans: Sequence[Plan], labels: Sequence[str], width: int) -> list[Text]:
    """Stacked bars by group, scaled to the largest total.

    Weights dwarf everything else where they are large, and are the same everywhere: they are left out, and
    the figure beside a bar says how much memory it stands for.
    """
    totals = [{g: n for g, n in plan.group_bytes().items() if g != "weights"} for plan in plans]
    largest = max((sum(groups.values()) for groups in totals), default=0) or 1
    room = max(10, width - max(len(name) for name in labels) - 14)
    lines = []
    for name, groups in zip(labels, totals, strict=True):
        line = Text(f"{name:<{max(len(n) for n in labels)}} ")
        drawn = passed = 0
        for group, count in groups.items():
            passed += count
            cells = round(passed / largest * room) - drawn
            drawn += cells
            line.append(MARKS[group].letter * cells, style=f"{MARKS[group].colour} reverse")
        line.append(f"{'':{room - drawn}} {human(sum(groups.values())):>10}")
        lines.append(line)
    used = [group for group in MARKS if any(group in groups for groups in totals)]
    lines.append(Text("without weights: " + ", ".join(f"{MARKS[group].letter} {group}" for group in used)))
    return lines


def frontier_table(found: Frontier) -> Table:
    """One row a point."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("depth", "context", "slots", "total", "of usable"):
        table.add_column(name, justify="right")
    for point in found.points:
        share = 100 * point.total_bytes / found.usable_bytes
        table.add_row(
            str(point.depth), str(point.context), str(point.slots), human(point.total_bytes), f"{share:.0f} %"
        )
    return table
