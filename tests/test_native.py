"""The compiled operations: near the reference, and equal to themselves bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import nmse
from redraft.ops import (
    SWIGLU,
    Activation,
    AttentionWeights,
    KDAConstants,
    LatentWeights,
    MixtureWeights,
    MLPWeights,
    Records,
    RMSNorm,
    Windows,
    reference,
)
from redraft.ops.raw import RawTensor

native = pytest.importorskip("redraft.ops.native")
_native = native._native
SITU = Activation("situ", 4.0, 25.0)
ISAS = ["avx2", "avx512", "amx"]
AVAILABLE = ISAS[: ISAS.index(_native.best_isa()) + 1] if _native.best_isa() in ISAS else []
K_QUANTS = {
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
}  # bytes of a block, its halves
QUANTIZED = ["Q8_0", "Q4_0", "Q4_1", *K_QUANTS]
ENCODINGS = ["F64", "F32", "F16", "BF16", *QUANTIZED]
# NMSE against the reference in float64 with the same weights: float32 rounding; 8 bits of mantissa in weights
# (F16 only) or in activations too (tiles); 7 bits and a sign in activations.
LIMITS = {"F64": 1e-12, "F32": 1e-12, "F16": 1e-5, "BF16": 1e-12} | dict.fromkeys(QUANTIZED, 1e-3)
TILE_LIMITS = LIMITS | {"BF16": 1e-5}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    if not _native.use_isa(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    _native.use_isa(before)


@pytest.fixture
def threads() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def k_quant(encoding: str, *shape: int, seed: int) -> RawTensor:
    """Random numbers, scales and minima; the scales of blocks differ and may be negative."""
    size, halves = K_QUANTS[encoding]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (int(np.prod(shape)) // 256, size), np.uint8)
    for at in halves:
        scales = rng.uniform(-0.02, 0.02, (len(data), 1)).astype(np.float16)
        data[:, at : at + 2] = scales.view(np.uint8)
    return RawTensor("w", shape, encoding, data.reshape(*shape[:-1], shape[-1] // 256 * size))


def whole(encoding: str, columns: int) -> int:
    """The next number of columns that the encoding's blocks allow."""
    return -(-columns // 256) * 256 if encoding in K_QUANTS else columns


def raw(encoding: str, *shape: int, seed: int = 0) -> RawTensor:
    if encoding in K_QUANTS:
        return k_quant(encoding, *shape, seed=seed)
    values = normal(seed, *shape)
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    if encoding in kinds:
        return RawTensor("w", shape, encoding, values.astype(kinds[encoding]))
    return RawTensor("w", shape, encoding, gguf.quants.quantize(values, gguf.GGMLQuantizationType[encoding]))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (37, 96), (65, 544), (264, 64)])
def test_products_are_near_the_oracle(isa: str, encoding: str, rows: int, columns: int) -> None:
    columns = whole(encoding, columns)
    tensor, x = raw(encoding, rows, columns), normal(1, 19, columns)
    w, oracle = native.matrix(tensor, "float32"), reference.matrix(tensor, "float64")
    limit = (TILE_LIMITS if isa == "amx" else LIMITS)[encoding]
    assert nmse(native.linear(x, w, normal(2, rows)), x @ oracle.T + normal(2, rows)) < limit
    embedded = reference.matrix(tensor, "float32")
    if encoding == "F16":
        embedded = embedded.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(native.embed(w, np.arange(rows)), embedded)


