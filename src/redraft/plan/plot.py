"""The bars as a picture file. matplotlib is loaded only here, and only when a picture is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from redraft.errors import ConfigError
from redraft.plan.palette import MARKS
from redraft.plan.sizes import GIB, human
from redraft.plan.term import Plan

FORMATS = (".svg", ".png", ".pdf")


def plot(plans: Sequence[Plan], labels: Sequence[str], path: Path, title: str) -> None:
    """Write stacked bars by group, one a plan, without the weights, as SVG, PNG or PDF.

    Raises `ConfigError` where matplotlib is missing, the ending is none of these, or the file cannot be
    written.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"'{path}': a picture's name must end in {', '.join(FORMATS)}")
    figure = _figure(plans, labels, title)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror or error}") from None


def _figure(plans: Sequence[Plan], labels: Sequence[str], title: str) -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415  (an optional extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'redraft[plot]'") from None
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "font.size": 11,
        "hatch.linewidth": 0.8,
        "hatch.color": "white",
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(9, 1.9 + 0.62 * len(plans)), dpi=144, layout="constrained")
        _draw(figure.add_subplot(), plans, labels)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left", ncols=5, frameon=False, fontsize=10)
        figure.canvas.draw()
    return figure


def _draw(axes: Any, plans: Sequence[Plan], labels: Sequence[str]) -> None:
    totals = [{g: n for g, n in plan.group_bytes().items() if g != "weights"} for plan in plans]
    left = [0.0] * len(plans)
    for group, mark in MARKS.items():
        widths = [groups.get(group, 0) / GIB for groups in totals]
        if any(widths):
            axes.barh(
                range(len(plans)), widths, left=left, height=0.66, label=group,
                color=mark.colour, hatch=mark.hatch, edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, (end, groups) in enumerate(zip(left, totals, strict=True)):
        axes.annotate(
            f"{human(sum(groups.values()))}",
            (end, row),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(plans)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left, default=0) * 1.14 or 1)
    axes.set_xlabel("GiB, without weights")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
