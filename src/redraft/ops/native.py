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
from redraft.ops import Activation, Array, IntArray, Matrix, Records, Windows, reference
from redraft.ops.raw import RawTensor, plain

route = reference.route
gumbel_noise = reference.gumbel_noise


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


_rotation: tuple[IntArray, Array, Array, Array] | None = None


def _c(x: Array) -> Array:
    return x if x.flags.c_contiguous else np.ascontiguousarray(x)


def _dense_rows(x: Array) -> Array:
    """The array, if only its rows lie apart; else a copy."""
    dense = x.itemsize
    for size, stride in zip(x.shape[:0:-1], x.strides[:0:-1], strict=True):
        if stride != dense and size != 1:
            return np.ascontiguousarray(x)
        dense *= size
    return x


def embed(table: Matrix, tokens: IntArray) -> Array:
    """See `reference.embed`."""
    if isinstance(table, np.ndarray):
        return reference.embed(table, tokens)
    out = np.empty((len(tokens), table.columns), np.float32)
    _native.embed(table, tokens, out)
    return out


def linear(x: Array, w: Matrix, bias: Array | None = None) -> Array:
    """See `reference.linear`."""
    if isinstance(w, np.ndarray):
        return reference.linear(x, w, bias)
    out = np.empty((len(x), w.rows), np.float32)
    if len(x):
        _native.linear(w, _c(x), bias, out)
    return out


def head_linear(x: Array, w: Array) -> Array:
    """See `reference.head_linear`."""
    if x.dtype != np.float32:
        return reference.head_linear(x, w)
    out = np.empty((len(x), w.shape[0], w.shape[1]), np.float32)
    _native.head_linear(_c(x), w, out)
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """See `reference.rms_norm`."""
    if x.dtype != np.float32:
        return reference.rms_norm(x, weight, eps)
    out = np.empty(x.shape, np.float32)
    _native.rms_norm(_c(x), weight, eps, out)
    return out


def l2_norm(x: Array, eps: float) -> Array:
    """See `reference.l2_norm`."""
    if x.dtype != np.float32:
        return reference.l2_norm(x, eps)
    out = np.empty(x.shape, np.float32)
    _native.l2_norm(_c(x), eps, out)
    return out


def sigmoid(x: Array) -> Array:
    """See `reference.sigmoid`."""
    if x.dtype != np.float32:
        return reference.sigmoid(x)
    out = np.empty(x.shape, np.float32)
    _native.sigmoid(_c(x), out)
    return out


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """See `reference.gated`."""
    if gate.dtype != np.float32:
        return reference.gated(gate, up, activation)
    out = np.empty(gate.shape, np.float32)
    gate, up = _dense_rows(gate), _dense_rows(up)
    _native.gated(gate, up, activation.kind == "situ", activation.beta, activation.linear_beta, out)
    return out


def kda_decay(f: Array, neg_exp_a: Array, lower_bound: float | None) -> Array:
    """See `reference.kda_decay`."""
    if f.dtype != np.float32:
        return reference.kda_decay(f, neg_exp_a, lower_bound)
    out = np.empty(f.shape, np.float32)
    _native.decay(_c(f), neg_exp_a, lower_bound, out)
    return out


def rope(x: Array, positions: IntArray, inv_freq: Array) -> Array:
    """See `reference.rope`."""
    if x.dtype != np.float32:
        return reference.rope(x, positions, inv_freq)
    global _rotation  # noqa: PLW0603  (a cache of the last angles: every layer of a step asks for the same)
    if _rotation is None or _rotation[0] is not positions or _rotation[1] is not inv_freq:
        angle = positions[:, None] * inv_freq.astype(np.float64)
        _rotation = positions, inv_freq, np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    out = np.empty(x.shape, np.float32)
    _native.rope(_dense_rows(x), _rotation[2], _rotation[3], out)
    return out


def short_conv(x: Array, weight: Array, history: Array, starts: IntArray) -> Array:
    """See `reference.short_conv`."""
    if x.dtype != np.float32:
        return reference.short_conv(x, weight, history, starts)
    out = np.empty(x.shape, np.float32)
    _native.short_conv(_c(x), _c(weight.T), _c(history), starts, out)
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
    q: Array, keys: Array, values: Array, *, windows: Windows, positions: IntArray, scale: float
) -> Array:
    """See `reference.attention`; here with a running maximum over blocks of 64 positions."""
    if q.dtype != np.float32 or keys.dtype == np.float64:
        return reference.attention(q, keys, values, windows=windows, positions=positions, scale=scale)
    if keys.dtype != np.float32:
        keys, values = keys.view(np.uint16), values.view(np.uint16)
    out = np.empty((len(q), q.shape[1], values.shape[3]), np.float32)
    _native.attention(_c(q), keys, values, windows.slots, windows.starts, positions, scale, out)
    return out


def mix_streams(streams: list[Array], score_weight: Array, eps: float) -> Array:
    """See `reference.mix_streams`."""
    if streams[0].dtype != np.float32:
        return reference.mix_streams(streams, score_weight, eps)
    out = np.empty(streams[0].shape, np.float32)
    if len(out):
        _native.mix_streams([_c(stream) for stream in streams], score_weight, eps, out)
    return out


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
        _c(x), _c(ids), _c(weights), gate, up, down,
        activation.kind == "situ", activation.beta, activation.linear_beta, out,
    )  # fmt: skip
    return out
