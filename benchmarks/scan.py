"""The delta-rule scan alone, at Kimi K3's head counts: 96 heads of 128 × 128, 4 slots, several layers of
state so that it comes from memory. What a rollback policy adds to a step, in time and in bytes moved.

    python benchmarks/scan.py [--layers 4] [--repeats 15]

Measurements are interleaved: each round times every case once, ratios are taken within a round, medians over
rounds. First it is checked that every case gives the outputs of the plain scan, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from redraft import ops
from redraft.ops import Records, Windows

SLOTS, HEADS, DIM, DEPTH = 4, 96, 128, 7
STATE_BYTES = SLOTS * HEADS * DIM * DIM * 4


class Case:
    """One kind of step on its own state of several layers."""

    def __init__(self, layers: int, window: int, folded: int, *, advance: bool, planes: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.window, self.folded, self.planes = window, folded, planes
        shape = (SLOTS, DEPTH + 1, HEADS, DIM, DIM) if planes else (SLOTS, HEADS, DIM, DIM)
        self.states = [np.full(shape, 0.01, np.float32) for _ in range(layers)]
        rows = SLOTS * window
        self.q, self.k, self.v = (
            rng.standard_normal((rows, HEADS, DIM)).astype(np.float32) for _ in range(3)
        )
        self.k /= np.linalg.norm(self.k, axis=-1, keepdims=True)
        self.decay = rng.uniform(0.9, 1, (rows, HEADS, DIM)).astype(np.float32)
        self.beta = rng.uniform(0, 1, (rows, HEADS)).astype(np.float32)
        records = (SLOTS, 1 if planes else DEPTH + 1, HEADS, DIM)
        self.records = [
            Records(*(rng.uniform(0.1, 0.9, records).astype(np.float32) for _ in range(3)))
            for _ in range(layers)
        ]
        self.windows = Windows(np.arange(SLOTS), np.arange(SLOTS + 1) * window)
        self.advance = np.full(SLOTS, advance)
        self.zero = np.zeros(SLOTS, np.int64)
        self.table = ops.choose("native")

    def step(self) -> np.ndarray:
        inputs = (self.q, self.k, self.v, self.decay, self.beta)
        for state, records in zip(self.states, self.records, strict=True):
            if self.planes:
                out = self.table.delta_scan_planes(
                    *inputs, windows=self.windows, planes=state, tail=records, plane=self.zero,
                    advance=self.advance, last=self.zero,
                )  # fmt: skip
            else:
                out = self.table.delta_scan(
                    *inputs, windows=self.windows, state=state, records=None if self.advance[0] else records,
                    num_folded=np.full(SLOTS, self.folded), num_replayed=self.zero, advance=self.advance,
                )  # fmt: skip
        return out


class Checkpoint(Case):
    """A window run in place, after the state was copied."""

    def __init__(self, layers: int, window: int) -> None:
        super().__init__(layers, window, 0, advance=True)
        self.copies = [state.copy() for state in self.states]

    def step(self) -> np.ndarray:
        for state, copy in zip(self.states, self.copies, strict=True):
            np.copyto(copy, state)
        return super().step()


def cases(layers: int) -> dict[str, tuple[Callable[[], np.ndarray], float]]:
    """By name: a step, and how often it reads or writes the whole state."""
    window = DEPTH + 1
    return {
        "plain step": (Case(layers, 1, 0, advance=True).step, 2),
        "replay, window 1, fold 1": (Case(layers, 1, 1, advance=False).step, 2),
        "replay, window 8, fold 4": (Case(layers, window, 4, advance=False).step, 2),
        "snapshot, window 8": (Case(layers, window, 0, advance=False, planes=True).step, 1 + DEPTH),
        "checkpoint, window 8": (Checkpoint(layers, window).step, 4),
    }


def check() -> None:
    """Replay, snapshot and checkpoint give what the plain scan gives."""
    window = DEPTH + 1
    plain = Case(1, window, 0, advance=True).step()
    for case in (Case(1, window, 0, advance=False), Case(1, window, 0, advance=False, planes=True)):
        assert np.array_equal(case.step(), plain)
    assert np.array_equal(Checkpoint(1, window).step(), plain)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    check()
    steps = cases(arguments.layers)
    for step, _ in steps.values():
        step()
    rounds: list[dict[str, float]] = []
    for _ in range(arguments.repeats):
        seconds = {}
        for name, (step, _) in steps.items():
            start = time.perf_counter()
            step()
            seconds[name] = (time.perf_counter() - start) / arguments.layers
        rounds.append(seconds)
    report = {}
    for name, (_, passes) in steps.items():
        ms = 1000 * statistics.median(r[name] for r in rounds)
        ratio = statistics.median(r[name] / r["plain step"] for r in rounds)
        report[name] = {
            "ms_per_layer": ms,
            "over_plain_step": ratio,
            "state_mb_moved": passes * STATE_BYTES / 1e6,
        }
        print(
            f"{name:<28}{ms:>9.2f} ms a layer{ratio:>8.2f} × plain{passes * STATE_BYTES / 1e6:>9.0f} MB moved"
        )
    of_snapshot = statistics.median(r["replay, window 8, fold 4"] / r["snapshot, window 8"] for r in rounds)
    report["replay_over_snapshot"] = {"ratio": of_snapshot}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
