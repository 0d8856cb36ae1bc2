"""What this engine allocates: the very buffers that `state_buffers` declares, so a plan cannot disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

from redraft.config import EngineConfig, KVType, PolicyName
from redraft.errors import ModelFileError
from redraft.models import family_for_gguf
from redraft.plan.draft import weight_terms
from redraft.plan.settings import PlanSettings
from redraft.plan.spec import PlanSpec
from redraft.plan.term import Parts, Term
from redraft.state import DRAFT_CATEGORY, Buffer, bytes_by_category, state_buffers


def engine_config(settings: PlanSettings) -> EngineConfig:
    """The engine's own configuration; its limits hold too (`ConfigError`)."""
    return EngineConfig(
        num_slots=settings.slots,
        max_context=settings.context,
        depth=settings.depth,
        policy=cast(PolicyName, settings.rollback),
        kv_type=cast(KVType, settings.kv),
    )


def is_supported(spec: PlanSpec) -> bool:
    """Whether the engine runs this architecture today."""
    try:
        family_for_gguf(spec.architecture)
    except ModelFileError:
        return False
    return True


def plan_parts(spec: PlanSpec, settings: PlanSettings) -> Parts:
    """All terms: weights, the pool's buffers, a draft model's, and scratch of one step."""
    config = engine_config(settings)
    terms = [
        *(_as_loaded(term) for term in weight_terms(spec, settings)),
        *_state_terms(spec, config),
        *_draft_terms(settings, config),
        _compute_term(spec, config),
    ]
    notes = []
    if not is_supported(spec):
        terms = [_as_estimate(term, spec.architecture) for term in terms]
        notes.append(
            f"redraft does not run '{spec.architecture}' yet: its figures are what its policies would hold"
        )
    if settings.drafter in ("mtp", "eagle3", "dflash", "dspark"):
        notes.append(f"redraft has no '{settings.drafter}' drafter: it would draft with n-grams or a model")
    printed = bytes_by_category(state_buffers(spec.model_spec(), config))
    return Parts(terms, {f"{name} bytes": str(count) for name, count in printed.items()}, notes)


def _as_loaded(term: Term) -> Term:
    """Weights other than float32 take their size on disk only where the ops keep them packed."""
    if not term.exact or term.name.endswith(" F32"):
        return term
    return replace(
        term, exact=False, basis="about their size in the file; the reference ops expand them to float32"
    )


def _as_estimate(term: Term, architecture: str) -> Term:
    basis = f"the engine does not run '{architecture}' yet"
    return replace(term, exact=False, basis=term.basis if not term.exact else basis)


def _state_terms(spec: PlanSpec, config: EngineConfig) -> list[Term]:
    """Buffers by category. What a category needs beyond depth 0 is the price of rollback."""
    held = bytes_by_category(state_buffers(spec.model_spec(), config))
    plain = bytes_by_category(state_buffers(spec.model_spec(), replace(config, depth=0)))
    source = "state_buffers"
    return [
        Term("KV", "KV", held.get("KV", 0), f"{source}: slots × context × heads × widths × type"),
        Term("state", "recurrent state", plain.get("recurrent state", 0), f"{source}: slots × HV·K·V × 4 B"),
        Term("conv windows", "conv", plain.get("conv", 0), f"{source}: slots × (W − 1)·C × 4 B"),
        Term(
            "state planes", "rollback", held.get("recurrent state", 0) - plain.get("recurrent state", 0),
            f"{source}: snapshot, depth further states",
        ),
        Term(
            "conv widening", "rollback", held.get("conv", 0) - plain.get("conv", 0),
            f"{source}: depth columns (replay) or windows (snapshot)",
        ),
        Term(
            "records" if config.policy == "replay" else "copies", "rollback", held.get("rollback", 0),
            f"{source}: depth + 1 records of decay, k and u (replay), or a copy of the state (checkpoint)",
        ),
        Term("scratch", "scratch", held.get("scratch", 0), f"{source}: the last token's effect"),
    ]  # fmt: skip


def _draft_terms(settings: PlanSettings, config: EngineConfig) -> list[Term]:
    """A draft model has a pool of its own, of the same configuration."""
    if settings.draft_spec is None:
        return []
    held = bytes_by_category(_renamed(state_buffers(settings.draft_spec.model_spec(), config)))
    return [
        Term(f"{category} pool", category, count, "state_buffers of the draft model")
        for category, count in held.items()
    ]


def _renamed(buffers: Iterable[Buffer]) -> list[Buffer]:
    return [buffer._replace(category=DRAFT_CATEGORY[buffer.category]) for buffer in buffers]


def _compute_term(spec: PlanSpec, config: EngineConfig) -> Term:
    verified = config.num_slots * (1 + config.depth)
    rows = max(config.prefill_chunk, verified)
    return Term(
        "arrays of a step",
        "compute",
        4 * (8 * rows * spec.hidden_size + verified * spec.vocab_size),
        "(8 × rows × width + verified rows × vocabulary) × 4 B",
        exact=False,
        basis="a rule of thumb for the live arrays of one layer, and the logits",
    )
