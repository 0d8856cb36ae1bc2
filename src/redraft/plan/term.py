"""A plan: terms of memory, each with the name of its formula and how far it can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redraft.plan.settings import PlanSettings
from redraft.plan.sizes import mib
from redraft.plan.spec import PlanSpec

# In the order of tables and bars.
GROUPS = (
    "weights",
    "KV",
    "recurrent state",
    "conv",
    "rollback",
    "page padding",
    "prefix store",
    "draft weights",
    "draft KV",
    "draft state",
    "scratch",
    "compute",
)


@dataclass(frozen=True)
class Term:
    """One amount of memory. `exact`: the engine allocates these bytes; else `basis` says what the estimate
    rests on. `host`: in host memory, outside a device's budget.
    """

    name: str
    group: str
    num_bytes: int
    formula: str
    exact: bool = True
    basis: str = ""
    host: bool = False

    def __post_init__(self) -> None:
        assert self.group in GROUPS, f"unknown group {self.group}"
        assert self.exact or self.basis, f"estimate '{self.name}' needs a basis"


class Parts(NamedTuple):
    """What an engine's formulas give: terms, figures as its own log prints them, and remarks."""

    terms: list[Term]
    printed: dict[str, str]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one configuration of one engine holds. `printed` has figures in the engine's own words and
    rounding, to be compared with its log.
    """

    spec: PlanSpec
    settings: PlanSettings
    terms: tuple[Term, ...]
    printed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Device memory (of one device, with tensor parallelism); an engine on the CPU has it in host RAM."""
        return sum(term.num_bytes for term in self.terms if not term.host)

    @property
    def host_bytes(self) -> int:
        """Memory beside it on the host, at most."""
        return sum(term.num_bytes for term in self.terms if term.host)

    def group_bytes(self) -> dict[str, int]:
        """Device memory by group, in the order of `GROUPS`."""
        return sum_by_group(term for term in self.terms if not term.host)

    def to_json(self) -> dict[str, Any]:
        """Plain values: bytes as numbers, MiB as text with two decimals."""
        settings = self.settings
        return {
            "model": self.spec.name,
            "architecture": self.spec.architecture,
            "source": self.spec.source,
            "engine": settings.engine,
            "slots": settings.slots,
            "context_per_slot": settings.context,
            "depth": settings.depth,
            "policy": settings.rollback,
            "drafter": settings.drafter,
            "kv_type": settings.kv,
            "tp": settings.tp,
            "total_bytes": self.total_bytes,
            "total_MiB": mib(self.total_bytes),
            "host_bytes": self.host_bytes,
            "printed": dict(self.printed),
            "terms": [_term_json(term) for term in self.terms],
            "notes": list(self.notes),
        }


def _term_json(term: Term) -> dict[str, Any]:
    return {
        "name": term.name,
        "group": term.group,
        "bytes": term.num_bytes,
        "MiB": mib(term.num_bytes),
        "formula": term.formula,
        "accuracy": "exact" if term.exact else "estimate",
        "basis": term.basis,
        "place": "host" if term.host else "device",
    }


def sum_by_group(terms: Iterable[Term]) -> dict[str, int]:
    """Bytes by group, without empty ones, in the order of `GROUPS`."""
    totals = dict.fromkeys(GROUPS, 0)
    for term in terms:
        totals[term.group] += term.num_bytes
    return {group: total for group, total in totals.items() if total}
