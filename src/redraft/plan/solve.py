"""What fits a budget, and what speculation's memory would buy instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from redraft.errors import ConfigError
from redraft.plan.engines import plan
from redraft.plan.settings import DEFAULTS, MAX_SLOTS, PlanSettings
from redraft.plan.sizes import human
from redraft.plan.spec import PlanSpec
from redraft.plan.term import Plan

MARGIN_PERCENT = 8.0
ENGINE_MAX_SLOTS = {"redraft": 4096}


@dataclass(frozen=True)
class Point:
    """A configuration that fits, with the most slots of its context and depth."""

    slots: int
    context: int
    depth: int
    total_bytes: int


@dataclass(frozen=True)
class Frontier:
    """All points worth choosing: more of one means less of another. `usable_bytes` is the budget less the
    safety margin.
    """

    budget_bytes: int
    margin_percent: float
    usable_bytes: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Trade:
    """What depth costs at given slots, and how many more slots the same memory holds without it."""

    engine: str
    depth: int
    cost_bytes: int
    more_slots: int

    def words(self) -> str:
        """The clause for a sentence, such as `12.1 GiB on llama.cpp: 27 more slots without it`."""
        where = "here" if self.engine == "redraft" else f"on {self.engine}"
        if not self.cost_bytes:
            return f"nothing {where}"
        slots = "1 slot" if self.more_slots == 1 else f"{self.more_slots} more slots without it"
        return f"{human(self.cost_bytes)} {where}: {slots if self.more_slots else 'less than a slot'}"


def most_slots(
    spec: PlanSpec,
    settings: PlanSettings,
    limit_bytes: int,
    measure: Callable[[Plan], int] = lambda found: found.total_bytes,
) -> int:
    """The largest number of slots of which `measure` is within the limit; 0 if not even one fits."""

    def fits(slots: int) -> bool:
        setting = replace(settings, slots=slots, state_pool=None, kv_tokens=None)
        return measure(plan(spec, setting)) <= limit_bytes

    return _last_true(fits, ENGINE_MAX_SLOTS.get(settings.engine, MAX_SLOTS)) if fits(1) else 0


def _held_bytes(found: Plan) -> int:
    """Memory that stays: without the arrays of a step, which are an estimate."""
    return found.total_bytes - found.group_bytes().get("compute", 0)


def _last_true(holds: Callable[[int], bool], highest: int) -> int:
    """The largest n up to `highest` for which `holds`, which holds for 1 and once false stays false."""
    low, high = 1, 2
    while high <= highest and holds(high):
        low, high = high, high * 2
    high = min(high, highest + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def trade(spec: PlanSpec, settings: PlanSettings) -> Trade:
    """Compare `settings` with the same slots at depth 0, and see how many more slots its memory would hold.

    The drafter's own memory counts as a cost of speculation; compute buffers, which are estimates, do not.
    """
    without = settings.at_depth(0)
    spent = _held_bytes(plan(spec, settings))
    cost = spent - _held_bytes(plan(spec, without))
    more = most_slots(spec, without, spent, _held_bytes) - settings.slots
    return Trade(settings.engine, settings.depth, cost, max(0, more))


def trade_sentence(trades: list[Trade]) -> str:
    """One line for several engines, the costliest first."""
    ordered = sorted(trades, key=lambda item: -item.cost_bytes)
    return f"depth {ordered[0].depth} costs " + "; ".join(item.words() for item in ordered)


def frontier(
    spec: PlanSpec, settings: PlanSettings, budget_bytes: int, margin_percent: float = MARGIN_PERCENT
) -> Frontier:
    """The best slots for each context (a quarter to four times the one asked for) and depth (0 to the one
    asked for) within the budget.

    Raises `ConfigError` for a margin out of range and where the weights alone exceed what is usable.
    """
    if not 0 <= margin_percent < 100:
        raise ConfigError(f"the safety margin must be 0 to below 100 %, not {margin_percent}")
    usable = int(budget_bytes * (100 - margin_percent) / 100)
    _require_weights_fit(spec, settings, budget_bytes, usable)
    points = [
        Point(slots, context, depth, plan(spec, replace(setting, slots=slots)).total_bytes)
        for depth in _depths(settings)
        for context in _contexts(spec, settings)
        for setting in [replace(settings.at_depth(depth), context=context)]
        if (slots := most_slots(spec, setting, usable))
    ]
    return Frontier(
        budget_bytes, margin_percent, usable, tuple(p for p in points if not _is_beaten(p, points))
    )


def _require_weights_fit(spec: PlanSpec, settings: PlanSettings, budget: int, usable: int) -> None:
    weights = sum(count for group, count in plan(spec, settings).group_bytes().items() if "weights" in group)
    if weights > usable:
        raise ConfigError(
            f"a budget of {human(budget)} leaves {human(usable)} after the margin, but weights take "
            f"{human(weights)}; use a larger budget, smaller weights or more devices (--tp)"
        )


def _depths(settings: PlanSettings) -> list[int]:
    return sorted({d for d in (0, 1, 3, 7) if d < settings.depth} | {settings.depth})


def _contexts(spec: PlanSpec, settings: PlanSettings) -> list[int]:
    asked = settings.context
    wanted = {asked // 4, asked // 2, asked, asked * 2, asked * 4}
    lowest = min(asked, DEFAULTS.max_context, 256)
    return sorted(c for c in wanted if c == asked or lowest <= c <= spec.max_context)


def _is_beaten(point: Point, points: list[Point]) -> bool:
    """Whether another point has as much of everything and more of something."""
    return any(
        other.slots >= point.slots
        and other.context >= point.context
        and other.depth >= point.depth
        and (other.slots, other.context, other.depth) != (point.slots, point.context, point.depth)
        for other in points
    )
