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
from redraft.ops import Activation, Records, Windows, reference
from redraft.ops.raw import RawTensor

native = pytest.importorskip("redraft.ops.native")
_native = native._native
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


SITU = Activation("situ", 4.0, 25.0)


@given(count=st.integers(1, 40), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_small_ops_are_near_the_reference_and_independent(count: int, seed: int) -> None:
    x, y = 3 * normal(seed, count, 4, 19), 3 * normal(seed + 1, count, 4, 19)
    weight, a = normal(seed + 2, 19), -np.exp(normal(seed + 3, 4))
    positions, frequencies = np.arange(count) * 7, np.array([1.0, 0.1, 0.01])
    heads = normal(seed + 4, 4, 11, 19)
    ops = {
        "rms_norm": lambda t, x, y, p: t.rms_norm(x, weight, 1e-5),
        "l2_norm": lambda t, x, y, p: t.l2_norm(x, 1e-6),
        "sigmoid": lambda t, x, y, p: t.sigmoid(x),
        "swiglu": lambda t, x, y, p: t.gated(x, y, Activation("swiglu")),
        "situ": lambda t, x, y, p: t.gated(x, y, SITU),
        "decay": lambda t, x, y, p: t.kda_decay(x, a, None),
        "bounded decay": lambda t, x, y, p: t.kda_decay(x, a, -5.0),
        "rope": lambda t, x, y, p: t.rope(x, p, frequencies),
        "mix_streams": lambda t, x, y, p: t.mix_streams(
            [x[:, 0], y[:, 0], x[:, 1] * y[:, 1], x[:, 2]], weight, 1e-5
        ),
        "head_linear": lambda t, x, y, p: t.head_linear(x, heads),
    }
    for name, op in ops.items():
        together = op(native, x, y, positions)
        expected = op(reference, x, y, positions)
        near = 3e-6 * max(1.0, float(np.abs(expected).max()))  # float32, sums in another order
        np.testing.assert_allclose(together, expected, rtol=3e-5, atol=near, err_msg=name)  # likewise
        for i in {0, count - 1}:
            one = slice(i, i + 1)
            assert np.array_equal(op(native, x[one], y[one], positions[one])[0], together[i]), name


def test_parts_of_the_columns_of_an_array() -> None:
    """Rows that lie apart are read where they are; anything else is copied first."""
    wide, table = normal(1, 7, 40), native
    gate, up = wide[:, :20], wide[:, 20:]
    copies = [np.ascontiguousarray(part) for part in (gate, up)]
    assert np.array_equal(table.gated(gate, up, SITU), table.gated(*copies, SITU))
    assert np.array_equal(table.gated(gate[:, ::-1], up, SITU)[:, ::-1], table.gated(gate, up[:, ::-1], SITU))
    heads, positions, frequencies = wide.reshape(7, 5, 8), np.arange(7), np.array([1.0, 0.1])
    some = table.rope(heads[:, :3], positions, frequencies)
    assert np.array_equal(some, table.rope(heads, positions, frequencies)[:, :3])


def test_extreme_activations() -> None:
    x = np.array([[-1e4, -100, -88, -20, 0, 20, 88, 100, 1e4]], np.float32)
    assert np.array_equal(native.sigmoid(x), np.clip(native.sigmoid(x), 0, 1))
    np.testing.assert_allclose(native.sigmoid(x), reference.sigmoid(x), atol=1e-7)  # exp is cut off at −87
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
    windows = Windows(ints(2, 0), ints(0, 4, 6))
    out = native.attention(q, keys, values, windows=windows, positions=positions, scale=0.2)
    truth = reference.attention(q, keys, values, windows=windows, positions=positions, scale=0.2)
    np.testing.assert_allclose(out, truth, rtol=2e-4, atol=2e-5)  # float32, sums in another order
    for row, slot in ((1, 2), (5, 0)):
        alone = Windows(ints(slot), ints(0, 1))
        one = native.attention(
            q[row : row + 1], keys, values, windows=alone, positions=positions[row : row + 1], scale=0.2
        )
        assert np.array_equal(one[0], out[row])


@pytest.mark.parametrize(("heads", "value_heads", "decay_dim"), [(2, 2, 20), (2, 4, 1)])
def test_scan(isa: str, heads: int, value_heads: int, decay_dim: int, threads: None) -> None:
    """Near the reference; folding, replaying and windows of any length give the scan's own bits."""
    length, keys, values = 13, 20, 23
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


@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_short_conv(isa: str, length: int) -> None:
    x, weight, history = normal(1, length, 37), normal(2, 37, 4), normal(3, 1, 3, 37)
    out = native.short_conv(x, weight, history, ints(0, length))
    np.testing.assert_allclose(
        out, reference.short_conv(x, weight, history, ints(0, length)), rtol=1e-4, atol=1e-6
    )  # float32, other order
    inputs = np.concatenate([history[0], x])
    last = native.short_conv(x[-1:], weight, inputs[None, length - 1 : length + 2], ints(0, 1))
    assert np.array_equal(last[0], out[-1])


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


@pytest.mark.parametrize(("encoding", "bits"), [
    ("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_1", 5), ("Q4_K", 4.625), ("Q5_K", 5.625), ("Q6_K", 6.5625),
])  # fmt: skip
def test_quantized_weights_keep_their_size(encoding: str, bits: float) -> None:
    """And their values: see `test_products_are_near_the_oracle`."""
    w = native.matrix(raw(encoding, 5, 1024), "float32")
    assert w.num_bytes == 16 * 1024 * bits / 8  # rows padded to sixteen
