"""What `redraft verify` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from redraft.verify import CheckResult, Kind, ProbeResult

CLASSES = (Kind.STATE, Kind.TOKEN, Kind.DISTRIBUTION)


def print_setting(console: Console, setting: Mapping[str, Any]) -> None:
    """What will be checked, before it is."""
    drafter = "" if setting["draft"] is None else f", draft {setting['draft']}"
    console.print(
        f"{setting['model']}{drafter}: {setting['recurrent_layers']} recurrent layers, "
        f"depth {setting['depth']}, {setting['slots']} slots, {', '.join(setting['policies'])}; "
        f"{setting['operations']}",
        soft_wrap=True,
    )


def print_checks(console: Console, results: Sequence[CheckResult]) -> None:
    """A table of checks, what limits them, and the verdict."""
    table = _table("check", "", "compared", "s", "evidence")
    for result in results:
        mark = "[green]ok[/]" if result.passed else "[red]FAILED[/]"
        star = " *" if result.limit else ""
        table.add_row(
            result.name + star, mark, f"{result.num_comparisons:,}", f"{result.seconds:.1f}",
            escape(result.evidence),
        )  # fmt: skip
    console.print(table)
    for limit in dict.fromkeys(result.limit for result in results if result.limit):
        console.print(f"* trivial here: {limit}", style="dim", soft_wrap=True)
    failed = [result.name for result in results if not result.passed]
    compared = sum(result.num_comparisons for result in results)
    seconds = sum(result.seconds for result in results)
    if failed:
        console.print(f"[bold red]{len(failed)} of {len(results)} checks failed[/]: {', '.join(failed)}")
    else:
        text = f"{len(results)} checks passed[/]: {compared:,} tensors and outputs equal, byte for byte"
        console.print(f"[bold]{text} ({seconds:.0f} s)", soft_wrap=True)


def print_probes(console: Console, results: Sequence[ProbeResult]) -> None:
    """A table of probes, the findings by class, and the verdict."""
    table = _table("probe", "", "compared", "ties", "s", "evidence")
    for result in results:
        text = f"skipped: {result.skipped}" if result.skipped else result.evidence
        table.add_row(
            result.name, _mark(result), str(result.num_comparisons), str(result.ties + result.unknown),
            f"{result.seconds:.1f}", escape(text), style="dim" if result.skipped else "",
        )  # fmt: skip
    console.print(table)
    for kind in CLASSES:
        found = [(r.name, f.text) for r in results for f in r.findings if f.kind is kind]
        count = f"[red]{len(found)} finding{'s'[: len(found) - 1]}[/]" if found else "nothing found"
        console.print(f"[bold]{kind}[/]: {count}")
        for name, text in found[:5]:
            console.print(f"  {name}: {escape(text)}", soft_wrap=True)
        if len(found) > 5:
            console.print(f"  and {len(found) - 5} more: see --json", style="dim")
    ties, unknown = sum(r.ties for r in results), sum(r.unknown for r in results)
    if ties or unknown:
        console.print(
            f"{ties} differences at a near-tie, {unknown} without a known margin: no evidence of a fault",
            style="dim",
            soft_wrap=True,
        )


def _mark(result: ProbeResult) -> str:
    if result.skipped:
        return "-"
    if not result.findings:
        return "[green]ok[/]"
    return (
        "[red]" + ", ".join(kind for kind in CLASSES if any(f.kind is kind for f in result.findings)) + "[/]"
    )


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head in ("compared", "ties", "s") else "left")
    return table
