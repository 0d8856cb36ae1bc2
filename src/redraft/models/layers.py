"""The building blocks that families share. A block holds its weights and calls ops; state it sees through a
view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.models.spec import StateView
from redraft.ops import (
    Activation,
    Array,
    AttentionWeights,
    KDAConstants,
    LatentWeights,
    Matrix,
    MixtureWeights,
    MLPWeights,
    Ops,
    RMSNorm,
)


@dataclass(frozen=True)
class Linear:
    """y = scale · (W x) + bias."""

    ops: Ops
    weight: Matrix
    bias: Array | None = None
    scale: Array | None = None

    def __call__(self, x: Array, *, norm: RMSNorm | None = None, residual: Array | None = None) -> Array:
        """x [B, K], normalised first where asked → residual + y [B, N]."""
        if self.scale is None:
            return self.ops.linear(x, self.weight, self.bias, norm=norm, residual=residual)
        y = self.ops.linear(x, self.weight, norm=norm) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y if residual is None else residual + y


@dataclass(frozen=True)
class Parallel:
    """Matrices over the same input, neighbours as one product where the file has them in one encoding."""

    parts: tuple[Linear, ...]  # each of one or more of the matrices
    outputs: tuple[slice, ...]  # of the columns of all together

    def together(self, x: Array, norm: RMSNorm | None = None) -> Array:
        """x [B, K], normalised first where asked → [B, Σ N]."""
        if len(self.parts) == 1:
            return self.parts[0](x, norm=norm)
        if norm is not None:
            x = self.parts[0].ops.rms_norm(x, norm)
        return np.concatenate([part(x) for part in self.parts], axis=-1)

    def __call__(self, x: Array, norm: RMSNorm | None = None) -> list[Array]:
        """x [B, K] → [B, N] of each output."""
        y = self.together(x, norm)
        return [y[:, columns] for columns in self.outputs]


class GatedMLP:
    """W_down · gated(W_gate x, W_up x)."""

    def __init__(self, ops: Ops, gate_up: Parallel, down: Linear, activation: Activation) -> None:
        self._ops = ops
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        first = gate_up.parts[0]
        plain = len(gate_up.parts) == 1 and first.scale is None and down.scale is None
        self.whole = MLPWeights(first.weight, first.bias, down.weight, down.bias) if plain else None

    def __call__(self, x: Array, *, norm: RMSNorm | None = None, residual: Array | None = None) -> Array:
        """x [B, D] → [B, D]; norm and residual as in `Linear`."""
        if self.whole is not None:
            return self._ops.mlp(x, self.whole, self._activation, norm=norm, residual=residual)
        gate, up = self._gate_up(x, norm)
        return self._down(self._ops.gated(gate, up, self._activation), residual=residual)


@dataclass(frozen=True)
class Latent:
    """The smaller space that a latent mixture's experts live in."""

    down: Linear
    up: Linear
    norm: RMSNorm

    def weights(self) -> LatentWeights:
        """As ops take them; without scales."""
        return LatentWeights(self.down.weight, self.down.bias, self.norm, self.up.weight, self.up.bias)


@dataclass(frozen=True)
class Routing:
    """How experts are chosen: the largest sigmoid scores after `bias`; see `Ops.route`."""

    router: Linear
    bias: Array | None
    top_k: int
    scale: float
    normalise: bool


