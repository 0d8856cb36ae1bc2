"""What vLLM reserves: blocks of one size for attention and recurrent layers alike (its `interface.py`).

A recurrent layer's page holds its conv window and its state; attention blocks are made just large enough for
it, and what is left over is padding that every page pays. With speculation each request holds 1 + depth such
pages a layer (`MambaSpec.num_speculative_blocks`), or one page with records (RecoverSSM).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from redraft.errors import ConfigError
from redraft.plan.draft import weight_terms
from redraft.plan.records import vllm_record_bytes
from redraft.plan.settings import PlanSettings
from redraft.plan.sizes import MIB, TYPE_BYTES, pad
from redraft.plan.spec import PlanLayer, PlanSpec, conv_floats, state_floats
from redraft.plan.term import Parts, Term

BLOCK_ALIGN, LATENT_BLOCK_ALIGN = 16, 64
CONV_BYTES = 2  # the model's type
BATCHED_TOKENS = 2048  # --max-num-batched-tokens


@dataclass(frozen=True)
class Pages:
    """The block geometry. `conv_bytes` is W−1 columns, `widening_bytes` one more for each draft token."""

    attention_token_bytes: int  # one layer
    state_bytes: int
    conv_bytes: int
    widening_bytes: int
    record_bytes: int
    block_tokens: int
    page_bytes: int

    @property
    def used_bytes(self) -> int:
        """What a recurrent page holds."""
        return self.state_bytes + self.conv_bytes + self.widening_bytes + self.record_bytes

    @property
    def padding_bytes(self) -> int:
        """What it wastes."""
        return self.page_bytes - self.used_bytes if self.used_bytes else 0


def share(count: int, tp: int, what: str) -> int:
    """Heads or channels of one device; `ConfigError` where they cannot be split."""
    if count % tp:
        raise ConfigError(
            f"{count} {what} cannot be split over {tp} devices; choose a --tp that divides them"
        )
    return count // tp


def attention_token_bytes(layer: PlanLayer, settings: PlanSettings) -> int:
    """Bytes of one token in one layer on one device. Latent rows are whole on each; heads at least one."""
    spec = layer.state.attention
    assert spec is not None, "an attention layer"
    number = TYPE_BYTES[settings.kv]
    if spec.latent:
        return int(spec.key_dim * number)
    heads = max(1, spec.num_kv_heads // settings.tp)
    return int(heads * (spec.key_dim + spec.value_dim) * number)


def state_type(spec: PlanSpec, settings: PlanSettings) -> Fraction:
    """Bytes a number of recurrent state: float32 for KDA or where the configuration asks; else 2."""
    if settings.state_type is not None:
        return TYPE_BYTES[settings.state_type]
    return Fraction(4 if spec.rule == "kda" or spec.float32_state else CONV_BYTES)


def pages(spec: PlanSpec, settings: PlanSettings) -> Pages:
    """The block geometry of a model. All its recurrent layers are alike, and so are its attention layers."""
    tp, depth = settings.tp, settings.depth
    token = max((attention_token_bytes(layer, settings) for layer in spec.attention), default=0)
    if not spec.recurrent:
        return Pages(token, 0, 0, 0, 0, BLOCK_ALIGN, BLOCK_ALIGN * token)
    layer = spec.recurrent[0]
    share(layer.num_value_heads, tp, "value heads")
    channels = share(layer.conv_channels, tp, "conv channels")
    state = int(state_floats(layer) // tp * state_type(spec, settings))
    records = (
        (1 + depth) * vllm_record_bytes(spec.rule, layer) // tp
        if settings.rollback == "replay" and depth
        else 0
    )
    conv = conv_floats(layer) // tp * CONV_BYTES
    widening = depth * channels * CONV_BYTES
    used = state + conv + widening + records
    if not token:
        return Pages(0, state, conv, widening, records, 0, used)
    align = LATENT_BLOCK_ALIGN if spec.is_latent else BLOCK_ALIGN
    block = pad(-(-used // token), align)
    return Pages(token, state, conv, widening, records, block, block * token)


def pages_per_layer(settings: PlanSettings) -> int:
    """Recurrent pages of one request and layer."""
    return 1 if settings.rollback == "replay" else 1 + settings.depth


def layer_groups(spec: PlanSpec) -> int:
    """Groups of recurrent layers that share one block table: each as large as the attention group."""
    num_recurrent, num_attention = len(spec.recurrent), len(spec.attention)
    return -(-num_recurrent // num_attention) if num_attention else int(num_recurrent > 0)


def attention_blocks(layer: PlanLayer, settings: PlanSettings, block_tokens: int) -> int:
    """Blocks of one request in one attention layer; a sliding window keeps itself and one batch."""
    if not block_tokens:
        return 0
    tokens = settings.context
    if layer.window:
        tokens = min(tokens, layer.window - 1 + BATCHED_TOKENS)
    return -(-tokens // block_tokens)


def plan_parts(spec: PlanSpec, settings: PlanSettings) -> Parts:
    """All terms of one device."""
    geometry = pages(spec, settings)
    rows = settings.slots * len(spec.recurrent)  # pages without speculation
    held = rows * pages_per_layer(settings)
    one = geometry.state_bytes + geometry.conv_bytes
    terms = [
        *weight_terms(spec, settings),
        _kv_term("KV blocks", "KV", list(spec.attention), settings, geometry),
        Term("recurrent state", "recurrent state", rows * geometry.state_bytes, "layers × requests × state"),
        Term("conv windows", "conv", rows * geometry.conv_bytes, "layers × requests × (W − 1)·C × 2 B"),
        Term(
            "conv widening", "rollback", held * geometry.widening_bytes,
            "depth × channels × 2 B in every page",
        ),
        Term("speculative blocks", "rollback", (held - rows) * one, "depth × requests × (state + conv)"),
        Term("records", "rollback", held * geometry.record_bytes, "(1 + depth) records a page"),
        Term("page padding", "page padding", held * geometry.padding_bytes, "pages × (page − what it holds)"),
        *_draft_terms(spec, settings, geometry),
        _compute_term(spec, settings),
    ]  # fmt: skip
    return Parts(terms, _printed(spec, settings, geometry), [])


def _kv_term(name: str, group: str, layers: list[PlanLayer], settings: PlanSettings, geometry: Pages) -> Term:
    blocks = sum(attention_blocks(layer, settings, geometry.block_tokens) for layer in layers)
    return Term(
        name,
        group,
        settings.slots * blocks * geometry.page_bytes,
        "layers × requests × ceil(context / block) × page",
        exact=not any(layer.window for layer in layers),
        basis="a sliding window is taken to keep one batch of 2048 tokens beside itself",
    )


def _draft_terms(spec: PlanSpec, settings: PlanSettings, geometry: Pages) -> list[Term]:
    draft = settings.draft_spec
    if settings.drafter == "mtp":
        return [_kv_term("MTP KV blocks", "draft KV", list(spec.mtp_layers), settings, geometry)]
    if draft is None:
        return []
    own = pages(replace(draft, layers=tuple(draft.attention)), settings)
    state = sum(state_floats(layer) * 4 + conv_floats(layer) * CONV_BYTES for layer in draft.recurrent)
    return [
        _kv_term("draft KV blocks", "draft KV", draft.attention, settings, own),
        Term(
            "draft recurrent state", "draft state", settings.slots * state // settings.tp,
            "layers × requests × (state + conv)",
            exact=not state, basis="pages of a recurrent draft model, without padding or rollback",
        ),
    ]  # fmt: skip


def _compute_term(spec: PlanSpec, settings: PlanSettings) -> Term:
    rows = settings.slots * (1 + settings.depth)
    num_bytes = (BATCHED_TOKENS * 8 * spec.hidden_size * 2 + rows * spec.vocab_size * 4) // settings.tp
    return Term(
        "activations and graphs",
        "compute",
        num_bytes,
        "2048 × 8 × width × 2 B + rows × vocabulary × 4 B",
        exact=False,
        basis="a rule of thumb, not measured; the engine profiles the true peak when it starts",
    )


def _printed(spec: PlanSpec, settings: PlanSettings, geometry: Pages) -> dict[str, str]:
    recurrent = len(spec.recurrent) * pages_per_layer(settings) * geometry.page_bytes
    attention = sum(
        attention_blocks(layer, settings, geometry.block_tokens) * geometry.page_bytes
        for layer in spec.attention
    )
    printed = {"MiB_per_request": f"{(attention + recurrent) / MIB:.0f}"}
    if not spec.recurrent:
        return printed
    padding = 100 * geometry.padding_bytes / geometry.used_bytes
    return printed | {
        "block_tokens": str(geometry.block_tokens),
        "page_bytes": str(geometry.page_bytes),
        "padding_pct": f"{padding:.2f}",
        "state_bytes": str(geometry.used_bytes),
        "recurrent_MiB_per_request": f"{recurrent / MIB:.1f}",
        "recurrent_blocks_per_request": str(layer_groups(spec) * pages_per_layer(settings)),
    }