@pytest.mark.parametrize("columns", [1, 5, 31, 33])
def test_odd_widths(isa: str, columns: int) -> None:
    tensor, x = raw("F32", 5, columns), normal(1, 3, columns)
    out = native.linear(x, native.matrix(tensor, "float32"))
    assert nmse(out, x.astype(float) @ tensor.data.T.astype(float)) < 1e-12  # float32 rounding


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_is_the_same_anywhere(isa: str, encoding: str, threads: None) -> None:
    """Whatever the number of rows, its place among them, its neighbours and the number of threads."""
    columns = whole(encoding, 224)
    w = native.matrix(raw(encoding, 77, columns), "float32")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 70))
        x = normal(seed, count, columns) * np.float32(10.0 ** rng.integers(-3, 3))
        _native.set_num_threads(int(rng.integers(1, 4)))
        together = native.linear(x, w)
        for i in {0, count // 2, count - 1}:
            assert np.array_equal(native.linear(x[i : i + 1], w)[0], together[i])
        first = int(rng.integers(0, count))
        assert np.array_equal(native.linear(x[first:], w), together[first:])


def test_int8_products_do_not_depend_on_tiles() -> None:
    if "amx" not in AVAILABLE:
        pytest.skip("this processor has no tiles")
    before = _native.isa()
    for encoding in QUANTIZED:
        columns = whole(encoding, 160)
        x, w = normal(1, 21, columns), native.matrix(raw(encoding, 33, columns), "float32")
        out = [(_native.use_isa(name), native.linear(x, w))[1] for name in ("avx512", "amx")]
        assert np.array_equal(*out)
    _native.use_isa(before)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_norm_and_residual_of_a_product(isa: str, encoding: str) -> None:
    """Fused or one after the other: the same bits; columns of a wider array are rows like others."""
    columns = whole(encoding, 96)
    w, wide = native.matrix(raw(encoding, 37, columns), "float32"), normal(1, 9, columns + 104)
    x, residual, norm = wide[:, 64 : 64 + columns], normal(2, 9, 37), RMSNorm(normal(3, columns), 1e-5)
    apart = residual + native.linear(native.rms_norm(x, norm), w, normal(4, 37))
    assert np.array_equal(native.linear(x, w, normal(4, 37), norm=norm, residual=residual), apart)
    assert np.array_equal(native.linear(x, w), native.linear(np.ascontiguousarray(x), w))


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("activation", [SWIGLU, SITU])
def test_mlp_is_its_parts(isa: str, encoding: str, activation: Activation) -> None:
    width, hidden_size = whole(encoding, 96), whole(encoding, 64)
    gate_up, down = (
        native.matrix(raw(encoding, *shape, seed=seed), "float32")
        for seed, shape in enumerate([(2 * hidden_size, width), (40, hidden_size)])
    )
    weights = MLPWeights(gate_up, normal(2, 2 * hidden_size), down, normal(3, 40))
    x, residual, norm = normal(4, 21, width), normal(5, 21, 40), RMSNorm(normal(6, width), 1e-5)
    hidden = native.linear(x, gate_up, weights.gate_up_bias, norm=norm)
    inner = native.gated(hidden[:, :hidden_size], hidden[:, hidden_size:], activation)
    apart = native.linear(inner, down, weights.down_bias, residual=residual)
    out = native.mlp(x, weights, activation, norm=norm, residual=residual)
    assert np.array_equal(out, apart)
    for i in (0, 20):
        one = slice(i, i + 1)
        assert np.array_equal(
            native.mlp(x[one], weights, activation, norm=norm, residual=residual[one])[0], out[i]
        )


@given(count=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_small_ops_are_near_the_reference_and_independent(count: int, seed: int) -> None:
    x, y = 3 * normal(seed, count, 4, 19), 3 * normal(seed + 1, count, 4, 19)
    norm, a = RMSNorm(normal(seed + 2, 19), 1e-5), -np.exp(normal(seed + 3, 4))
    part = RMSNorm(norm.weight[:11], 1e-5)
    heads = normal(seed + 4, 4, 11, 15)

    def delta(table: object, x: np.ndarray, y: np.ndarray, bound: float | None) -> np.ndarray:
        flat = [t.reshape(len(x), -1) for t in (x, y, x + y)]
        inputs = table.kda_inputs(  # type: ignore[attr-defined]
            np.concatenate(flat, axis=1), flat[1], y[:, 0, :4], KDAConstants(a, bound, 1e-6)
        )
        return np.concatenate([part.reshape(len(x), -1) for part in inputs], axis=1)

    ops = {
        "rms_norm": lambda t, x, y: t.rms_norm(x, norm),
        "rms_norm of a part": lambda t, x, y: t.rms_norm(x, part),
        "swiglu": lambda t, x, y: t.gated(x, y, SWIGLU),
        "situ": lambda t, x, y: t.gated(x, y, SITU),
        "sigmoid_gate": lambda t, x, y: t.sigmoid_gate(x, y.reshape(len(x), -1)),
        "sigmoid_gate of normalised heads": lambda t, x, y: t.sigmoid_gate(x, y.reshape(len(x), -1), norm),
        "kda_inputs": lambda t, x, y: delta(t, x, y, None),
        "bounded kda_inputs": lambda t, x, y: delta(t, x, y, -5.0),
        "mix_streams": lambda t, x, y: t.mix_streams(
            [np.ascontiguousarray(s) for s in (x[:, 0], y[:, 0], x[:, 1] * y[:, 1], x[:, 2])],
            norm.weight,
            1e-5,
            norm,
        ),
        "head_linear": lambda t, x, y: t.head_linear(x, heads),
    }
    for name, op in ops.items():
        together = op(native, x, y)
        expected = op(reference, x, y)
        near = 3e-6 * max(1.0, float(np.abs(expected).max()))  # float32, sums in another order
        np.testing.assert_allclose(together, expected, rtol=3e-5, atol=near, err_msg=name)  # likewise
        for i in {0, count - 1}:
            one = slice(i, i + 1)
            assert np.array_equal(op(native, x[one], y[one])[0], together[i]), name


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("normalise", [True, False])
def test_route(isa: str, has_bias: bool, normalise: bool) -> None:
    logits, bias = 2 * normal(1, 60, 33), normal(2, 33) if has_bias else None
    settings = {"top_k": 5, "scale": 2.5, "normalise": normalise}
    ids, weights = native.route(logits, bias, **settings)
    expected_ids, expected = reference.route(logits, bias, **settings)
    assert np.array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)  # float32
    alone = native.route(logits[7:8], bias, **settings)
    assert np.array_equal(alone[0][0], ids[7])
    assert np.array_equal(alone[1][0], weights[7])
    tied = native.route(np.zeros((2, 9), np.float32), None, **settings)
    assert tied[0].tolist() == [[0, 1, 2, 3, 4]] * 2


@given(
    size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**40),
    spread=st.sampled_from([0.0, 1e-12, 1.0, 30.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_noise_chooses_the_reference_s_token(size: int, seed: int, position: int, spread: float) -> None:
    """Also where most scores are equal, nearly so, or ruled out."""
    scores = spread * normal(seed % 1000, size).astype(np.float64)
    assert native.noisy_argmax(scores, seed, position) == reference.noisy_argmax(scores, seed, position)
    scores[np.arange(size) % 3 != seed % 3] = -np.inf
    assert native.noisy_argmax(scores, seed, position) == reference.noisy_argmax(scores, seed, position)


def test_scores_too_close_to_call_go_to_the_reference() -> None:
    """Two noisy scores that differ by less than logarithms may: both are candidates."""
    noise = reference.gumbel_noise(5, 6, 8)
    scores = np.full(8, -100.0)
    scores[[2, 5]] = -noise[[2, 5]]
    assert [index for index, _ in _native.noisy_candidates(scores, 0, 5, 6)] == [2, 5]
    assert native.noisy_argmax(scores, 5, 6) == reference.noisy_argmax(scores, 5, 6)


def test_parts_of_the_columns_of_an_array() -> None:
    """Rows that lie apart are read where they are."""
    wide = normal(1, 7, 40)
    gate, up = wide[:, :20], wide[:, 20:]
    copies = [np.ascontiguousarray(part) for part in (gate, up)]
    assert np.array_equal(native.gated(gate, up, SITU), native.gated(*copies, SITU))
    norm = RMSNorm(normal(2, 15), 1e-5)
    assert np.array_equal(native.rms_norm(up, norm), native.rms_norm(copies[1], norm))
    with pytest.raises(ValueError, match="a row is not dense"):
        native.gated(gate[:, ::-1], up, SITU)


def test_extreme_activations() -> None:
    x = np.array([[-1e4, -100, -88, -20, 0, 20, 88, 100, 1e4]], np.float32)
    gates = native.sigmoid_gate(np.ones_like(x)[:, None], x)
    assert np.array_equal(gates, np.clip(gates, 0, 1))
    np.testing.assert_allclose(gates, reference.sigmoid(x), atol=1e-7)  # exp is cut off at −87
    np.testing.assert_allclose(
        native.gated(x, x, SITU), reference.gated(x, x, SITU), rtol=1e-5, atol=1e-5
    )  # likewise


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "groups", "value_dim"), [(4, 1, 24), (4, 2, 16), (4, 4, 7), (44, 2, 20)])
def test_attention(isa: str, kind: str, heads: int, groups: int, value_dim: int) -> None:
    """Lengths around the blocks of 64, rows in any company, values as a part of the key row or apart."""
    q = normal(1, 6, heads, 33)
    keys = normal(2, 3, 200, groups, 33).astype(kind)
    values = keys[..., :value_dim] if groups == 1 else normal(3, 3, 200, groups, value_dim).astype(kind)
    positions = ints(0, 62, 63, 64, 127, 199)

    def run(table: object, rows: slice, slots: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return table.attention(  # type: ignore[attr-defined]
            q[rows], None, None, keys=keys, values=values,
            windows=Windows(slots, starts), positions=positions[rows], scale=0.2,
        )  # fmt: skip

    out = run(native, slice(None), ints(2, 0), ints(0, 4, 6))
    truth = run(reference, slice(None), ints(2, 0), ints(0, 4, 6))
    np.testing.assert_allclose(out, truth, rtol=2e-4, atol=2e-5)  # float32, sums in another order
    for row, slot in enumerate((2, 2, 2, 2, 0, 0)):
        assert np.array_equal(run(native, slice(row, row + 1), ints(slot), ints(0, 1))[0], out[row])


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 5, 16, 33, 100, 150])
def test_attention_of_a_long_window(isa: str, kind: str, count: int, threads: None) -> None:
    """However many rows of a prompt come together, each has the bits that it has alone."""
    heads, groups, first = 6, 2, 70
    q, k, v = normal(1, count, heads, 40), normal(2, count, groups, 40), normal(3, count, groups, 24)
    history = [normal(4, 1, 256, groups, 40).astype(kind), normal(5, 1, 256, groups, 24).astype(kind)]
    positions, inv_freq = first + np.arange(count), np.array([1.0, 0.3, 0.01])

    def run(rows: slice, keys: np.ndarray, values: np.ndarray, table: object = native) -> np.ndarray:
        return table.attention(  # type: ignore[attr-defined]
            q[rows], k[rows], v[rows], keys=keys, values=values, scale=0.2, inv_freq=inv_freq,
            windows=Windows(ints(0), ints(0, rows.stop - rows.start)), positions=positions[rows],
        )  # fmt: skip

    whole, single = [[part.copy() for part in history] for _ in range(2)]
    _native.set_num_threads(2)
    out = run(slice(0, count), *whole)
    _native.set_num_threads(1)
    for row in range(count):
        assert np.array_equal(run(slice(row, row + 1), *single)[0], out[row])
    assert all(np.array_equal(a, b) for a, b in zip(whole, single, strict=True))
    truth = run(slice(0, count), *history, reference)
    near = {"float32": 2e-5, "bfloat16": 2e-2}[kind]  # sums in another order; keys that round the other way
    np.testing.assert_allclose(out, truth, rtol=10 * near, atol=near)
    for a, b in zip(whole, history, strict=True):
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=1e-6)  # likewise


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0"])
def test_attention_block_is_its_parts(isa: str, kind: str, encoding: str) -> None:
    """The same bits as product, attention and product, also in the stored rows; a row alone has them too."""
    qkv, out = (native.matrix(raw(encoding, *shape), "float32") for shape in [(160, 64), (64, 96)])
    weights = AttentionWeights(qkv, normal(1, 160), out, None, 6, 0.2, np.array([1.0, 0.1]))
    x, norm, positions = normal(2, 90, 64), RMSNorm(normal(3, 64), 1e-5), 20 + np.arange(90)
    caches = [[normal(seed, 1, 128, 2, 16).astype(kind) for seed in (4, 5)] for _ in range(2)]

    def run(rows: slice, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        return native.attention_block(
            x[rows], weights, keys=keys, values=values, windows=Windows(ints(0), ints(0, len(x[rows]))),
            positions=positions[rows], norm=norm, residual=x[rows],
        )  # fmt: skip

    together = run(slice(None), *caches[0])
    heads = native.linear(x, qkv, weights.qkv_bias, norm=norm).reshape(90, 10, 16)
    o = native.attention(
        heads[:, :6], heads[:, 6:8], heads[:, 8:], keys=caches[1][0], values=caches[1][1],
        windows=Windows(ints(0), ints(0, 90)), positions=positions, scale=0.2, inv_freq=weights.inv_freq,
    )  # fmt: skip
    assert np.array_equal(together, native.linear(o.reshape(90, 96), out, residual=x))
    assert all(np.array_equal(a, b) for a, b in zip(*caches, strict=True))
    for row in (0, 44, 89):
        assert np.array_equal(run(slice(row, row + 1), *caches[0])[0], together[row])


@pytest.mark.parametrize(("heads", "value_heads", "decay_dim"), [(2, 2, 20), (2, 4, 1)])
@pytest.mark.parametrize("values", [7, 23, 33, 64])
def test_scan(isa: str, heads: int, value_heads: int, decay_dim: int, values: int, threads: None) -> None:
    """Near the reference; folding, replaying and windows of any length give the scan's own bits."""
    length, keys = 13, max(19, decay_dim)
    q, v, beta = (
        normal(1, length, heads, keys),
        normal(3, length, value_heads, values),
        np.abs(normal(5, length, value_heads)) % 1,
    )
    k = reference.l2_norm(normal(2, length, heads, keys), 1e-6)
    decay = np.exp(-np.abs(normal(4, length, value_heads, decay_dim)))
    inputs = [q, k, v, decay, beta]
    start = normal(6, 1, value_heads, keys, values)

    def scan(
        table: object,
        first: int,
        end: int,
        state: np.ndarray,
        records: Records | None = None,
        *,
        folded: int = 0,
        replayed: int = 0,
    ) -> np.ndarray:
        return table.delta_scan(  # type: ignore[attr-defined]
            *[a[first:end] for a in inputs],
            windows=Windows(ints(0), ints(0, end - first)),
            state=state,
            records=records,
            num_folded=ints(folded),
            num_replayed=ints(replayed),
            advance=np.array([records is None]),
        )

    ours, theirs = start.copy(), start.copy()
    out = scan(native, 0, length, ours)
    np.testing.assert_allclose(
        out, scan(reference, 0, length, theirs), rtol=1e-4, atol=1e-5
    )  # float32, other order
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)  # likewise
    for count in (1, 2, 3):
        _native.set_num_threads(count)
        records = Records(
            *(
                np.full((1, length, *s), np.nan, np.float32)
                for s in ((value_heads, decay_dim), (heads, keys), (value_heads, values))
            )
        )
        state = start.copy()
        assert np.array_equal(scan(native, 0, 4, state, records), out[:4])
        assert np.array_equal(scan(native, 4, length, state, records, replayed=4), out[4:])
        assert np.array_equal(state, start)
        pending = Records(*(part.copy() for part in records))
        scan(native, 0, 0, state, pending, folded=length)
        assert np.array_equal(state, ours)
        state = start.copy()  # fold nine, then propose the rest over the same records, in one pass
        assert np.array_equal(scan(native, 9, length, state, records, folded=9), out[9:])
        partial = start.copy()
        scan(native, 0, 9, partial)
        assert np.array_equal(state, partial)


