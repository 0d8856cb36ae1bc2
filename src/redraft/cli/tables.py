"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from redraft.state import format_bytes


def bytes_table(title: str, columns: Mapping[str, Mapping[str, int]]) -> Table:
    """Bytes by category, a column for each mapping, with totals."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("buffer")
    for name in columns:
        table.add_column(name, justify="right")
    categories = dict.fromkeys(category for column in columns.values() for category in column)
    for category in categories:
        table.add_row(category, *(format_bytes(column.get(category, 0)) for column in columns.values()))
    table.add_row("total", *(format_bytes(sum(column.values())) for column in columns.values()), style="bold")
    return table
