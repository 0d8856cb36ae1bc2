"""Random walks over states and engines until the time is up; every operation is followed by all checks.

    python benchmarks/random_walk.py --minutes 5 [--seed 0]

Each walk has its own seed, printed where it fails. The exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import FILLS, POLICIES, RECURRENT_FAMILIES
from walk import EngineWalk, Setting, StateWalk

DRAFTERS = ("none", "ngram", "own model", "other model", "wrong", "now and then")
NUM_STEPS = 120


def walk(seed: int, counts: Counter[str]) -> None:
    """One walk; raises AssertionError at the first difference."""
    rng = random.Random(seed)
    kind = (StateWalk, EngineWalk)[seed % 2]
    setting = Setting(
        family=rng.choice(RECURRENT_FAMILIES), policy=rng.choice(POLICIES), depth=rng.randint(0, 7),
        fill=rng.choice(FILLS), drafter=rng.choice(DRAFTERS), chunk=rng.choice((1, 3, 9, 64)),
        prefix_bytes=rng.choice((0, 100_000, 10**7)), num_slots=rng.randint(1, 4),
    )  # fmt: skip
    made = kind(setting)
    try:
        for _ in range(NUM_STEPS):
            operation = rng.choice(kind.OPERATIONS)
            made.do(operation, rng.randint(0, 5), rng.randint(0, 300), rng.randint(0, 300))
            counts[f"{kind.__name__} {operation}"] += 1
    finally:
        counts["sequences"] += made.num_sequences
        counts["operations"] += made.num_operations
        counts["tokens"] += made.num_tokens if isinstance(made, EngineWalk) else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first walk")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failed: list[int] = []
    end, seed = time.monotonic() + 60 * options.minutes, options.seed
    while time.monotonic() < end:
        try:
            walk(seed, counts)
        except Exception:  # anything that is raised here is a finding
            traceback.print_exc()
            print(f"walk {seed} differs", file=sys.stderr)
            failed.append(seed)
        seed += 1
    for name in sorted(set(counts) - {"sequences", "operations", "tokens"}):
        print(f"{name:<28}{counts[name]:>8}")
    print(f"{counts['sequences']} sequences, {counts['operations']} operations, {len(failed)} differences")
    report = {
        "walks": seed - options.seed, "sequences": counts["sequences"], "operations": counts["operations"],
        "tokens": counts["tokens"], "differences": len(failed), "failed_seeds": failed,
        "minutes": options.minutes,
    }  # fmt: skip
    print(json.dumps(report))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
