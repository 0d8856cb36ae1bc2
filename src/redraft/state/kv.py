"""Attention rows by slot and position. A row beyond a slot's committed length is never read."""

from __future__ import annotations

from collections.abc import Mapping

from redraft.models import AttentionSpec
from redraft.ops import Array, AttentionWeights, Ops, RMSNorm
from redraft.state.batch import Batch
from redraft.state.buffers import Buffer, allocate


def kv_buffers(layer: int, spec: AttentionSpec, max_context: int, kv_type: str) -> tuple[Buffer, ...]:
    """The buffers of one layer, for one slot. Latent rows hold keys only."""
    keys = Buffer(f"keys.{layer}", "KV", (max_context, spec.num_kv_heads, spec.key_dim), kv_type)
    if spec.latent:
        return (keys,)
    return keys, Buffer(f"values.{layer}", "KV", (max_context, spec.num_kv_heads, spec.value_dim), kv_type)


class KVCache:
    """Keys and values [S, context, G, dim] of each attention layer."""

    def __init__(
        self,
        layers: Mapping[int, AttentionSpec],
        ops: Ops,
        *,
        num_slots: int,
        max_context: int,
        kv_type: str,
        fill: int | None,
    ) -> None:
        self._ops = ops
        self._arrays = {
            layer: [allocate(b, num_slots, fill) for b in kv_buffers(layer, spec, max_context, kv_type)]
            for layer, spec in layers.items()
        }
        self._views = {
            layer: (
                arrays[0],
                arrays[0][..., : layers[layer].value_dim] if layers[layer].latent else arrays[1],
            )
            for layer, arrays in self._arrays.items()
        }

    def attention(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        scale: float,
        inv_freq: Array | None,
        batch: Batch,
    ) -> Array:
        """Write the rows of all windows at their positions, then attend: see `StateView.attention`."""
        keys, values = self._views[layer]
        return self._ops.attention(
            q, k, v, keys=keys, values=values, windows=batch.windows, positions=batch.positions, scale=scale,
            inv_freq=inv_freq,
        )  # fmt: skip

    def attention_block(
        self,
        layer: int,
        x: Array,
        weights: AttentionWeights,
        norm: RMSNorm | None,
        residual: Array | None,
        batch: Batch,
    ) -> Array:
        """The same between two products: see `StateView.attention_block`."""
        keys, values = self._views[layer]
        return self._ops.attention_block(
            x, weights, keys=keys, values=values, windows=batch.windows, positions=batch.positions,
            norm=norm, residual=residual,
        )  # fmt: skip

    def layout(self, length: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Names, shapes and dtypes of what `read` returns for `length` rows."""
        return {
            f"{name}.{layer}": ((length, *array.shape[2:]), array.dtype.name)
            for layer, arrays in self._arrays.items()
            for name, array in zip(("keys", "values"), arrays, strict=False)
        }

    def read(self, slot: int, length: int) -> dict[str, Array]:
        """Copies of a slot's first `length` rows."""
        names = ("keys", "values")
        return {
            f"{name}.{layer}": array[slot, :length].copy()
            for layer, arrays in self._arrays.items()
            for name, array in zip(names, arrays, strict=False)
        }

    def write(self, slot: int, length: int, rows: Mapping[str, Array]) -> None:
        """Put rows that `read` returned into a slot."""
        for layer, arrays in self._arrays.items():
            for name, array in zip(("keys", "values"), arrays, strict=False):
                array[slot, :length] = rows[f"{name}.{layer}"]
