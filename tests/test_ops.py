"""Each op computes what its docstring says, and a row's bits depend on nothing but that row."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.ops import SWIGLU, Activation, KDAConstants, MLPWeights, Records, RMSNorm, Windows, reference

SITU = Activation("situ", 4.0, 25.0)
rows = st.integers(1, 40)
seeds = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


W = normal(1, 37, 65)
HEADS = normal(2, 3, 5, 16)
BIG = normal(3, 2200, 600)  # more than one block of weights
NORM = RMSNorm(1 + 0.1 * normal(4, 65), 1e-5)
HEAD_NORM = RMSNorm(NORM.weight[:15], 1e-5)
MLP = MLPWeights(normal(10, 38, 65), normal(11, 38), normal(12, 65, 19), None)
EXPERTS = [normal(5, 6, 9, 16), normal(6, 6, 9, 16), normal(7, 6, 16, 9)]
SCORE = normal(8, 65)
NEG_EXP_A = -np.exp(normal(9, 4))

# Ops of a row alone: x [B, 65] or made from it.
ROWWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda x: reference.linear(x, W),
    "linear in blocks": lambda x: reference.linear(np.tile(x, (1, 10))[:, :600], BIG),
    "head_linear": lambda x: reference.head_linear(x[:, :48].reshape(-1, 3, 16), HEADS),
    "linear of normalised rows": lambda x: reference.linear(x, W, norm=NORM, residual=x[:, :37]),
    "mlp": lambda x: reference.mlp(x, MLP, SITU, norm=NORM, residual=x),
    "rms_norm": lambda x: reference.rms_norm(x, NORM),
    "rms_norm of heads": lambda x: reference.rms_norm(x[:, :60].reshape(-1, 4, 15), HEAD_NORM),
    "sigmoid_gate": lambda x: reference.sigmoid_gate(x[:, :60].reshape(-1, 4, 15), x[:, 5:], HEAD_NORM),
    "kda_inputs": lambda x: np.concatenate(
        [a.reshape(len(x), -1) for a in reference.kda_inputs(
            x[:, :60], x[:, 40:60], x[:, 60:64], KDAConstants(NEG_EXP_A, -5.0, 1e-6)
        )], axis=1,
    ),
    "l2_norm": lambda x: reference.l2_norm(x[:, :64].reshape(-1, 4, 16), 1e-6),
    "sigmoid": reference.sigmoid,
    "swiglu": lambda x: reference.gated(x, x[:, ::-1], SWIGLU),
    "situ": lambda x: reference.gated(x, x[:, ::-1], SITU),
    "kda_decay": lambda x: reference.kda_decay(x[:, :64].reshape(-1, 4, 16), NEG_EXP_A, None),
    "kda_decay bounded": lambda x: reference.kda_decay(x[:, :64].reshape(-1, 4, 16), NEG_EXP_A, -5.0),
    "route": lambda x: np.concatenate(
        [a.astype("f4") for a in reference.route(x[:, :6], None, top_k=2, scale=2.0, normalise=True)], axis=1
    ),
    "experts": lambda x: reference.experts(
        x[:, :16], np.argsort(x[:, :6])[:, :2], np.abs(x[:, 6:8]),
        gate=EXPERTS[0], up=EXPERTS[1], down=EXPERTS[2], activation=SITU,
    ),
    "mix_streams": lambda x: reference.mix_streams([x, 2 * x[:, ::-1], x * x], SCORE, 1e-5, NORM),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWWISE)
@given(count=rows, seed=seeds)
@settings(max_examples=15, deadline=None)
def test_a_row_does_not_depend_on_the_others(name: str, count: int, seed: int) -> None:
    op, x = ROWWISE[name], 3 * normal(seed, count, 65)
    together = op(x)
    for i in {0, count // 2, count - 1}:
        assert np.array_equal(together[i], op(x[i : i + 1])[0])


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=seeds)
@settings(max_examples=20, deadline=None)
def test_windows_do_not_depend_on_each_other(lengths: list[int], seed: int) -> None:
    """Scan, conv and attention: a window alone gives the bits that it gives among others."""
    starts = ints(0, *np.cumsum(lengths))
    num, total = len(lengths), sum(lengths)
    q, k, v = normal(seed, total, 2, 8), normal(seed + 1, total, 2, 8), normal(seed + 2, total, 4, 6)
    decay, beta = np.abs(normal(seed + 3, total, 4, 8)) % 1, np.abs(normal(seed + 4, total, 4)) % 1
    state, history, taps = (
        normal(seed + 5, num, 4, 8, 6),
        normal(seed + 6, num, 3, 7),
        normal(seed + 7, 4, 7),
    )
    x, keys, values = (
        normal(seed + 8, total, 7),
        normal(seed + 9, num, 32, 2, 8),
        normal(seed + 10, num, 32, 2, 6),
    )
    new_keys, new_values = normal(seed + 11, total, 2, 8), normal(seed + 12, total, 2, 6)
    positions = np.concatenate([5 + np.arange(n) for n in lengths])

    def run(pick: slice, slots: np.ndarray, bounds: np.ndarray) -> list[np.ndarray]:
        windows, zero = Windows(slots, bounds), np.zeros(len(slots), np.int64)
        scan = reference.delta_scan(
            q[pick], k[pick], v[pick], decay[pick], beta[pick],
            windows=windows, state=state.copy(), records=None,
            num_folded=zero, num_replayed=zero, advance=np.ones(len(slots), np.bool_),
        )  # fmt: skip
        conv = reference.short_conv(x[pick], taps, history[slots], bounds)
        attention = reference.attention(
            q[pick], new_keys[pick], new_values[pick], keys=keys.copy(), values=values.copy(),
            windows=windows, positions=positions[pick], scale=0.3, inv_freq=np.array([1.0, 0.1]),
        )  # fmt: skip
        return [scan, conv, attention]

    together = run(slice(None), np.arange(num), starts)
    for n in range(num):
        pick = slice(starts[n], starts[n + 1])
        for whole, alone in zip(together, run(pick, ints(n), ints(0, lengths[n])), strict=True):
            assert np.array_equal(whole[pick], alone)


def scan_inputs(length: int, heads: int, value_heads: int, decay_dim: int) -> list[np.ndarray]:
    q, k = normal(1, length, heads, 8), normal(2, length, heads, 8)
    v, beta = normal(3, length, value_heads, 6), np.abs(normal(5, length, value_heads)) % 1
    decay = np.exp(-np.abs(normal(4, length, value_heads, decay_dim)))
    return [q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, decay, beta]


def scan(
    inputs: list[np.ndarray], state: np.ndarray, records: Records | None = None, **counts: int
) -> np.ndarray:
    length = len(inputs[0])
    return reference.delta_scan(
        *inputs,
        windows=Windows(ints(0), ints(0, length)),
        state=state,
        records=records,
        num_folded=ints(counts.get("folded", 0)),
        num_replayed=ints(counts.get("replayed", 0)),
        advance=np.array([records is None]),
    )


@pytest.mark.parametrize(("heads", "value_heads", "decay_dim"), [(2, 2, 8), (2, 4, 1), (3, 3, 1)])
@pytest.mark.parametrize("length", [1, 63, 65])
def test_delta_scan_is_the_delta_rule(length: int, heads: int, value_heads: int, decay_dim: int) -> None:
    """Against the equations, written once more in float64 and head by head; KDA, and Gated DeltaNet with HV ≠
    H.
    """
    inputs = scan_inputs(length, heads, value_heads, decay_dim)
    state = normal(6, 1, value_heads, 8, 6)
    q, k, v, decay, beta = (a.astype(np.float64) for a in inputs)
    truth, s = np.empty_like(v), state[0].astype(np.float64)
    for t in range(length):
        for h in range(value_heads):
            g = h * heads // value_heads
            s[h] = np.diag(np.broadcast_to(decay[t, h], 8)) @ s[h]
            u = beta[t, h] * (v[t, h] - s[h].T @ k[t, g])
            s[h] += np.outer(k[t, g], u)
            truth[t, h] = s[h].T @ q[t, g]
    out = scan(inputs, state)
    np.testing.assert_allclose(
        out, truth, rtol=2e-4, atol=2e-5
    )  # float32 against float64, over `length` steps
    np.testing.assert_allclose(state[0], s, rtol=2e-4, atol=2e-5)  # likewise


@pytest.mark.parametrize("decay_dim", [8, 1])
def test_folding_records_repeats_the_scan(decay_dim: int) -> None:
    """A state that was folded has the bits of one that was scanned; proposing writes records and no state."""
    inputs = scan_inputs(9, 2, 4, decay_dim)
    start = normal(6, 1, 4, 8, 6)
    scanned, folded = start.copy(), start.copy()
    out = scan(inputs, scanned)
    records = Records(*(np.full((1, 9, *s), np.nan, np.float32) for s in ((4, decay_dim), (2, 8), (4, 6))))
    assert np.array_equal(scan([a[:5] for a in inputs], folded, records), out[:5])
    assert np.array_equal(folded, start)
    assert np.array_equal(scan([a[5:] for a in inputs], folded, records, replayed=5), out[5:])
    assert np.array_equal(folded, start)
    scan([a[:0] for a in inputs], folded, records, folded=9)
    assert np.array_equal(folded, scanned)


def test_planes_hold_the_state_after_each_token() -> None:
    inputs = scan_inputs(4, 2, 2, 8)
    planes = np.full((1, 4, 2, 8, 6), np.nan, np.float32)
    planes[0, 2] = start = normal(6, 2, 8, 6)
    tail = Records(*(np.full((1, 1, *s), np.nan, np.float32) for s in ((2, 8), (2, 8), (2, 6))))
    reference.delta_scan_planes(
        *inputs,
        windows=Windows(ints(0), ints(0, 4)),
        planes=planes,
        tail=tail,
        plane=ints(2),
        advance=np.array([False]),
        last=ints(2),
    )
    assert np.array_equal(planes[0, 2], start)
    for t, plane in enumerate((3, 0, 1)):
        state = start[None].copy()
        scan([a[: t + 1] for a in inputs], state)
        assert np.array_equal(planes[0, plane], state[0])
    assert np.array_equal(tail.k[0, 0], inputs[1][3])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 65])
def test_short_conv(length: int) -> None:
    x, taps, history = normal(1, length, 5), normal(2, 4, 5), normal(3, 1, 3, 5)
    inputs = np.concatenate([history[0], x]).astype(np.float64)
    truth = np.stack([np.convolve(inputs[:, c], taps[::-1, c], "valid") for c in range(5)], axis=1)
    truth = truth / (1 + np.exp(-truth))
    out = reference.short_conv(x, taps, history, ints(0, length))
    np.testing.assert_allclose(out, truth, rtol=1e-5, atol=1e-6)  # float32 against float64


@pytest.mark.parametrize("lengths", [(1, 3), (5, 4), (2, 6)])
def test_conv_columns_go_round(lengths: tuple[int, int]) -> None:
    """Two windows proposed in turn give what one gives; the ring has what a longer history had."""
    depth, total = 7, sum(lengths)
    x, taps, past = normal(1, total, 5), normal(2, 4, 5), normal(3, 3, 5)
    whole = reference.short_conv(x, taps, past[None], ints(0, total))
    ring, tail = np.full((2, 3 + depth, 5), np.nan, np.float32), np.full((2, 5), np.nan, np.float32)
    places = (8 + np.arange(3 + depth)) % (3 + depth)
    ring[1, places[:3]] = past
    for first, end in ((0, lengths[0]), (lengths[0], total)):
        y = reference.short_conv_ring(
            x[first:end], taps, windows=Windows(ints(1), ints(0, end - first)), ring=ring, tail=tail,
            cursor=ints(8), num_before=ints(first), advance=np.array([False]),
        )  # fmt: skip
        assert np.array_equal(y, whole[first:end])
    assert np.array_equal(ring[1, places[: 3 + min(total, depth)]], np.concatenate([past, x[:depth]]))
    assert np.array_equal(tail[1], x[-1] if total > depth else np.full(5, np.nan), equal_nan=True)
    assert np.isnan(ring[0]).all()
    reference.short_conv_ring(
        x, taps, windows=Windows(ints(1), ints(0, total)), ring=ring, tail=None,
        cursor=ints(8), num_before=ints(0), advance=np.array([True]),
    )  # fmt: skip
    assert np.array_equal(ring[1, places[:3]], np.concatenate([past, x])[-3:])


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention(groups: int) -> None:
    q, keys, values = normal(1, 3, 4, 8), normal(2, 1, 70, groups, 8), normal(3, 1, 70, groups, 6)
    keys[0, 66:] = values[0, 66:] = np.nan  # beyond the last position: never read
    out = reference.attention(
        q, None, None, keys=keys, values=values,
        windows=Windows(ints(0), ints(0, 3)), positions=ints(0, 63, 65), scale=0.5,
    )  # fmt: skip
    for row, position in enumerate((0, 63, 65)):
        for h in range(4):
            k, v = (a[0, : position + 1, h * groups // 4].astype(np.float64) for a in (keys, values))
            p = np.exp(0.5 * k @ q[row, h])
            np.testing.assert_allclose(
                out[row, h], p @ v / p.sum(), rtol=1e-4, atol=1e-6
            )  # float32 against float64


def test_rope_rotates_pairs_and_leaves_the_rest() -> None:
    x = normal(1, 1, 2, 10)
    out = reference.rope(x, ints(3), np.array([1.0, 0.5]))
    pairs = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * 3 * np.array([1.0, 0.5]))
    np.testing.assert_allclose(out[..., :2], pairs.real, rtol=1e-5, atol=1e-6)  # float32 against complex128
    np.testing.assert_allclose(out[..., 2:4], pairs.imag, rtol=1e-5, atol=1e-6)  # likewise
    assert np.array_equal(out[..., 4:], x[..., 4:])


def test_attention_stores_its_rows_first() -> None:
    """Each new key, rotated, and each new value is at its place before any row attends."""
    q, k, v = normal(1, 3, 4, 8), normal(2, 3, 2, 8), normal(3, 3, 2, 6)
    keys, values, positions, inv_freq = (
        normal(4, 2, 9, 2, 8),
        normal(5, 2, 9, 2, 6),
        ints(4, 5, 0),
        np.array([0.5]),
    )
    windows, expected = Windows(ints(1, 0), ints(0, 2, 3)), [keys.copy(), values.copy()]
    for row, slot in enumerate((1, 1, 0)):
        expected[0][slot, positions[row]] = reference.rope(k, positions, inv_freq)[row]
        expected[1][slot, positions[row]] = v[row]
    rest = {"windows": windows, "positions": positions, "scale": 0.5, "inv_freq": inv_freq}
    out = reference.attention(q, k, v, keys=keys, values=values, **rest)
    assert np.array_equal(keys, expected[0])
    assert np.array_equal(values, expected[1])
    assert np.array_equal(out, reference.attention(q, None, None, keys=keys, values=values, **rest))


def test_what_a_weight_does_not_cover_follows_unchanged() -> None:
    x = normal(1, 3, 3, 20)
    assert np.array_equal(reference.rms_norm(x, HEAD_NORM)[..., 15:], x[..., 15:])
    assert np.array_equal(
        reference.rms_norm(x, HEAD_NORM)[..., :15], reference.rms_norm(x[..., :15], HEAD_NORM)
    )
    assert np.array_equal(reference.head_linear(x, HEADS)[..., 5:], x[..., 16:])
    assert np.array_equal(reference.head_linear(x, HEADS)[..., :5], reference.head_linear(x[..., :16], HEADS))


def test_route_prefers_the_lower_expert_in_a_tie() -> None:
    ids, weights = reference.route(np.zeros((1, 5), np.float32), None, top_k=2, scale=3.0, normalise=True)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[1.5, 1.5]]


def test_router_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = np.array([[0.0, 0.0, 0.0]]), np.array([0.0, 1.0, 2.0])
    ids, weights = reference.route(logits, bias, top_k=1, scale=1.0, normalise=False)
    assert (ids.tolist(), weights.tolist()) == ([[2]], [[0.5]])


def test_situ_caps_both_branches() -> None:
    a, b = np.array([3.0]), np.array([40.0])
    expected = 4 * math.tanh(3 / 4) / (1 + math.exp(-3)) * 25 * math.tanh(40 / 25)
    assert reference.gated(a, b, SITU)[0] == pytest.approx(expected)  # other order of the same operations
    uncapped = reference.gated(a, b, Activation("situ", 4.0, 0.0))[0]
    assert uncapped == pytest.approx(expected / (25 * math.tanh(40 / 25)) * 40)  # likewise


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    noise = reference.gumbel_noise(7, 3, 1000)
    assert np.array_equal(noise, reference.gumbel_noise(7, 3, 1000))
    assert np.array_equal(noise[:10], reference.gumbel_noise(7, 3, 10))
    assert not np.intersect1d(noise, reference.gumbel_noise(7, 4, 1000)).size
    assert not np.intersect1d(noise, reference.gumbel_noise(8, 3, 1000)).size
    largest = reference.gumbel_noise(2**64 - 1, 2**40, 5)
    assert np.isfinite(largest).all()


def test_the_largest_noisy_score() -> None:
    scores = normal(1, 50, dtype="float64")
    assert reference.noisy_argmax(scores, 3, 4) == np.argmax(scores + reference.gumbel_noise(3, 4, 50))


def test_noise_is_philox_and_gumbel() -> None:
    """The words of the Philox generator at that key and counter, and the moments of a Gumbel distribution."""
    words = np.random.Philox(counter=[0, 5, 0, 0], key=[9, 0]).random_raw(4)
    uniform = ((words >> np.uint64(11)) + 0.5) / 2**53
    assert reference.gumbel_noise(9, 5, 4).tolist() == (-np.log(-np.log(uniform))).tolist()
    sample = reference.gumbel_noise(1, 1, 200_000)
    assert abs(sample.mean() - 0.5772) < 0.01  # 3 standard errors: 3 · 1.283 / sqrt(200000)
    assert abs(sample.std() - math.pi / math.sqrt(6)) < 0.01  # likewise
