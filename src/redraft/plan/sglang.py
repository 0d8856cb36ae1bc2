"""What SGLang allocates (`memory_pool.py`): a pool of states for running requests and the prefix cache, with
one row to spare; and for each running request, again with one to spare, what speculation needs.
"""

from __future__ import annotations

from fractions import Fraction

from redraft.plan.draft import weight_terms
from redraft.plan.records import sglang_record_bytes
from redraft.plan.settings import PlanSettings
from redraft.plan.sizes import TYPE_BYTES, gib
from redraft.plan.spec import PlanLayer, PlanSpec, conv_floats, state_floats
from redraft.plan.term import Parts, Term
from redraft.plan.vllm import CONV_BYTES, attention_token_bytes, share

# `MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO`: states a running request, with the prefix cache on.
STATES_PER_REQUEST = 3
RING_RECORDS = 16  # --linear-replayssm-cache-len
PREFILL_TOKENS = 2048  # --chunked-prefill-size


def pool_size(settings: PlanSettings) -> int:
    """`max_mamba_cache_size`."""
    return STATES_PER_REQUEST * settings.slots if settings.state_pool is None else settings.state_pool


def kv_tokens(settings: PlanSettings) -> int:
    """`max_total_num_tokens`."""
    return settings.slots * settings.context if settings.kv_tokens is None else settings.kv_tokens


def state_type(settings: PlanSettings) -> Fraction:
    """Bytes a number of state: `--mamba-ssm-dtype`, float32 by default."""
    return Fraction(4) if settings.state_type is None else TYPE_BYTES[settings.state_type]


def row_bytes(spec: PlanSpec, settings: PlanSettings) -> tuple[int, int]:
    """State and one conv column of all recurrent layers, one row, on one device."""
    tp = settings.tp
    for layer in spec.recurrent:
        share(layer.num_value_heads, tp, "value heads")
        share(layer.conv_channels, tp, "conv channels")
    state = sum(state_floats(layer) // tp for layer in spec.recurrent) * state_type(settings)
    column = sum(conv_floats(layer, 1) // tp for layer in spec.recurrent) * CONV_BYTES
    return int(state), column


def kv_bytes(layers: tuple[PlanLayer, ...], settings: PlanSettings) -> int:
    """K and V of all tokens in the pool. Sliding windows are counted like full attention."""
    per_token = sum(
        attention_token_bytes(layer, settings) for layer in layers if layer.state.attention is not None
    )
    return kv_tokens(settings) * per_token


def plan_parts(spec: PlanSpec, settings: PlanSettings) -> Parts:
    """All terms of one device."""
    state, column = row_bytes(spec, settings)
    width = spec.recurrent[0].conv_width - 1 if spec.recurrent else 0
    running, cached = settings.slots + 1, pool_size(settings) - settings.slots
    sliding = any(layer.window for layer in spec.layers)
    terms = [
        *weight_terms(spec, settings),
        Term(
            "KV pool", "KV", kv_bytes(spec.layers, settings), "tokens × layers × heads × widths × type",
            exact=not sliding, basis="sliding windows are counted like full attention",
        ),
        Term(
            "indexer cache", "KV", kv_tokens(settings) * sum(layer.indexer_dim for layer in spec.layers) * 2,
            "tokens × indexer width × 2 B",
            exact=False, basis="llama.cpp's formula; no log of this engine was found to compare with",
        ),
        Term("recurrent state", "recurrent state", running * state, "(requests + 1) × state"),
        Term("conv windows", "conv", running * width * column, "(requests + 1) × (W − 1) columns × 2 B"),
        Term(
            "prefix cache states", "prefix store", cached * (state + width * column),
            "(max_mamba_cache_size − requests) × (state + conv)",
        ),
        *_speculation_terms(spec, settings),
        *_draft_terms(spec, settings),
        _compute_term(spec, settings),
    ]  # fmt: skip
    notes = ["three states a request: one runs, two serve the prefix cache"] if spec.recurrent else []
    return Parts(terms, _printed(spec, settings), notes if settings.state_pool is None else [])


def _speculation_terms(spec: PlanSpec, settings: PlanSettings) -> list[Term]:
    if settings.depth == 0 or not spec.recurrent:
        return []
    state, column = row_bytes(spec, settings)
    running, verified = settings.slots + 1, settings.depth + 1
    columns = verified + spec.recurrent[0].conv_width - 2
    conv = Term(
        "intermediate conv",
        "rollback",
        running * columns * column,
        "(requests + 1) × (D + W − 2) columns × 2 B",
    )
    if settings.rollback == "replay":
        number = int(state_type(settings))
        record = sum(sglang_record_bytes(spec.rule, layer, number) for layer in spec.recurrent) // settings.tp
        rows = pool_size(settings) + 1
        return [
            conv,
            Term("record ring", "rollback", rows * RING_RECORDS * record, "(pool + 1) × 16 records"),
        ]
    return [
        conv,
        Term(
            "intermediate states", "rollback", running * verified * state,
            "(requests + 1) × D states, D = depth + 1",
        ),
    ]  # fmt: skip


def _draft_terms(spec: PlanSpec, settings: PlanSettings) -> list[Term]:
    formula = "KV formula over the draft's layers, the target's number of tokens"
    if settings.drafter == "mtp":
        return [Term("MTP KV pool", "draft KV", kv_bytes(spec.mtp_layers, settings), formula)]
    draft = settings.draft_spec
    if draft is None:
        return []
    state = sum(state_floats(layer) * 4 + conv_floats(layer) * CONV_BYTES for layer in draft.recurrent)
    return [
        Term("draft KV pool", "draft KV", kv_bytes(draft.layers, settings), formula),
        Term(
            "draft recurrent state", "draft state", (settings.slots + 1) * state // settings.tp,
            "(requests + 1) × (state + conv)",
            exact=not state, basis="recurrent draft models: by analogy with the target's pool",
        ),
    ]  # fmt: skip


def _compute_term(spec: PlanSpec, settings: PlanSettings) -> Term:
    rows = settings.slots * (1 + settings.depth)
    num_bytes = (PREFILL_TOKENS * 8 * spec.hidden_size * 2 + rows * spec.vocab_size * 4) // settings.tp
    return Term(
        "activations and graphs",
        "compute",
        num_bytes,
        "2048 × 8 × width × 2 B + rows × vocabulary × 4 B",
        exact=False,
        basis="a rule of thumb, not measured; the engine leaves 1 − mem-fraction-static for it",
    )


def _printed(spec: PlanSpec, settings: PlanSettings) -> dict[str, str]:
    state, column = row_bytes(spec, settings)
    width = spec.recurrent[0].conv_width - 1 if spec.recurrent else 0
    rows = pool_size(settings) + 1
    found = {term.name: term.num_bytes for term in _speculation_terms(spec, settings)}
    kv = kv_bytes(spec.layers, settings)
    halves = {} if spec.is_latent else {"K_GB": gib(Fraction(kv, 2))}
    return {
        "conv_GB": gib(rows * width * column),
        "ssm_GB": gib(rows * state),
        "inter_ssm_GB": gib(found.get("intermediate states", 0)),
        "inter_conv_GB": gib(found.get("intermediate conv", 0)),
        "KV_GB": gib(kv),
        **halves,
    }
