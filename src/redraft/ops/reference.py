"""Every op in NumPy: readable, row-independent, in float32 or (given float64 arrays) as an oracle in float64.

Matrix products take one row at a time, so that a row's bits cannot depend on its neighbours; a block of
weights that fits the cache serves all rows before the next block is read.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from redraft.config import ComputeType
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
)
from redraft.ops.raw import RawTensor

_BLOCK_BYTES = 2**22  # of weights, reused by all rows while they are in the cache


def description() -> str:
    """What is in use."""
    return "reference operations in NumPy (slow): no native operations were compiled for this processor"


def arithmetic() -> str:
    """See `Ops.arithmetic`."""
    return "reference"


def matrix(raw: RawTensor, compute: ComputeType) -> Matrix:
    """Dequantize to a plain array [.., N, K] of the compute type."""
    return raw.to_array(compute)


def matrix_bytes(matrix: Matrix) -> int:
    """Bytes that a matrix occupies."""
    return int(matrix.nbytes)


def embed(table: Matrix, tokens: IntArray) -> Array:
    """Rows `tokens` of `table` [vocab, D] → [B, D], a copy."""
    return np.asarray(table[tokens])


def linear(
    x: Array,
    w: Matrix,
    bias: Array | None = None,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """residual + (norm(x) [B, K] · wᵀ [K, N] + bias [N]) → [B, N]; what is None is left out."""
    num_outputs, num_inputs = w.shape
    x = np.ascontiguousarray(x) if norm is None else rms_norm(x, norm)
    out = np.empty((len(x), num_outputs), x.dtype)
    step = max(1, _BLOCK_BYTES // (num_inputs * w.itemsize))
    for first in range(0, num_outputs, step):
        block = w[first : first + step]
        for row, y in zip(x, out, strict=True):
            np.dot(block, row, out=y[first : first + step])
    if bias is not None:
        out = out + bias
    return out if residual is None else residual + out


def mlp(
    x: Array,
    weights: MLPWeights,
    activation: Activation,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """residual + W_down gated(W_gate norm(x), W_up norm(x)) → [B, D]; what is None is left out."""
    gate, up = np.split(linear(x, weights.gate_up, weights.gate_up_bias, norm=norm), 2, axis=-1)
    return linear(gated(gate, up, activation), weights.down, weights.down_bias, residual=residual)


def head_linear(x: Array, w: Array) -> Array:
    """x [B, H, K + R], w [H, N, K] → [B, H, N + R]: the first K numbers of head h through its own matrix; the
    rest follows as it is.
    """
    num_inputs = w.shape[2]
    out = np.empty((len(x), w.shape[0], w.shape[1]), x.dtype)
    for row, y in zip(x, out, strict=True):
        y[:] = np.matmul(w, row[:, :num_inputs, None])[:, :, 0]
    return np.concatenate([out, x[..., num_inputs:]], axis=-1)


def rms_norm(x: Array, norm: RMSNorm) -> Array:
    """weight · x / sqrt(mean(x²) + eps) over the first numbers of the last axis, as many as the weight has;
    the rest follows as it is.
    """
    size = len(norm.weight)
    part = np.ascontiguousarray(x[..., :size])
    part = norm.weight * (part / np.sqrt(np.mean(part * part, axis=-1, keepdims=True) + norm.eps))
    return np.concatenate([part, x[..., size:]], axis=-1)


def l2_norm(x: Array, eps: float) -> Array:
    """x / sqrt(Σ x² + eps) over the last axis."""
    x = np.ascontiguousarray(x)
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps))


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(−x))."""
    with np.errstate(over="ignore"):  # exp overflows to inf, and 1/inf = 0 is the right limit
        return np.asarray(1 / (1 + np.exp(-np.ascontiguousarray(x))))


def gated(gate: Array, up: Array, activation: Activation) -> Array:
    """`swiglu`: a σ(a) b. `situ`: β tanh(a/β) σ(a) · λ tanh(b/λ), with λ ≤ 0 leaving b as it is."""
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    if activation.kind == "swiglu":
        return gate * sigmoid(gate) * up
    beta, linear_beta = activation.beta, activation.linear_beta
    if linear_beta > 0:
        up = linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * up


def sigmoid_gate(x: Array, gate: Array, norm: RMSNorm | None = None) -> Array:
    """norm(x) [B, H, V] · σ(gate [B, H·V]) → [B, H·V]."""
    heads = x if norm is None else rms_norm(x, norm)
    return heads.reshape(len(x), -1) * sigmoid(gate)


