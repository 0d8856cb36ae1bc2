"""The compiled twin of `reference`: equal signatures, float32. What is not compiled falls to the reference.

Weights stay at their size on disk, repacked once. Float weights of 16 bits meet activations in bfloat16
where the processor has tiles for it; block-quantized ones meet activations quantized to int8 in groups of
32. docs/native.md says more.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft import _native  # type: ignore[attr-defined]
from redraft.config import ComputeType
from redraft.errors import ConfigError
from redraft.ops import (
    Activation,
    Array,
    AttentionWeights,
    DeltaInputs,
    IntArray,
    KDAConstants,
    Matrix,
    MixtureWeights,
    MLPWeights,
    Records,
    RMSNorm,
    Windows,
    reference,
)
from redraft.ops.raw import RawTensor, plain


def set_up(threads: int | None = None) -> None:
    """Instruction set: the best, or `REDRAFT_ISA`. Threads: as given, or `REDRAFT_THREADS`, or physical
    cores.
    """
    wanted = os.environ.get("REDRAFT_ISA")
    if wanted and not _native.use_isa(wanted):
        raise ConfigError(
            f"REDRAFT_ISA '{wanted}' is not on this processor, whose best is {_native.best_isa()}"
        )
    text = os.environ.get("REDRAFT_THREADS", "")
    if text and not text.isdecimal():
        raise ConfigError(f"REDRAFT_THREADS must be a whole number, not '{text}'")
    set_num_threads(threads if threads is not None else int(text) if text else default_threads())


def default_threads() -> int:
    """Physical cores that this process may use."""
    import psutil  # noqa: PLC0415  (only here, and slow to import)

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))


def set_num_threads(count: int) -> None:
    """Use so many threads; results do not depend on it."""
    if not 1 <= count <= 1024:
        raise ConfigError(f"threads must be 1 to 1024, not {count}")
    _native.set_num_threads(count)


def description() -> str:
    """What is in use."""
    return f"native operations, {_native.isa()}, {_native.num_threads()} threads"


def arithmetic() -> str:
    """See `Ops.arithmetic`."""
    return f"native {_native.isa()}"


def usable() -> bool:
    """Whether this processor can run the native operations at all."""
    return str(_native.best_isa()) != "none"


def matrix(raw: RawTensor, compute: ComputeType) -> Matrix:
    """Repack a weight matrix [.., N, K]; for float64 the reference's array."""
    if compute == "float64":
        return reference.matrix(raw, compute)
    if raw.encoding == "F64":
        raw = plain(raw.name, raw.to_array())
    *experts, rows, columns = raw.shape
    data = np.ascontiguousarray(raw.data).reshape(-1).view(np.uint8)
    return _native.pack(data, raw.encoding, int(np.prod(experts, dtype=int)), rows, columns)


def matrix_bytes(matrix: Matrix) -> int:
    """Bytes that a matrix occupies, padding included."""
    return int(matrix.nbytes if isinstance(matrix, np.ndarray) else matrix.num_bytes)


_NO_NORM: tuple[Array | None, float] = (None, 0.0)
_rotation: tuple[IntArray, Array, Array, Array] | None = None


def _c(x: Array) -> Array:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def embed(table: Matrix, tokens: IntArray) -> Array:
    """See `reference.embed`."""
    if isinstance(table, np.ndarray):
        return reference.embed(table, tokens)
    out = np.empty((len(tokens), table.columns), np.float32)
    _native.embed(table, tokens, out)
    return out


