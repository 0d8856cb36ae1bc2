"""The building blocks that families share. A block holds its weights and calls ops; state it sees through a
view.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redraft.models.spec import StateView
from redraft.ops import Activation, Array, Matrix, Ops


@dataclass(frozen=True)
class Linear:
    """y = scale · (W x) + bias."""

    ops: Ops
    weight: Matrix
    bias: Array | None = None
    scale: Array | None = None

    def __call__(self, x: Array) -> Array:
        """x [B, K] → [B, N]."""
        if self.scale is None:
            return self.ops.linear(x, self.weight, self.bias)
        y = self.ops.linear(x, self.weight) * self.scale
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Parallel:
    """Several matrices over the same input, as one product where the file has them in one encoding."""

    parts: tuple[Linear, ...]  # one of all rows, or one each
    sizes: tuple[int, ...]

    def together(self, x: Array) -> Array:
        """x [B, K] → [B, Σ N]."""
        if len(self.parts) == 1:
            return self.parts[0](x)
        return np.concatenate([part(x) for part in self.parts], axis=-1)

    def __call__(self, x: Array) -> list[Array]:
        """x [B, K] → [B, N] of each."""
        if len(self.parts) > 1:
            return [part(x) for part in self.parts]
        ends = np.cumsum(self.sizes).tolist()
        y = self.parts[0](x)
        return [y[:, end - size : end] for size, end in zip(self.sizes, ends, strict=True)]


@dataclass(frozen=True)
class Norm:
    """RMS norm with a weight."""

    ops: Ops
    weight: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis."""
        return self.ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True)
class GatedMLP:
    """W_down · gated(W_gate x, W_up x)."""

    ops: Ops
    gate_up: Parallel
    down: Linear
    activation: Activation

    def __call__(self, x: Array) -> Array:
        """x [B, D] → [B, D]."""
        gate, up = self.gate_up(x)
        return self.down(self.ops.gated(gate, up, self.activation))


@dataclass(frozen=True)
class Latent:
    """The smaller space that a latent mixture's experts live in."""

    down: Linear
    up: Linear
    norm: Norm


@dataclass(frozen=True)
class MixtureOfExperts:
    """Sigmoid-routed experts plus shared ones that are always on; with `latent`, the routed ones see a
    projection.
    """

    ops: Ops
    router: Linear
    router_bias: Array | None
    gate: Matrix
    up: Matrix
    down: Matrix
    shared: GatedMLP | None
    latent: Latent | None
    activation: Activation
    top_k: int
    scale: float
    normalise: bool

    def __call__(self, x: Array) -> Array:
        """x [B, D] → [B, D]."""
        ids, weights = self.ops.route(
            self.router(x), self.router_bias, top_k=self.top_k, scale=self.scale, normalise=self.normalise
        )
        inner = x if self.latent is None else self.latent.down(x)
        y = self.ops.experts(
            inner, ids, weights, gate=self.gate, up=self.up, down=self.down, activation=self.activation
        )
        if self.latent is not None:
            y = self.latent.up(self.latent.norm(y))
        return y if self.shared is None else y + self.shared(x)


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Softmax attention with rotary positions; each key head serves several query heads."""

    ops: Ops
    layer: int
    qkv: Parallel
    out: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inv_freq: Array

    def __call__(self, x: Array, view: StateView) -> Array:
        """x [B, D] → [B, D]."""
        heads = self.qkv.together(x).reshape(len(x), -1, self.head_dim)  # [B, H + 2G, head_dim]
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = self.ops.rope(heads[:, :num_rotated], view.positions, self.inv_freq)
        q, k, v = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        o = view.attention(self.layer, q, k, v, self.head_dim**-0.5)  # [B, H, head_dim]
        return self.out(o.reshape(len(x), -1))


@dataclass(frozen=True)
class LowRank:
    """A projection through a bottleneck."""

    a: Linear
    b: Linear

    def __call__(self, x: Array) -> Array:
        """x [B, K] → [B, N]."""
        return self.b(self.a(x))


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention without rotary positions, with W_kb and W_vb absorbed around the cached row
    (c, r).
    """

    ops: Ops
    layer: int
    q: Linear | None  # either this
    q_down: Linear | None  # or these three
    q_norm: Norm | None
    q_up: Linear | None
    kv_down: Linear
    kv_norm: Norm
    k_up: Array  # [H, kv_lora_rank, qk_nope]
    v_up: Array  # [H, v_dim, kv_lora_rank]
    gate: Linear | None
    out: Linear
    num_heads: int
    nope_dim: int
    scale: float

    def __call__(self, x: Array, view: StateView) -> Array:
        """x [B, D] → [B, D]."""
        rank = self.k_up.shape[1]
        q = self._query(x).reshape(len(x), self.num_heads, -1)
        q_nope, q_rest = q[..., : self.nope_dim], q[..., self.nope_dim :]
        row = self.kv_down(x)
        row = np.concatenate([self.kv_norm(row[:, :rank]), row[:, rank:]], axis=-1)  # [B, rank + rope]
        absorbed = np.concatenate([self.ops.head_linear(q_nope, self.k_up), q_rest], axis=-1)
        o = view.attention(self.layer, absorbed, row[:, None, :], None, self.scale)  # [B, H, rank]
        y = self.ops.head_linear(o, self.v_up).reshape(len(x), -1)
        return self.out(y if self.gate is None else y * self.ops.sigmoid(self.gate(x)))

    def _query(self, x: Array) -> Array:
        if self.q is not None:
            return self.q(x)
        assert self.q_down is not None, "a query has either one matrix or two"
        assert self.q_norm is not None
        assert self.q_up is not None
        return self.q_up(self.q_norm(self.q_down(x)))


@dataclass(frozen=True)
class KimiDeltaAttention:
    """The delta rule with a decay per key channel (KDA)."""

    ops: Ops
    layer: int
    qkv: Parallel
    conv: Array  # [3·H·D, W]
    decay: LowRank
    dt_bias: Array  # [H·D]
    neg_exp_a: Array  # [H]
    lower_bound: float | None
    beta: Linear
    gate: Linear | LowRank
    norm: Norm
    out: Linear
    head_dim: int
    l2_eps: float

    def __call__(self, x: Array, view: StateView) -> Array:
        """x [B, D] → [B, D]."""
        heads = (len(x), -1, self.head_dim)
        qkv = view.short_conv(self.layer, self.qkv.together(x), self.conv)
        q, k, v = (part.reshape(heads) for part in np.split(qkv, 3, axis=-1))  # [B, H, D] each
        q = self.ops.l2_norm(q, self.l2_eps) * self.head_dim**-0.5
        k = self.ops.l2_norm(k, self.l2_eps)
        f = (self.decay(x) + self.dt_bias).reshape(heads)
        decay = self.ops.kda_decay(f, self.neg_exp_a, self.lower_bound)
        o = view.delta_rule(self.layer, q, k, v, decay, self.ops.sigmoid(self.beta(x)))  # [B, H, D]
        gate = self.ops.sigmoid(self.gate(x))
        return self.out(self.norm(o).reshape(len(x), -1) * gate)