def kda_inputs(qkv: Array, f: Array, beta: Array, constants: KDAConstants) -> DeltaInputs:
    """From qkv [B, 3·H·K] after its convolution, f [B, H·K] and beta [B, H]: q and k scaled to length one, q
    then by K^−½; v as it is; decay of f; σ(beta).
    """
    num_heads = len(constants.neg_exp_a)
    q, k, v = np.moveaxis(qkv.reshape(len(qkv), 3, num_heads, -1), 1, 0)  # [B, H, K] each
    decay = kda_decay(f.reshape(v.shape), constants.neg_exp_a, constants.lower_bound)
    q = l2_norm(q, constants.l2_eps) * q.dtype.type(q.shape[2] ** -0.5)
    return DeltaInputs(q, l2_norm(k, constants.l2_eps), v, decay, sigmoid(beta))


def kda_decay(f: Array, neg_exp_a: Array, lower_bound: float | None) -> Array:
    """Factors exp(g) in (0, 1] from f [B, H, K] and −exp(A_log) [H].

    g = −exp(A_log) · softplus(f); with a lower bound, g = lower_bound · σ(exp(A_log) · f).
    """
    per_head = neg_exp_a[:, None]
    if lower_bound is None:
        return np.asarray(np.exp(per_head * np.logaddexp(f, np.zeros((), f.dtype))))
    return np.asarray(np.exp(lower_bound * sigmoid(-per_head * f)))


def rope(x: Array, positions: IntArray, inv_freq: Array) -> Array:
    """Rotate x [B, H, D] by positions [B]: pair (i, i + R/2) of the first R = 2·len(inv_freq) channels."""
    angle = positions[:, None].astype(np.float64) * inv_freq.astype(np.float64)
    cos, sin = (trig(angle).astype(x.dtype)[:, None, :] for trig in (np.cos, np.sin))  # [B, 1, R/2]
    half = len(inv_freq)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=-1)


def short_conv(x: Array, taps: Array, history: Array, starts: IntArray) -> Array:
    """x [B, C], taps [W, C], history [N, W−1, C]: the inputs before each window, oldest first → SiLU(conv)
    [B, C].
    """
    out = np.empty(x.shape, x.dtype)
    for before, first, end in zip(history, starts[:-1], starts[1:], strict=True):
        inputs = np.concatenate([before, x[first:end]])
        total = inputs[: end - first] * taps[0]
        for i, tap in enumerate(taps[1:], start=1):
            total = total + inputs[i : i + end - first] * tap
        out[first:end] = total
    return out * sigmoid(out)


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
    """`short_conv` with the inputs before window n in ring [S, R, C]: W−1 committed columns from place
    cursor[n] on, then num_before[n] proposed ones.

    The window's rows are written behind these, as many as there are places; of the others, the last is
    written to tail [S, C]. With `advance[n]` the last W−1 columns replace the committed ones instead.
    """
    keep, size = len(taps) - 1, ring.shape[1]

    def places(n: int, first: int, count: int) -> IntArray:
        return np.asarray((cursor[n] + first + np.arange(count)) % size)

    history = np.stack(
        [ring[slot, places(n, num_before[n], keep)] for n, slot in enumerate(windows.slots)]
    )  # [N, W − 1, C]
    y = short_conv(x, taps, history, windows.starts)
    for n, slot in enumerate(windows.slots):
        new = x[windows.starts[n] : windows.starts[n + 1]]
        if advance[n]:
            ring[slot, places(n, 0, keep)] = np.concatenate([history[n], new])[len(new) :]
            continue
        fitting = min(len(new), size - keep - int(num_before[n]))
        ring[slot, places(n, keep + num_before[n], fitting)] = new[:fitting]
        if fitting < len(new):
            assert tail is not None, "a window that outgrows its ring has a tail"
            tail[slot] = new[-1]
    return y


def _fold(state: Array, decay: Array, k: Array, u: Array) -> None:
    """S ← diag(decay) S + k uᵀ, in place: state [HV, K, V], decay [HV, Kd], k [H, K], u [HV, V]."""
    state *= decay[:, :, None]
    state += _outer(k, u)


def _outer(k: Array, u: Array) -> Array:
    return np.asarray(_per_value_head(k, len(u))[:, :, None] * u[:, None, :])