def linear(
    x: Array,
    w: Matrix,
    bias: Array | None = None,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """See `reference.linear`."""
    if isinstance(w, np.ndarray):
        return reference.linear(x, w, bias, norm=norm, residual=residual)
    out = np.empty((len(x), w.rows), np.float32)
    if len(x):
        weight, eps = norm or _NO_NORM
        _native.linear(w, x, bias, weight, eps, residual, out)
    return out


def mlp(
    x: Array,
    weights: MLPWeights,
    activation: Activation,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """See `reference.mlp`."""
    if isinstance(weights.down, np.ndarray):
        return reference.mlp(x, weights, activation, norm=norm, residual=residual)
    out = np.empty((len(x), weights.down.rows), np.float32)
    if len(x):
        kind, beta, linear_beta = activation
        weight, eps = norm or _NO_NORM
        _native.mlp(x, *weights, kind == "situ", beta, linear_beta, weight, eps, residual, out)
    return out


def head_linear(x: Array, w: Array) -> Array:
    """See `reference.head_linear`."""
    if x.dtype != np.float32:
        return reference.head_linear(x, w)
    _, outputs, inputs = w.shape
    out = np.empty((*x.shape[:2], outputs + x.shape[2] - inputs), np.float32)
    _native.head_linear(_c(x), w, out)
    return out


def rms_norm(x: Array, norm: RMSNorm) -> Array:
    """See `reference.rms_norm`."""
    if x.dtype != np.float32:
        return reference.rms_norm(x, norm)
    out = np.empty(x.shape, np.float32)
    _native.rms_norm(x, norm.weight, norm.eps, out)
    return out


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """See `reference.gated`."""
    if gate.dtype != np.float32:
        return reference.gated(gate, up, activation)
    out = np.empty(gate.shape, np.float32)
    _native.gated(gate, up, activation.kind == "situ", activation.beta, activation.linear_beta, out)
    return out


def sigmoid_gate(x: Array, gate: Array, norm: RMSNorm | None = None) -> Array:
    """See `reference.sigmoid_gate`."""
    if x.dtype != np.float32:
        return reference.sigmoid_gate(x, gate, norm)
    out = np.empty(gate.shape, np.float32)
    weight, eps = norm or _NO_NORM
    _native.sigmoid_gate(_c(x), gate, weight, eps, out)
    return out


def kda_inputs(qkv: Array, f: Array, beta: Array, constants: KDAConstants) -> DeltaInputs:
    """See `reference.kda_inputs`."""
    if qkv.dtype != np.float32:
        return reference.kda_inputs(qkv, f, beta, constants)
    rows, heads = beta.shape
    parts = np.empty((4, rows, heads, f.shape[1] // heads), np.float32)
    betas = np.empty((rows, heads), np.float32)
    _native.kda_inputs(_c(qkv), _c(f), beta, *constants, parts, betas)
    q, k, v, decay = parts
    return DeltaInputs(q, k, v, decay, betas)


def _angles(positions: IntArray, inv_freq: Array) -> tuple[Array, Array]:
    """cos and sin [B, R/2]. The last ones are kept: every layer of a step asks for the same."""
    global _rotation  # noqa: PLW0603
    if _rotation is None or _rotation[0] is not positions or _rotation[1] is not inv_freq:
        angle = positions[:, None] * inv_freq.astype(np.float64)
        _rotation = positions, inv_freq, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return _rotation[2:]


def short_conv(x: Array, taps: Array, history: Array, starts: IntArray) -> Array:
    """See `reference.short_conv`."""
    if x.dtype != np.float32:
        return reference.short_conv(x, taps, history, starts)
    out = np.empty(x.shape, np.float32)
    _native.short_conv(x, taps, _c(history), starts, out)
    return out


def short_conv_ring(
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
    """See `reference.short_conv_ring`."""
    if x.dtype != np.float32:
        return reference.short_conv_ring(
            x,
            taps,
            windows=windows,
            ring=ring,
            tail=tail,
            cursor=cursor,
            num_before=num_before,
            advance=advance,
        )
    out = np.empty(x.shape, np.float32)
    _native.short_conv_ring(x, taps, *windows, ring, tail, cursor, num_before, advance, out)
    return out


def delta_scan(
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
    """See `reference.delta_scan`."""
    if v.dtype != np.float32:
        return reference.delta_scan(
            q, k, v, decay, beta, windows=windows, state=state, records=records,
            num_folded=num_folded, num_replayed=num_replayed, advance=advance,
        )  # fmt: skip
    out = np.empty(v.shape, np.float32)
    own: tuple[Any, ...] = records if records is not None else (None, None, None)
    _native.delta_scan(
        _c(q), _c(k), _c(v), _c(decay), _c(beta), windows.slots, windows.starts, state, *own,
        num_folded, num_replayed, advance, out,
    )  # fmt: skip
    return out


def delta_scan_planes(
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
    """See `reference.delta_scan_planes`."""
    if v.dtype != np.float32:
        return reference.delta_scan_planes(
            q, k, v, decay, beta, windows=windows, planes=planes, tail=tail,
            plane=plane, advance=advance, last=last,
        )  # fmt: skip
    out = np.empty(v.shape, np.float32)
    own: tuple[Any, ...] = tail if tail.u.size else (None, None, None)
    _native.delta_scan_planes(
        _c(q), _c(k), _c(v), _c(decay), _c(beta), windows.slots, windows.starts, planes, *own,
        plane, advance, last, out,
    )  # fmt: skip
    return out


def attention(
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
    """See `reference.attention`; here with a running maximum over blocks of 64 positions."""
    if q.dtype != np.float32 or keys.dtype == np.float64:
        return reference.attention(
            q, k, v, keys=keys, values=values, windows=windows, positions=positions, scale=scale,
            inv_freq=inv_freq,
        )  # fmt: skip
    if keys.dtype != np.float32:
        keys, values = keys.view(np.uint16), values.view(np.uint16)
    cos, sin = (None, None) if inv_freq is None else _angles(positions, inv_freq)
    out = np.empty((len(q), q.shape[1], values.shape[3]), np.float32)
    _native.attention(q, k, v, keys, values, *windows, positions, scale, cos, sin, out)
    return out


def attention_block(
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
    """See `reference.attention_block`."""
    if isinstance(weights.out, np.ndarray) or keys.dtype == np.float64:
        return reference.attention_block(
            x, weights, keys=keys, values=values, windows=windows, positions=positions, norm=norm,
            residual=residual,
        )  # fmt: skip
    if keys.dtype != np.float32:
        keys, values = keys.view(np.uint16), values.view(np.uint16)
    *products, num_heads, scale, inv_freq = weights
    cos, sin = (None, None) if inv_freq is None else _angles(positions, inv_freq)
    out = np.empty((len(x), weights.out.rows), np.float32)
    weight, eps = norm or _NO_NORM
    _native.attention_block(
        x,
        *products,
        num_heads,
        scale,
        cos,
        sin,
        keys,
        values,
        *windows,
        positions,
        weight,
        eps,
        residual,
        out,
    )
    return out


def mix_streams(streams: list[Array], score_weight: Array, eps: float, norm: RMSNorm) -> Array:
    """See `reference.mix_streams`."""
    if streams[0].dtype != np.float32:
        return reference.mix_streams(streams, score_weight, eps, norm)
    out = np.empty(streams[0].shape, np.float32)
    if len(out):
        _native.mix_streams(streams, score_weight, eps, *norm, out)
    return out


def route(
    logits: Array, bias: Array | None, *, top_k: int, scale: float, normalise: bool
) -> tuple[IntArray, Array]:
    """See `reference.route`."""
    if logits.dtype != np.float32:
        return reference.route(logits, bias, top_k=top_k, scale=scale, normalise=normalise)
    ids, weights = np.empty((len(logits), top_k), np.int64), np.empty((len(logits), top_k), np.float32)
    _native.route(logits, bias, scale, normalise, ids, weights)
    return ids, weights


def noisy_argmax(scores: Array, seed: int, position: int) -> int:
    """See `reference.noisy_argmax`, whose own logarithms decide between scores too close to call."""
    found = _native.noisy_candidates(scores, int(np.argmax(scores)), seed, position)
    if len(found) == 1:
        return int(found[0][0])
    ids, words = np.array(found, np.uint64).T
    return int(ids[np.argmax(scores[ids] + reference.gumbel(words))])


def experts(
    x: Array,
    ids: IntArray,
    weights: Array,
    *,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    activation: Activation,
) -> Array:
    """See `reference.experts`."""
    if isinstance(gate, np.ndarray):
        return reference.experts(x, ids, weights, gate=gate, up=up, down=down, activation=activation)
    out = np.empty((len(x), down.rows), np.float32)
    _native.experts(
        x, _c(ids), _c(weights), gate, up, down,
        activation.kind == "situ", activation.beta, activation.linear_beta, out,
    )  # fmt: skip
    return out


_NO_LATENT = (None, None, (None, 0.0), None, None)
_NO_MLP = (None, None, None, None)


def mixture(
    x: Array,
    weights: MixtureWeights,
    activation: Activation,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """See `reference.mixture`."""
    if isinstance(weights.gate, np.ndarray):
        return reference.mixture(x, weights, activation, norm=norm, residual=residual)
    *routed, latent, shared = weights
    down, down_bias, latent_norm, up, up_bias = latent or _NO_LATENT
    kind, beta, linear_beta = activation
    weight, eps = norm or _NO_NORM
    out = np.empty(x.shape, np.float32)
    if len(x):
        _native.mixture(
            x, *routed, down, down_bias, *latent_norm, up, up_bias, *(shared or _NO_MLP),
            kind == "situ", beta, linear_beta, weight, eps, residual, out,
        )  # fmt: skip
    return out
