"""What llama.cpp allocates, by the formulas of its own code (read in October 2026).

Recurrent memory (`llama_hparams::n_embd_r`, `n_embd_s`, `llama_memory_recurrent`): float32 rows, one a slot
and one more for each draft token that may be rolled back. KV (`llama_kv_cache`): cells × heads × width, keys
only for latent attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from redraft.plan.draft import weight_terms
from redraft.plan.settings import HEAD_DRAFTERS, PlanSettings
from redraft.plan.sizes import MIB, TYPE_BYTES, mib, pad
from redraft.plan.spec import PlanLayer, PlanSpec, conv_floats, state_floats
from redraft.plan.term import Parts, Term

# Architectures for which `llm_arch_supports_rs_rollback` says yes; all others roll back by host checkpoints.
RS_ROLLBACK = frozenset({
    "kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h", "nemotron_h_moe",
    "lfm2", "lfm2moe", "bailingmoe3",
})  # fmt: skip

CELL_PAD = 256
MICRO_BATCH = 512  # -ub
CONTEXT_CHECKPOINTS = 32  # --ctx-checkpoints, a slot
CACHE_RAM_BYTES = 8192 * MIB  # --cache-ram
DRAFT_KV_TYPE = "f16"  # --spec-draft-type-k/-v


def rollback_planes(spec: PlanSpec, settings: PlanSettings) -> tuple[int, str]:
    """`n_rs_seq`, and why it is less than the depth where it is."""
    if settings.depth == 0 or not spec.recurrent:
        return 0, ""
    if settings.rollback == "checkpoint":
        return 0, "policy 'checkpoint': rejected drafts are undone from a copy in host memory"
    if spec.architecture not in RS_ROLLBACK:
        return 0, (
            f"llama.cpp keeps no rollback planes for architecture '{spec.architecture}': "
            "rejected drafts are undone from a copy in host memory"
        )
    if settings.drafter not in (None, *HEAD_DRAFTERS):
        return 0, (
            f"llama.cpp keeps no rollback planes for drafter '{settings.drafter}' (only for "
            f"{', '.join(HEAD_DRAFTERS)}): rejected drafts are undone from a copy in host memory"
        )
    return settings.depth, ""


def recurrent_bytes(spec: PlanSpec, first: int = 0, count: int | None = None) -> tuple[int, int, int]:
    """R, S and P of one sequence in one plane, over all recurrent layers or `count` of them from `first`.

    Devices share these by whole layers.
    """
    layers = [layer for layer in spec.layers if layer.state.recurrent is not None or layer.extra_floats]
    chosen = layers[first:] if count is None else layers[first : first + count]
    specs = [layer.state.recurrent for layer in chosen if layer.state.recurrent is not None]
    return (
        4 * sum(conv_floats(layer) for layer in specs),
        4 * sum(state_floats(layer) for layer in specs),
        4 * sum(layer.extra_floats for layer in chosen),
    )


def num_cells(settings: PlanSettings, window: int = 0) -> int:
    """KV cells of all streams, padded; with a sliding window, its cells and a micro-batch."""
    streams = 1 if settings.unified_kv else settings.slots
    tokens = settings.slots * settings.context if settings.unified_kv else settings.context
    cells = pad(tokens, CELL_PAD)
    if window:
        slots = settings.slots if settings.unified_kv else 1
        cells = pad(min(cells, window * slots + MICRO_BATCH), CELL_PAD)
    return streams * cells


def kv_bytes(layers: Sequence[PlanLayer], settings: PlanSettings, kv_type: str) -> tuple[int, int, int]:
    """K, V and indexer rows of `layers` over all cells. Latent layers have keys only."""
    number = TYPE_BYTES[kv_type]
    keys = values = indexer = Fraction(0)
    for layer in layers:
        if layer.state.attention is None:
            continue
        spec, cells = layer.state.attention, num_cells(settings, layer.window)
        keys += cells * spec.num_kv_heads * spec.key_dim * number
        values += 0 if spec.latent else cells * spec.num_kv_heads * spec.value_dim * number
        indexer += cells * layer.indexer_dim * 2
    return int(keys), int(values), int(indexer)


def plan_parts(spec: PlanSpec, settings: PlanSettings) -> Parts:
    """All terms of one llama-server."""
    planes, why_none = rollback_planes(spec, settings)
    conv, state, extra = (settings.slots * part for part in recurrent_bytes(spec))
    keys, values, indexer = kv_bytes(spec.layers, settings, settings.kv)
    terms = [
        *weight_terms(spec, settings),
        Term("K cache", "KV", keys, "cells × heads × key width × type, layer by layer"),
        Term("V cache", "KV", values, "cells × heads × value width × type; none for latent attention"),
        _indexer_term(spec, indexer),
        Term("S, recurrent state", "recurrent state", state, "n_embd_s × slots × 4 B"),
        Term("R, conv windows", "conv", conv, "n_embd_r × slots × 4 B"),
        Term(
            "P, n-gram state",
            "recurrent state",
            extra,
            "(kernel − 1) × n-grams × streams × width × slots × 4 B",
        ),
        Term("rollback planes", "rollback", planes * (conv + state + extra), "n_rs_seq × (R + S + P)"),
        *draft_terms(spec, settings),
        _compute_term(spec, settings, planes),
        *_host_terms(settings, conv + state + extra, planes),
    ]
    return Parts(terms, _printed(spec, settings, planes), [why_none] if why_none else [])


def _indexer_term(spec: PlanSpec, num_bytes: int) -> Term:
    formula = "cells × indexer width × 2 B"
    if spec.architecture == "qwen4exp":
        return Term("indexer cache", "KV", num_bytes, formula)
    basis = "every position kept; some models pool their indexer rows, which takes less"
    return Term("indexer cache", "KV", num_bytes, formula, exact=num_bytes == 0, basis=basis)


def draft_terms(spec: PlanSpec, settings: PlanSettings) -> list[Term]:
    """The draft context: one more KV cache over all cells, and a draft model's own recurrent rows."""
    draft = settings.draft_spec
    if settings.drafter == "mtp":
        layers, recurrent = spec.mtp_layers, (0, 0, 0)
    elif draft is not None:
        layers, recurrent = draft.layers, recurrent_bytes(draft)
    else:
        return []
    rows = sum(kv_bytes(layers, settings, DRAFT_KV_TYPE))
    name = "MTP context" if draft is None else "draft KV"
    return [
        Term(name, "draft KV", rows, "KV formula over the draft's layers at the full n_ctx, f16"),
        Term(
            "draft recurrent state",
            "draft state",
            settings.slots * sum(recurrent),
            "(n_embd_r + n_embd_s) × slots × 4 B; the draft context has n_rs_seq = 0",
        ),
    ]