@pytest.mark.parametrize("values", [7, 33, 64])
def test_scan_over_planes(isa: str, values: int) -> None:
    """Each plane holds the bits of the state after its token; the tail, those of the record."""
    q, v, beta = normal(1, 4, 2, 20), normal(3, 4, 2, values), np.abs(normal(5, 4, 2)) % 1
    k, decay = reference.l2_norm(normal(2, 4, 2, 20), 1e-6), np.exp(-np.abs(normal(4, 4, 2, 20)))
    inputs = [q, k, v, decay, beta]
    planes = np.full((1, 4, 2, 20, values), np.nan, np.float32)
    planes[0, 2] = start = normal(6, 2, 20, values)
    tail = Records(*(np.full((1, 1, 2, size), np.nan, np.float32) for size in (20, 20, values)))
    out = native.delta_scan_planes(
        *inputs, windows=Windows(ints(0), ints(0, 4)), planes=planes, tail=tail,
        plane=ints(2), advance=np.array([False]), last=ints(2),
    )  # fmt: skip
    records = Records(*(np.full((1, 4, 2, size), np.nan, np.float32) for size in (20, 20, values)))
    counts = {"num_folded": ints(0), "num_replayed": ints(0)}
    for length in range(1, 5):
        state, some = start[None].copy(), [a[:length] for a in inputs]
        windows = Windows(ints(0), ints(0, length))
        own = native.delta_scan(
            *some, windows=windows, state=state, records=None, advance=np.array([True]), **counts
        )
        assert np.array_equal(own, out[:length])
        if length < 4:
            assert np.array_equal(planes[0, (2 + length) % 4], state[0])
    native.delta_scan(
        *inputs, windows=Windows(ints(0), ints(0, 4)), state=start[None].copy(), records=records,
        advance=np.array([False]), **counts,
    )  # fmt: skip
    assert all(np.array_equal(a[0, 0], b[0, 3]) for a, b in zip(tail, records, strict=True))
    assert np.array_equal(planes[0, 2], start)


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_short_conv(isa: str, length: int) -> None:
    x, taps, history = normal(1, length, 50)[:, 4:41], normal(2, 4, 37), normal(3, 1, 3, 37)
    out = native.short_conv(x, taps, history, ints(0, length))
    np.testing.assert_allclose(
        out, reference.short_conv(x, taps, history, ints(0, length)), rtol=1e-4, atol=1e-6
    )  # float32, other order
    inputs = np.concatenate([history[0], x])
    last = native.short_conv(x[-1:], taps, inputs[None, length - 1 : length + 2], ints(0, 1))
    assert np.array_equal(last[0], out[-1])


