"""Layer shapes by family, whatever spelling a file uses for them."""

from __future__ import annotations

from collections.abc import Iterable

from redraft.models import AttentionSpec, LayerSpec, RecurrentSpec
from redraft.plan.spec import PlanLayer


def grouped(num_kv_heads: int, key_dim: int, value_dim: int) -> AttentionSpec:
    """Grouped-query attention: a key and a value row for each KV head."""
    return AttentionSpec(num_kv_heads, key_dim, value_dim)


def latent(kv_rank: int, rope_dim: int) -> AttentionSpec:
    """Multi-head latent attention: one row of compressed key and value, and the rotary part, stored once."""
    return AttentionSpec(1, kv_rank + rope_dim, kv_rank, latent=True)


def kda(heads: int, dim: int, width: int) -> RecurrentSpec:
    """Kimi Delta Attention: a state of dim × dim a head, a decay for each of its rows, three convolutions."""
    return RecurrentSpec(heads, heads, dim, dim, dim, 3 * heads * dim, width)


def gated_delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int) -> RecurrentSpec:
    """Gated DeltaNet: one decay a value head; queries, keys and values pass one convolution."""
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentSpec(key_heads, value_heads, key_dim, value_dim, 1, channels, width)


def mamba2(heads: int, head_dim: int, state_dim: int, groups: int, width: int) -> RecurrentSpec:
    """Mamba-2: a state of `state_dim` × `head_dim` a head; the convolution covers x, B and C."""
    channels = heads * head_dim + 2 * groups * state_dim
    return RecurrentSpec(groups, heads, state_dim, head_dim, 1, channels, width)


def mamba(inner: int, state_dim: int, width: int) -> RecurrentSpec:
    """Mamba: every channel has `state_dim` numbers of its own; the convolution covers x alone."""
    return RecurrentSpec(inner, inner, state_dim, 1, state_dim, inner, width)


def rwkv(hidden: int, head_size: int, num_shifts: int) -> RecurrentSpec:
    """RWKV: a square state a head, and `num_shifts` token shifts of one column each."""
    heads = hidden // head_size
    return RecurrentSpec(heads, heads, head_size, head_size, head_size, hidden, num_shifts + 1)


def short_conv(hidden: int, cache: int) -> RecurrentSpec:
    """LFM2: a convolution over `cache` columns and no other state."""
    return RecurrentSpec(0, 0, 0, 0, 0, hidden, cache)


def attention_layer(spec: AttentionSpec, window: int = 0, indexer_dim: int = 0) -> PlanLayer:
    """A layer with attention alone."""
    return PlanLayer(LayerSpec(attention=spec), window, indexer_dim)


def recurrent_layer(spec: RecurrentSpec) -> PlanLayer:
    """A layer with a recurrence alone."""
    return PlanLayer(LayerSpec(recurrent=spec))


def mixed(
    is_recurrent: Iterable[bool], recurrent: RecurrentSpec, attention: AttentionSpec, indexer_dim: int = 0
) -> tuple[PlanLayer, ...]:
    """One layer after another, each recurrent or attention."""
    return tuple(
        recurrent_layer(recurrent) if r else attention_layer(attention, indexer_dim=indexer_dim)
        for r in is_recurrent
    )
