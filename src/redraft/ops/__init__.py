"""The arithmetic. Arrays in, arrays out: no op knows a configuration, a request or a model.

`Ops` is the one table of operations; every implementation has these signatures, and `reference` is their
specification. Two rules hold for each op, bit for bit: a row's result depends on that row and its own history
alone, never on the other rows or on how many there are; and nothing is modified except what the docstring
names.

Shape letters: B rows of all windows together, N windows, S slots, H query/key heads, HV value heads, K key
dim, V value dim, Kd decay dim (K, or 1 for one decay a head), C channels, W conv width, R records.
"""

from __future__ import annotations

import os
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from redraft.config import ComputeType
from redraft.errors import ConfigError
from redraft.ops.raw import RawTensor

Array = NDArray[Any]
IntArray = NDArray[np.int64]
Matrix = Any  # a weight matrix as an implementation keeps it; made by `Ops.matrix`, opaque to everyone else


class Activation(NamedTuple):
    """A gated activation. `swiglu`: silu(a)·b. `situ`: both branches soft-capped, by `beta` and
    `linear_beta`.
    """

    kind: Literal["swiglu", "situ"]
    beta: float = 0.0
    linear_beta: float = 0.0


SWIGLU = Activation("swiglu")


class RMSNorm(NamedTuple):
    """A root-mean-square norm."""

    weight: Array  # [D]
    eps: float


class MLPWeights(NamedTuple):
    """W_down · gated(W_gate x, W_up x), the gate's and the up projection's rows in one matrix."""

    gate_up: Matrix  # [2F, D]
    gate_up_bias: Array | None  # [2F]
    down: Matrix  # [D, F]
    down_bias: Array | None  # [D]


class LatentWeights(NamedTuple):
    """The smaller space that a latent mixture's experts live in."""

    down: Matrix  # [L, D]
    down_bias: Array | None
    norm: RMSNorm
    up: Matrix  # [D, L]
    up_bias: Array | None


class MixtureWeights(NamedTuple):
    """Routed experts, and shared ones that are always on."""

    router: Matrix  # [E, D]
    router_bias: Array | None  # [E]
    score_bias: Array | None  # [E] chooses, but does not weigh
    top_k: int
    scale: float
    normalise: bool
    gate: Matrix  # [E, F, D], or L for D with a latent space
    up: Matrix
    down: Matrix  # [E, D, F]
    latent: LatentWeights | None
    shared: MLPWeights | None


class AttentionWeights(NamedTuple):
    """Grouped-query attention between two products; the rows of queries, keys and values in one matrix."""

    qkv: Matrix  # [(H + 2G)·K, D]
    qkv_bias: Array | None  # [(H + 2G)·K]
    out: Matrix  # [D, H·K]
    out_bias: Array | None  # [D]
    num_heads: int
    scale: float
    inv_freq: Array | None


class DeltaInputs(NamedTuple):
    """What the delta rule takes for each row."""

    q: Array  # [B, H, K]
    k: Array  # [B, H, K]
    v: Array  # [B, HV, V]
    decay: Array  # [B, HV, Kd]
    beta: Array  # [B, HV]


class KDAConstants(NamedTuple):
    """Kimi Delta Attention's numbers: −exp(A_log), the decay's lower bound in log space, the L2 norm's
    epsilon.
    """

    neg_exp_a: Array  # [H]
    lower_bound: float | None
    l2_eps: float


class Windows(NamedTuple):
    """Which rows belong to which slot: window n has rows `starts[n]:starts[n + 1]` on `slots[n]`."""

    slots: IntArray  # [N]
    starts: IntArray  # [N + 1]


class Records(NamedTuple):
    """What one token did to a state, enough to do it again: S ← diag(decay) S + k uᵀ."""

    decay: Array  # [S, R, HV, Kd]
    k: Array  # [S, R, H, K]
    u: Array  # [S, R, HV, V]