def _compute_term(spec: PlanSpec, settings: PlanSettings, planes: int) -> Term:
    logits = 4 * MICRO_BATCH * (spec.vocab_size + spec.hidden_size)
    largest = max((conv_floats(layer) + state_floats(layer) for layer in spec.recurrent), default=0)
    outputs = 4 * settings.slots * (1 + planes) * largest
    return Term(
        "compute buffer",
        "compute",
        logits + outputs,
        "512 × (vocabulary + width) × 4 B + one layer's state outputs",
        exact=False,
        basis="gives the logged 304.00 MiB of a 7B model without recurrence; state outputs are not measured",
    )


def _host_terms(settings: PlanSettings, one_plane: int, planes: int) -> list[Term]:
    terms = [
        Term(
            "prompt cache",
            "prefix store",
            CACHE_RAM_BYTES,
            "--cache-ram",
            exact=False,
            basis="its limit, 8192 MiB by default",
            host=True,
        )
    ]
    if one_plane:
        terms.append(
            Term(
                "context checkpoints",
                "prefix store",
                CONTEXT_CHECKPOINTS * one_plane,
                "--ctx-checkpoints × slots × (R + S + P of one slot)",
                exact=False,
                basis="its limit, 32 a slot by default; grows with use",
                host=True,
            )
        )
    if one_plane and settings.depth and not planes:
        terms.append(
            Term("host checkpoints", "rollback", one_plane, "slots × (R + S + P of one slot)", host=True)
        )
    return terms


def _printed(spec: PlanSpec, settings: PlanSettings, planes: int) -> dict[str, str]:
    rows = settings.slots * (1 + planes)
    conv, state, extra = recurrent_bytes(spec)
    keys, values, indexer = kv_bytes(spec.layers, settings, settings.kv)
    printed = {
        "R_MiB": mib(conv * rows),
        "S_MiB": mib(state * rows),
        "RS_MiB": mib((conv + state + extra) * rows),
        "K_MiB": mib(keys),
        "V_MiB": mib(values),
        "KV_MiB": mib(keys + values),
    }
    if indexer:
        printed["indexer_KV_MiB"] = mib(indexer)
    if draft := sum(term.num_bytes for term in draft_terms(spec, settings) if term.group == "draft KV"):
        printed["draft_KV_MiB"] = mib(draft)
    return printed