def _per_value_head(x: Array, num_value_heads: int) -> Array:
    return x if len(x) == num_value_heads else np.repeat(x, num_value_heads // len(x), axis=0)


def _read(state: Array, x: Array) -> Array:
    """Sᵀx per head: state [HV, K, V], x [H, K] → [HV, V]."""
    return np.asarray(np.matmul(_per_value_head(x, len(state))[:, None, :], state)[:, 0, :])


def _step(state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array) -> tuple[Array, Array]:
    """One token of the delta rule on `state`, in place → (u, o), each [HV, V]."""
    state *= decay[:, :, None]
    u = beta[:, None] * (v - _read(state, k))
    state += _outer(k, u)
    return u, _read(state, q)


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
    """S ← diag(decay) S;  u = β (v − Sᵀk);  S ← S + k uᵀ;  o = Sᵀq, for each token of each window → o [B, HV,
    V].

    q, k [B, H, K], v [B, HV, V], decay [B, HV, Kd], beta [B, HV], state [S, HV, K, V]. Before the first token
    of window n: the slot's first `num_folded[n]` records, already committed, are folded into `state` and it
    is written back; then its first `num_replayed[n]` records, proposed earlier, are folded into the working
    copy alone. With `advance[n]` the state after the last token is written to `state`; otherwise each token's
    record is written to `records` from index `num_replayed[n]` on, and `state` keeps its value.
    """
    out = np.empty_like(v)
    for n, slot in enumerate(windows.slots):
        working = state[slot].copy()
        for r in range(num_folded[n] + num_replayed[n]):
            assert records is not None, "only records can be folded"
            _fold(working, records.decay[slot, r], records.k[slot, r], records.u[slot, r])
        if num_folded[n]:
            state[slot] = working
        for t, row in enumerate(range(windows.starts[n], windows.starts[n + 1])):
            u, out[row] = _step(working, q[row], k[row], v[row], decay[row], beta[row])
            if not advance[n]:
                assert records is not None, "a window that does not advance the state needs records"
                at = num_replayed[n] + t
                records.decay[slot, at], records.k[slot, at], records.u[slot, at] = decay[row], k[row], u
        if advance[n]:
            state[slot] = working
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
    """The same recurrence as `delta_scan`, from `planes[slot, plane[n]]`, planes [S, P, HV, K, V] → o [B, HV,
    V].

    Without `advance[n]` the state after token t goes to plane (plane[n] + 1 + t) mod P, except where that is
    `last[n]`, the plane of the committed state: that token's record goes to `tail` (R = 1). With `advance[n]`
    the state after the last token replaces the plane it started from.
    """
    out = np.empty_like(v)
    num_planes = planes.shape[1]
    for n, slot in enumerate(windows.slots):
        working = planes[slot, plane[n]].copy()
        for t, row in enumerate(range(windows.starts[n], windows.starts[n + 1])):
            u, out[row] = _step(working, q[row], k[row], v[row], decay[row], beta[row])
            at = (plane[n] + 1 + t) % num_planes
            if advance[n]:
                continue
            if at == last[n]:
                tail.decay[slot, 0], tail.k[slot, 0], tail.u[slot, 0] = decay[row], k[row], u
            else:
                planes[slot, at] = working
        if advance[n]:
            planes[slot, plane[n]] = working
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
    """softmax(scale · q Kᵀ) V over positions 0 … positions[b] of the row's slot → [B, H, V].

    q [B, H, K], k [B, G, K], v [B, G, V]; each of the G key heads serves H/G query heads. With `inv_freq`, q
    and k are rotated by their positions first, see `rope`. Then k and v are written to keys [S, context, G,
    K] and values [S, context, G, V] at the row's slot and position, before any row attends; v is None where
    `values` is a part of `keys`, k where the rows are there already. Modifies nothing else.
    """
    if inv_freq is not None:
        q, k = rope(q, positions, inv_freq), None if k is None else rope(k, positions, inv_freq)
    for slot, first, end in zip(windows.slots, windows.starts[:-1], windows.starts[1:], strict=True):
        if k is not None:
            keys[slot, positions[first:end]] = k[first:end]
        if v is not None:
            values[slot, positions[first:end]] = v[first:end]
    return _attend(q, keys, values, windows, positions, scale)


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
    """residual + W_out attention(W_qkv norm(x)) → [B, D]; what is None is left out. Modifies what `attention`
    does.
    """
    heads = linear(x, weights.qkv, weights.qkv_bias, norm=norm).reshape(len(x), -1, keys.shape[3])
    q, k, v = np.split(heads, [weights.num_heads, weights.num_heads + keys.shape[2]], axis=1)
    o = attention(
        q, k, v, keys=keys, values=values, windows=windows, positions=positions, scale=weights.scale,
        inv_freq=weights.inv_freq,
    )  # fmt: skip
    return linear(o.reshape(len(x), -1), weights.out, weights.out_bias, residual=residual)


def _attend(
    q: Array, keys: Array, values: Array, windows: Windows, positions: IntArray, scale: float
) -> Array:
    num_groups = keys.shape[2]
    out = np.empty((len(q), q.shape[1], values.shape[3]), q.dtype)
    for slot, first, end in zip(windows.slots, windows.starts[:-1], windows.starts[1:], strict=True):
        for row in range(first, end):
            length = positions[row] + 1
            k = keys[slot, :length].astype(q.dtype, copy=False).transpose(1, 2, 0)  # [G, K, length]
            v = values[slot, :length].astype(q.dtype, copy=False).transpose(1, 0, 2)  # [G, length, V]
            scores = np.matmul(q[row].reshape(num_groups, -1, q.shape[2]), k) * scale  # [G, H/G, length]
            out[row] = np.matmul(_softmax(scores), v).reshape(out.shape[1:])
    return out


def _softmax(x: Array) -> Array:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return np.asarray(e / np.sum(e, axis=-1, keepdims=True))


def route(
    logits: Array, bias: Array | None, *, top_k: int, scale: float, normalise: bool
) -> tuple[IntArray, Array]:
    """Sigmoid scores s of logits [B, E] → ids, weights [B, top_k]: the largest s + bias first, ties to the
    lower id.

    The weights are s of the chosen, divided by their sum where `normalise`, times `scale`.
    """
    scores = sigmoid(logits)
    ranked = scores if bias is None else scores + bias
    ids = np.argsort(-ranked, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=-1)
    if normalise:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids, weights * scale


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
    """Σ_j weights[b, j] · down[e] gated(gate[e] x, up[e] x), e = ids[b, j], summed in the order of j → [B,
    D].

    x [B, D], gate and up [E, F, D], down [E, D, F].
    """
    out = np.zeros((len(x), down.shape[1]), x.dtype)
    for b, row in enumerate(x):
        for e, share in zip(ids[b], weights[b], strict=True):
            hidden = gated(np.dot(gate[e], row), np.dot(up[e], row), activation)
            out[b] += share * np.dot(down[e], hidden)
    return out


def mixture(
    x: Array,
    weights: MixtureWeights,
    activation: Activation,
    *,
    norm: RMSNorm | None = None,
    residual: Array | None = None,
) -> Array:
    """residual + experts(norm(x)) + shared(norm(x)) → [B, D], added in this order; what is None is left out.

    With a latent space the routed experts see `latent.down` of the row, and what they say goes through its
    norm and `latent.up`.
    """
    if norm is not None:
        x = rms_norm(x, norm)
    ids, shares = route(
        linear(x, weights.router, weights.router_bias), weights.score_bias,
        top_k=weights.top_k, scale=weights.scale, normalise=weights.normalise,
    )  # fmt: skip
    latent = weights.latent
    inner = x if latent is None else linear(x, latent.down, latent.down_bias)
    y = experts(
        inner, ids, shares, gate=weights.gate, up=weights.up, down=weights.down, activation=activation
    )
    if latent is not None:
        y = linear(y, latent.up, latent.up_bias, norm=latent.norm, residual=residual)
    elif residual is not None:
        y = residual + y
    return y if weights.shared is None else mlp(x, weights.shared, activation, residual=y)


def mix_streams(streams: list[Array], score_weight: Array, eps: float, norm: RMSNorm) -> Array:
    """norm(Σ_j p_j stream_j), p = softmax over j of Σ rms_norm(stream_j) · score_weight; streams [B, D]."""
    scores = [np.sum(rms_norm(s, RMSNorm(score_weight, eps)), axis=-1) for s in streams]
    share = _softmax(np.stack(scores, axis=-1))  # [B, J]
    total = share[:, :1] * streams[0]
    for j, stream in enumerate(streams[1:], start=1):
        total = total + share[:, j : j + 1] * stream
    return rms_norm(total, norm)


def noisy_argmax(scores: Array, seed: int, position: int) -> int:
    """The index of the largest of scores [vocab] (float64) plus `gumbel_noise`; the first of equals."""
    return int(np.argmax(scores + gumbel_noise(seed, position, len(scores))))


def gumbel_noise(seed: int, position: int, size: int) -> Array:
    """−log(−log(uniform)) for indices 0 … size−1 in float64, from Philox 4×64-10.

    Key (seed, 0); index v takes word v mod 4 of the block with counter (v div 4 + 1, position, 0, 0), and the
    uniform number is (its upper 53 bits + ½) · 2⁻⁵³.
    """
    generator = np.random.Philox(
        counter=np.array([0, position, 0, 0], np.uint64), key=np.array([seed, 0], np.uint64)
    )
    return gumbel(generator.random_raw(4 * math.ceil(size / 4))[:size])


def gumbel(words: Array) -> Array:
    """Standard Gumbel numbers from random words of 64 bits: see `gumbel_noise`."""
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))