class Ops(Protocol):
    """The table. See `redraft.ops.reference` for what each op computes."""

    def arithmetic(self) -> str:
        """A name of the operations in use: only under one name are results the same bits."""

    def matrix(self, raw: RawTensor, compute: ComputeType) -> Matrix:
        """Take a weight matrix [.., N, K] into the form that `linear`, `embed` and `experts` want."""

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes that a matrix occupies."""

    def embed(self, table: Matrix, tokens: IntArray) -> Array:
        """Rows of an embedding table."""

    def linear(
        self,
        x: Array,
        w: Matrix,
        bias: Array | None = None,
        *,
        norm: RMSNorm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """Matrix product with a weight matrix, of normalised rows where asked, added to a residual stream."""

    def mlp(
        self,
        x: Array,
        weights: MLPWeights,
        activation: Activation,
        *,
        norm: RMSNorm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """A gated MLP, norm and residual stream as in `linear`."""

    def head_linear(self, x: Array, w: Array) -> Array:
        """One small matrix per head."""

    def rms_norm(self, x: Array, norm: RMSNorm) -> Array:
        """Root-mean-square norm over the last axis."""

    def gated(self, gate: Array, up: Array, activation: Activation) -> Array:
        """Gated activation of an MLP."""

    def sigmoid_gate(self, x: Array, gate: Array, norm: RMSNorm | None = None) -> Array:
        """Heads, normalised where asked, times a logistic gate."""

    def kda_inputs(self, qkv: Array, f: Array, beta: Array, constants: KDAConstants) -> DeltaInputs:
        """From projections to what the delta rule of Kimi Delta Attention takes."""

    def short_conv(self, x: Array, taps: Array, history: Array, starts: IntArray) -> Array:
        """Causal depthwise convolution over each window and what came before it, then SiLU."""

    def short_conv_ring(
        self,
        x: Array,
        taps: Array,
        *,
        windows: Windows,
        ring: Array,
        tail: Array | None,
        cursor: IntArray,
        num_before: IntArray,
        advance: NDArray[np.bool_],
    ) -> Array:
        """The same over a ring of columns a slot, which takes the window's own."""

    def delta_scan(
        self,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array,
        *,
        windows: Windows,
        state: Array,
        records: Records | None,
        num_folded: IntArray,
        num_replayed: IntArray,
        advance: NDArray[np.bool_],
    ) -> Array:
        """The delta rule, token by token, over one state a slot and its records."""

    def delta_scan_planes(
        self,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array,
        *,
        windows: Windows,
        planes: Array,
        tail: Records,
        plane: IntArray,
        advance: NDArray[np.bool_],
        last: IntArray,
    ) -> Array:
        """The delta rule, token by token, writing the state after every token to a plane of its own."""

    def attention(
        self,
        q: Array,
        k: Array | None,
        v: Array | None,
        *,
        keys: Array,
        values: Array,
        windows: Windows,
        positions: IntArray,
        scale: float,
        inv_freq: Array | None = None,
    ) -> Array:
        """Store each row's key and value, then causal softmax attention over its slot's positions up to its
        own.
        """

    def attention_block(
        self,
        x: Array,
        weights: AttentionWeights,
        *,
        keys: Array,
        values: Array,
        windows: Windows,
        positions: IntArray,
        norm: RMSNorm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """`attention` between its two products, norm and residual stream as in `linear`."""

    def route(
        self, logits: Array, bias: Array | None, *, top_k: int, scale: float, normalise: bool
    ) -> tuple[IntArray, Array]:
        """Choose experts and their weights."""

    def experts(
        self,
        x: Array,
        ids: IntArray,
        weights: Array,
        *,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        activation: Activation,
    ) -> Array:
        """Weighted sum of the chosen experts' MLPs, in rank order."""

    def mixture(
        self,
        x: Array,
        weights: MixtureWeights,
        activation: Activation,
        *,
        norm: RMSNorm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """A whole mixture of experts, norm and residual stream as in `linear`."""

    def mix_streams(self, streams: list[Array], score_weight: Array, eps: float, norm: RMSNorm) -> Array:
        """Softmax mixture of residual streams (attention residuals), normalised."""

    def noisy_argmax(self, scores: Array, seed: int, position: int) -> int:
        """The largest score after standard Gumbel noise, a pure function of (seed, position, index)."""


def choose(name: str | None = None, *, threads: int | None = None) -> Ops:
    """The implementation: `native` or `reference`; with None the one that REDRAFT_OPS names, or else the
    native one where it was compiled and the processor can run it. `threads`: for the native one; by default
    REDRAFT_THREADS or the physical cores.
    """
    from redraft.ops import reference  # noqa: PLC0415  (both import the types above)

    name = name or os.environ.get("REDRAFT_OPS") or None
    if name not in (None, "native", "reference"):
        raise ConfigError(f"REDRAFT_OPS must be 'native' or 'reference', not '{name}'")
    if name == "reference":
        return reference
    try:
        from redraft.ops import native  # noqa: PLC0415
    except ImportError:
        if name == "native":
            raise ConfigError("the native operations were not compiled when redraft was installed") from None
        return reference
    if not native.usable():
        if name == "native":
            raise ConfigError("this processor cannot run the native operations: they need AVX2 and FMA")
        return reference
    native.set_up(threads)
    return native


def description() -> str:
    """Which implementation runs, for people."""
    table: Any = choose()
    return str(table.description())


__all__ = [
    "SWIGLU",
    "Activation",
    "Array",
    "AttentionWeights",
    "DeltaInputs",
    "IntArray",
    "KDAConstants",
    "LatentWeights",
    "MLPWeights",
    "Matrix",
    "MixtureWeights",
    "Ops",
    "RMSNorm",
    "RawTensor",
    "Records",
    "Windows",
    "choose",
    "description",
]
