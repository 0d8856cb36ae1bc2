"""What a model is, in numbers: enough to size its memory without its weights. Also the view of state a model
gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from redraft.ops import Array, AttentionWeights, DeltaInputs, IntArray, RMSNorm


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's KV rows. With `latent`, values are the first `value_dim` numbers of the key row, stored
    once.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False


@dataclass(frozen=True)
class RecurrentSpec:
    """One layer's recurrent state [HV, K, V], its decay (K numbers a head, or 1) and its conv window [W−1,
    C].
    """

    num_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    decay_dim: int
    conv_channels: int
    conv_width: int


@dataclass(frozen=True)
class LayerSpec:
    """The state that one layer keeps: attention rows, a recurrent state, or both."""

    attention: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What every family has. A family's own numbers are in its subclass."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_context: int
    layers: tuple[LayerSpec, ...]

    @property
    def num_recurrent_layers(self) -> int:
        """How many layers carry a state that cannot be truncated."""
        return sum(layer.recurrent is not None for layer in self.layers)


class StateView(Protocol):
    """A model's access to the state of one forward pass: rows go in, rows come out, committed state stays as
    it is.
    """

    def short_conv(self, layer: int, x: Array, taps: Array) -> Array:
        """Causal conv over each row's window and history, then SiLU: x [B, C], taps [W, C] → [B, C]."""

    def delta_rule(self, layer: int, inputs: DeltaInputs) -> Array:
        """The delta rule → [B, HV, V]."""

    def attention(
        self, layer: int, q: Array, k: Array, v: Array | None, scale: float, inv_freq: Array | None = None
    ) -> Array:
        """Causal attention: q [B, H, K], k [B, G, K], v [B, G, V], or None for latent rows → [B, H, V]. With
        `inv_freq`, q and k are rotated by their positions first.
        """

    def attention_block(
        self, layer: int, x: Array, weights: AttentionWeights, norm: RMSNorm | None, residual: Array | None
    ) -> Array:
        """Grouped-query attention between its two products: x [B, D] → [B, D], as `Ops.attention_block`."""


class Model(Protocol):
    """Weights and arithmetic of one model; knows nothing of slots, drafts or requests."""

    fingerprint: str  # which spec and weights these are: see `loading.fingerprint`, which sets it

    @property
    def spec(self) -> ModelSpec:
        """The model in numbers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""

    def forward(self, tokens: IntArray, view: StateView, rows: IntArray) -> Array:
        """Run tokens [B] → logits [len(rows), vocab] of the chosen rows."""
