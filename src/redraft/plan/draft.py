"""Weights, as every engine holds them: the model's by encoding, and the drafter's."""

from __future__ import annotations

from redraft.errors import ConfigError
from redraft.plan.settings import PlanSettings
from redraft.plan.spec import PlanSpec
from redraft.plan.term import Term


def weight_terms(spec: PlanSpec, settings: PlanSettings) -> list[Term]:
    """The target's weights and the drafter's, for one of `settings.tp` devices."""
    terms = _terms(spec, settings.tp, mtp=False, group="weights")
    if settings.drafter == "mtp":
        terms += _terms(spec, settings.tp, mtp=True, group="draft weights")
    if settings.draft_spec is not None:
        terms += _terms(settings.draft_spec, settings.tp, mtp=False, group="draft weights")
    return terms


def _terms(spec: PlanSpec, tp: int, *, mtp: bool, group: str) -> list[Term]:
    basis = spec.weights_basis if tp == 1 else f"{spec.weights_basis}; an even share of {tp} devices"
    prefix = "draft weights" if group == "draft weights" else "weights"
    return [
        Term(
            f"{prefix} {part.encoding}",
            group,
            -(-part.num_bytes // tp),
            "sum of tensor sizes" if spec.weights_exact else "parameters × bits of the type",
            exact=spec.weights_exact and tp == 1,
            basis=basis,
        )
        for part in spec.weights
        if part.mtp == mtp
    ]


def check_drafter(spec: PlanSpec, settings: PlanSettings) -> None:
    """Raise `ConfigError` for a drafter that this model does not have."""
    if settings.drafter == "mtp" and not spec.mtp_layers:
        raise ConfigError(
            f"'{spec.name}' has no MTP layers; use --draft ngram, or a smaller model of the family"
        )


def drafter_notes(spec: PlanSpec, settings: PlanSettings) -> list[str]:
    """What is left out of a plan because it is not known of the drafter."""
    if settings.drafter == "mtp" and spec.weights and not spec.weight_bytes(mtp=True):
        return ["the weights of the MTP layers are not known apart from the model's"]
    if settings.drafter in ("eagle3", "dflash", "dspark"):
        return [f"the {settings.drafter} head's own weights and cache are not counted"]
    if settings.depth and settings.drafter is None:
        return ["no --draft named: the drafter's own weights and cache are not counted"]
    return []