@pytest.mark.parametrize("advance", [True, False])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 5), (4, 1)])
def test_conv_over_a_ring(isa: str, lengths: tuple[int, int], advance: bool) -> None:
    """What `short_conv` gives over the columns before each window; the rings change as the reference changes
    them.
    """
    starts, depth = ints(0, *np.cumsum(lengths)), 4
    x, taps, before = normal(1, int(starts[-1]), 50)[:, 4:41], normal(2, 4, 37), ints(0, 0 if advance else 1)
    rings = [normal(3, 3, 3 + depth, 37), normal(3, 3, 3 + depth, 37)]
    tails = [normal(4, 3, 37), normal(4, 3, 37)]
    slots, cursor = ints(2, 0), ints(5, 1)
    places = (cursor[:, None] + before[:, None] + np.arange(3)) % (3 + depth)
    expected = native.short_conv(x, taps, rings[0][slots[:, None], places], starts)
    outs = [
        table.short_conv_ring(
            x, taps, windows=Windows(slots, starts), ring=ring, tail=tail, cursor=cursor,
            num_before=before, advance=np.full(2, advance),
        )
        for table, ring, tail in zip((native, reference), rings, tails, strict=True)
    ]  # fmt: skip
    assert np.array_equal(outs[0], expected)
    assert np.array_equal(*rings)
    assert np.array_equal(*tails)


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0"])
def test_experts(isa: str, encoding: str) -> None:
    """Near the reference, and a row does not depend on who else chose its experts."""
    tensors = [raw(encoding, 5, 64, 96), raw(encoding, 5, 64, 96, seed=1), raw(encoding, 5, 96, 64, seed=2)]
    x, ids = normal(3, 11, 96), np.argsort(normal(4, 11, 5))[:, :3]
    weights = np.abs(normal(5, 11, 3))
    matrices = [native.matrix(tensor, "float32") for tensor in tensors]

    def run(rows: slice) -> np.ndarray:
        gate, up, down = matrices
        return native.experts(x[rows], ids[rows], weights[rows], gate=gate, up=up, down=down, activation=SITU)

    gate, up, down = (reference.matrix(tensor, "float64") for tensor in tensors)
    truth = reference.experts(x.astype(float), ids, weights, gate=gate, up=up, down=down, activation=SITU)
    out = run(slice(None))
    assert nmse(out, truth) < {"F32": 1e-11, "BF16": 1e-4, "Q8_0": 2e-3}[encoding]  # three products in a row
    for i in (0, 5, 10):
        assert np.array_equal(run(slice(i, i + 1))[0], out[i])


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("has_latent", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
def test_mixture_is_its_parts(isa: str, encoding: str, has_latent: bool, has_shared: bool) -> None:
    """The same bits as router, experts and shared MLP one after the other; a row alone has them too."""
    width = 64 if has_latent else 96

    def matrix(*shape: int) -> object:
        return native.matrix(raw(encoding, *shape, seed=sum(shape)), "float32")

    weights = MixtureWeights(
        matrix(5, 96), None, normal(1, 5), 3, 1.5, True,
        matrix(5, 64, width), matrix(5, 64, width), matrix(5, width, 64),
        LatentWeights(matrix(64, 96), None, RMSNorm(normal(2, 64), 1e-5), matrix(96, 64), normal(3, 96))
        if has_latent else None,
        MLPWeights(matrix(128, 96), None, matrix(96, 64), None) if has_shared else None,
    )  # fmt: skip
    x, residual, norm = normal(4, 70, 96), normal(5, 70, 96), RMSNorm(normal(6, 96), 1e-5)

    def run(rows: slice) -> np.ndarray:
        return native.mixture(x[rows], weights, SITU, norm=norm, residual=residual[rows])

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm", "linear", "route", "experts", "mlp"):
            patch.setattr(reference, name, getattr(native, name))
        apart = reference.mixture(x, weights, SITU, norm=norm, residual=residual)
        plain = reference.mixture(x, weights, SITU)
    together = run(slice(None))
    assert np.array_equal(together, apart)
    assert np.array_equal(native.mixture(x, weights, SITU), plain)
    for i in (0, 35, 69):
        assert np.array_equal(run(slice(i, i + 1))[0], together[i])


@pytest.mark.parametrize(("encoding", "bits"), [
    ("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_1", 5), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625),
])  # fmt: skip
def test_quantized_weights_keep_their_size(encoding: str, bits: float) -> None:
    """And their values: see `test_products_are_near_the_oracle`."""
    w = native.matrix(raw(encoding, 5, 1024), "float32")
    assert w.num_bytes == 16 * 1024 * bits / 8  # rows padded to sixteen
