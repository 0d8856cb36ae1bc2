"""Speed of SmolLM2 on this machine: decode, rows together, prompts, a verify window, and Python's share of a
step. Decode and Python's share also for the built-in model, whose step is short.

    python benchmarks/decode.py [--formats BF16,Q8_0,Q4_0,Q4_1,F32] [--repeats 9]

For each format: the bytes of weights that a token reads, times tokens a second, as a share of the bandwidth
of a streaming read of as many bytes by the same threads, taken before and after. Weights are made from the
fetched file. Results are checked before anything is timed: a row alone and among others gives the same bits,
and each format's logits are near those of float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from redraft import _native, ops
from redraft.config import EngineConfig
from redraft.loading import open_model
from redraft.models import Model
from redraft.ops import native
from redraft.ops.raw import RawTensor
from redraft.runner import Runner
from redraft.state import Window

CONTEXT = 1200
LIMITS = {
    "F32": 1e-9,
    "BF16": 1e-3,
    "Q8_0": 1e-2,
    "Q4_0": 2e-1,
    "Q4_1": 2e-1,
}  # NMSE of logits: the weights' own


class Requantized:
    """The tensors of a source, its matrices in another format."""

    def __init__(self, source: Any, encoding: str) -> None:
        self._source = source
        self._encoding = encoding
        self.names = source.names

    def read(self, name: str) -> RawTensor:
        raw = self._source.read(name)
        if len(raw.shape) < 2 or raw.encoding == self._encoding:
            return raw
        values = raw.to_array()
        if self._encoding == "F32":
            return RawTensor(name, raw.shape, "F32", values)
        if self._encoding == "BF16":
            return RawTensor(name, raw.shape, "BF16", values.astype(ml_dtypes.bfloat16))
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[self._encoding])
        return RawTensor(name, raw.shape, self._encoding, data)


def median_seconds(body: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        body()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Bandwidth:
    """Bytes a second of a streaming read of as many bytes as the weights have, by the same threads."""

    def __init__(self, num_bytes: int) -> None:
        self._data = np.ones(num_bytes // 4, np.float32)

    def __call__(self) -> float:
        return self._data.nbytes / median_seconds(lambda: _native.read_all(self._data), 5)


def runner(model: Model, slots: int, depth: int = 7) -> Runner:
    config = EngineConfig(num_slots=slots, max_context=CONTEXT, depth=depth)
    made = Runner(model, config, ops.choose("native"))
    for slot in range(slots):
        made.pool.reset(slot)
    return made


def fill(made: Runner, slots: int, length: int) -> None:
    tokens = np.random.default_rng(1).integers(0, made.model.spec.vocab_size, length).tolist()
    for slot in range(slots):
        made.forward([Window(slot, tokens, num_logits=0, advance=True)])
        made.commit([slot], [length])


def step_seconds(model: Model, slots: int, window: int, repeats: int) -> float:
    """A step of `slots` windows at about 64 tokens of history; committed, so that the next one moves on."""
    made = runner(model, slots)
    fill(made, slots, 64)
    windows = [Window(slot, list(range(100, 100 + window)), num_logits=window) for slot in range(slots)]

    def step() -> None:
        made.forward(windows)
        made.commit(list(range(slots)), [1] * slots)

    step()
    return median_seconds(step, repeats)


def prompt_seconds(model: Model, length: int, repeats: int) -> float:
    made = runner(model, 1)
    tokens = np.random.default_rng(2).integers(0, 49152, length).tolist()

    def run() -> None:
        made.pool.reset(0)
        made.forward([Window(0, tokens, num_logits=1, advance=True)])
        made.commit([0], [length])

    run()
    return median_seconds(run, repeats)


def check(model: Model, reference: np.ndarray, encoding: str) -> None:
    tokens = list(range(200, 224))
    alone = runner(model, 3).forward([Window(1, tokens, num_logits=24, advance=True)])[0]
    others = [
        Window(0, tokens[:5], num_logits=5, advance=True),
        Window(2, tokens[7:], num_logits=17, advance=True),
    ]
    among = runner(model, 3).forward([others[0], Window(1, tokens, num_logits=24, advance=True), others[1]])[
        1
    ]
    assert np.array_equal(alone, among)
    error = float(np.mean((alone - reference) ** 2) / np.mean(reference**2))
    assert error < LIMITS[encoding], f"{encoding}: NMSE {error}"


def python_share(model: Model, rounds: int = 25, steps: int = 20) -> float:
    """Share of a decode step that passes outside native calls: the median of pairs of rounds, of which the
    first gives the time of a step and the second, with every call timed, the time inside them.
    """
    inside = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            result = call(*arguments)
            inside += time.perf_counter() - start
            return result

        return run

    names = [name for name in dir(_native) if not name.startswith("__") and callable(getattr(_native, name))]
    timers = SimpleNamespace(**{name: timed(getattr(_native, name)) for name in names})
    made = runner(model, 1)
    fill(made, 1, 32)

    def run() -> float:
        start = time.perf_counter()
        for i in range(steps):
            made.forward([Window(0, [100 + i], num_logits=1)])
            made.commit([0], [1])
        return time.perf_counter() - start

    whole = native._native
    shares = []
    run()
    for _ in range(rounds):
        seconds, inside = run(), 0.0
        native._native = timers
        run()
        native._native = whole
        shares.append(1 - inside / seconds)
    return statistics.median(shares)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", default="BF16,Q8_0,Q4_0,Q4_1")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    table = ops.choose("native")
    file = open_model("smollm2")
    exact = file._family.build(
        file.spec, Requantized(file._source, "F32"), ops.choose("reference"), "float32"
    )
    made = Runner(exact, EngineConfig(num_slots=1, max_context=64, depth=0), ops.choose("reference"))
    made.pool.reset(0)
    reference = made.forward([Window(0, list(range(200, 224)), num_logits=24, advance=True)])[0]
    del exact, made
    report: dict[str, Any] = {"operations": ops.description(), "formats": {}}
    print(report["operations"])
    for encoding in arguments.formats.split(","):
        model = file._family.build(file.spec, Requantized(file._source, encoding), table, "float32")
        check(model, reference, encoding)
        row = measure(model, arguments.repeats)
        report["formats"][encoding] = row
        print(encoding, json.dumps(row))
    small = open_model("mini-k3").load(table)
    report["mini-k3"] = {
        "decode_tokens_per_s": 1 / step_seconds(small, 1, 1, 20 * arguments.repeats),
        "python_share": python_share(small),
    }
    print("mini-k3", json.dumps(report["mini-k3"]))
    print(json.dumps(report))


def measure(model: Model, repeats: int) -> dict[str, float]:
    bandwidth = Bandwidth(model.weight_bytes)
    one, shares, readings = [], [], []
    for _ in range(3):
        before = bandwidth()
        one.append(step_seconds(model, 1, 1, 4 * repeats))
        readings.append(statistics.mean([before, bandwidth()]))
        shares.append(model.weight_bytes / one[-1] / readings[-1])
    single = statistics.median(one)
    row = {
        "read_gb_per_s": statistics.median(readings) / 1e9,
        "weight_mb": model.weight_bytes / 1e6,
        "decode_tokens_per_s": 1 / single,
        "share_of_bandwidth": statistics.median(shares),
    }
    for rows in (4, 8, 16, 32):
        alone = step_seconds(model, 1, 1, 2 * repeats)
        together = step_seconds(model, rows, 1, repeats)
        row[f"rows_{rows}_tokens_per_s"] = rows / together
        row[f"rows_{rows}_over_one"] = rows / together * alone
    for length in (128, 1024):
        row[f"prompt_{length}_tokens_per_s"] = length / prompt_seconds(model, length, 3)
    row["verify_4x8_over_4x1"] = step_seconds(model, 4, 8, repeats) / step_seconds(model, 4, 1, repeats)
    row["python_share"] = python_share(model)
    return row


if __name__ == "__main__":
    main()
