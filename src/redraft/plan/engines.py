"""From a model and a setting to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from redraft.errors import ConfigError
from redraft.plan import llamacpp, pool, sglang, vllm
from redraft.plan.draft import check_drafter, drafter_notes
from redraft.plan.settings import ENGINES, EngineName, PlanSettings
from redraft.plan.spec import PlanSpec
from redraft.plan.term import Parts, Plan

_PARTS: dict[EngineName, Callable[[PlanSpec, PlanSettings], Parts]] = {
    "redraft": pool.plan_parts,
    "llama.cpp": llamacpp.plan_parts,
    "vllm": vllm.plan_parts,
    "sglang": sglang.plan_parts,
}


def plan(spec: PlanSpec, settings: PlanSettings) -> Plan:
    """What `settings.engine` holds for this model. Reads and allocates nothing.

    Raises `ConfigError` where the model cannot be run like that: no MTP layers to draft with, heads that do
    not divide over the devices, a recurrence without records.
    """
    check_drafter(spec, settings)
    terms, printed, notes = _PARTS[settings.engine](spec, settings)
    notes = [*notes, *drafter_notes(spec, settings), *_left_out(spec, settings)]
    if spec.remark:
        notes.append(f"about {spec.name}: {spec.remark}")
    if not spec.weights:
        notes.append(
            "the weights are not counted: no file to measure; give their size or type with --weights"
        )
    return Plan(
        spec=spec,
        settings=settings,
        terms=tuple(term for term in terms if term.num_bytes),
        printed=printed,
        notes=tuple(notes),
    )


def _left_out(spec: PlanSpec, settings: PlanSettings) -> list[str]:
    """Parts of a model for which an engine's formula is not known."""
    notes = []
    if settings.engine != "llama.cpp" and any(layer.extra_floats for layer in spec.layers):
        notes.append("the state of per-layer n-gram embeddings is not counted on this engine")
    if settings.engine in ("redraft", "vllm") and any(layer.indexer_dim for layer in spec.layers):
        notes.append("the rows of sparse-attention indexers are not counted on this engine")
    return notes


def compare_engines(spec: PlanSpec, settings: PlanSettings) -> tuple[list[Plan], list[str]]:
    """The same request on every engine, and for each engine that cannot serve it a line that says why.

    Slots, context, depth and drafter are kept; policy and KV type are each other engine's own default.
    """
    plans, remarks = [], []
    for engine in ENGINES:
        try:
            own = engine == settings.engine
            other = settings if own else replace(settings, engine=engine, policy=None, kv_type=None)
            plans.append(plan(spec, other))
        except ConfigError as error:
            if engine == settings.engine:
                raise
            remarks.append(f"{engine} is left out: {error}")
    return plans, remarks


def compare_depths(spec: PlanSpec, settings: PlanSettings) -> list[Plan]:
    """The same engine at depth 0, 1, 3, … and the depth of `settings`."""
    depths = sorted({d for d in (0, 1, 3, 7, 15) if d < settings.depth} | {settings.depth})
    return [plan(spec, settings.at_depth(depth)) for depth in depths]