class MixtureOfExperts:
    """Sigmoid-routed experts plus shared ones that are always on; with `latent`, the routed ones see a
    projection.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        routing: Routing,
        experts: tuple[Matrix, Matrix, Matrix],
        shared: GatedMLP | None,
        latent: Latent | None,
        activation: Activation,
    ) -> None:
        self._ops = ops
        self._routing = routing
        self._experts = experts
        self._shared = shared
        self._latent = latent
        self._activation = activation
        linears = [routing.router, *([latent.down, latent.up] if latent else [])]
        plain = all(linear.scale is None for linear in linears) and (
            shared is None or shared.whole is not None
        )
        self._whole = self._weights() if plain else None

    def _weights(self) -> MixtureWeights:
        routing, shared = self._routing, self._shared
        return MixtureWeights(
            routing.router.weight, routing.router.bias,
            routing.bias, routing.top_k, routing.scale, routing.normalise,
            *self._experts,
            None if self._latent is None else self._latent.weights(),
            None if shared is None else shared.whole,
        )  # fmt: skip

    def __call__(self, x: Array, *, norm: RMSNorm | None = None, residual: Array | None = None) -> Array:
        """x [B, D] → [B, D]; norm and residual as in `Linear`."""
        if self._whole is not None:
            return self._ops.mixture(x, self._whole, self._activation, norm=norm, residual=residual)
        if norm is not None:
            x = self._ops.rms_norm(x, norm)
        routing, latent, (gate, up, down) = self._routing, self._latent, self._experts
        ids, weights = self._ops.route(
            routing.router(x), routing.bias,
            top_k=routing.top_k, scale=routing.scale, normalise=routing.normalise,
        )  # fmt: skip
        inner = x if latent is None else latent.down(x)
        y = self._ops.experts(inner, ids, weights, gate=gate, up=up, down=down, activation=self._activation)
        if latent is not None:
            y = latent.up(y, norm=latent.norm, residual=residual)
        elif residual is not None:
            y = residual + y
        return y if self._shared is None else self._shared(x, residual=y)


class GroupedQueryAttention:
    """Softmax attention with rotary positions; each key head serves several query heads."""

    def __init__(
        self,
        layer: int,
        *,
        qkv: Parallel,
        out: Linear,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        inv_freq: Array,
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._out = out
        self._heads = num_heads, num_kv_heads, head_dim
        self._inv_freq = inv_freq
        self._scale = head_dim**-0.5
        first = qkv.parts[0]
        plain = len(qkv.parts) == 1 and first.scale is None and out.scale is None
        weights = first.weight, first.bias, out.weight, out.bias
        self._whole = AttentionWeights(*weights, num_heads, self._scale, inv_freq) if plain else None

    def __call__(
        self, x: Array, view: StateView, *, norm: RMSNorm | None = None, residual: Array | None = None
    ) -> Array:
        """x [B, D] → [B, D]; norm and residual as in `Linear`."""
        if self._whole is not None:
            return view.attention_block(self._layer, x, self._whole, norm, residual)
        num_heads, num_kv_heads, head_dim = self._heads
        heads = self._qkv.together(x, norm).reshape(len(x), -1, head_dim)  # [B, H + 2G, head_dim]
        q, k, v = np.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        o = view.attention(self._layer, q, k, v, self._scale, self._inv_freq)  # [B, H, head_dim]
        return self._out(o.reshape(len(x), -1), residual=residual)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention without rotary positions, with W_kb and W_vb absorbed around the cached row
    (c, r).
    """

    ops: Ops
    layer: int
    inputs: Parallel  # query (or its bottleneck), cached row and, with `is_gated`, gate
    q_up: Linear | None  # with q_norm: from the bottleneck to the query
    q_norm: RMSNorm | None
    kv_norm: RMSNorm
    k_up: Array  # [H, kv_lora_rank, qk_nope]
    v_up: Array  # [H, v_dim, kv_lora_rank]
    is_gated: bool
    out: Linear
    scale: float

    def __call__(
        self, x: Array, view: StateView, *, norm: RMSNorm | None = None, residual: Array | None = None
    ) -> Array:
        """x [B, D] → [B, D]; norm and residual as in `Linear`."""
        q, row, *gate = self.inputs(x, norm)
        if self.q_up is not None:
            q = self.q_up(q, norm=self.q_norm)
        row = self.ops.rms_norm(row, self.kv_norm)  # [B, rank + rope]
        absorbed = self.ops.head_linear(
            q.reshape(len(x), len(self.k_up), -1), self.k_up
        )  # [B, H, rank + rope]
        o = view.attention(self.layer, absorbed, row[:, None, :], None, self.scale)  # [B, H, rank]
        y = self.ops.head_linear(o, self.v_up)  # [B, H, v_dim]
        y = self.ops.sigmoid_gate(y, gate[0]) if self.is_gated else y.reshape(len(x), -1)
        return self.out(y, residual=residual)


@dataclass(frozen=True)
class KimiDeltaAttention:
    """The delta rule with a decay per key channel (KDA)."""

    ops: Ops
    layer: int
    inputs: Parallel  # qkv, the decay's bottleneck, beta, and the gate or its bottleneck
    conv: Array  # [W, 3·H·D]
    decay_up: Linear  # its bias is the decay's
    gate_up: Linear | None
    constants: KDAConstants
    norm: RMSNorm
    out: Linear

    def __call__(
        self, x: Array, view: StateView, *, norm: RMSNorm | None = None, residual: Array | None = None
    ) -> Array:
        """x [B, D] → [B, D]; norm and residual as in `Linear`."""
        qkv, f, beta, gate = self.inputs(x, norm)
        qkv = view.short_conv(self.layer, qkv, self.conv)
        o = view.delta_rule(self.layer, self.ops.kda_inputs(qkv, self.decay_up(f), beta, self.constants))
        if self.gate_up is not None:
            gate = self.gate_up(gate)
        return self.out(self.ops.sigmoid_gate(o, gate, self.norm), residual=residual)
