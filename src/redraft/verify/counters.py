"""Speculation counters from a Prometheus page, by our own names and those of llama.cpp, vLLM and SGLang."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_LINE = re.compile(
    r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>[\d.]+(?:[eE][-+]?\d+)?|NaN)\s*$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')
PREFIXES = ("redraft:", "llamacpp:", "vllm:")  # of the counters spec_decode_num_…_total


@dataclass(frozen=True)
class Counters:
    """Since the server's start. `per_position[i]`: accepted tokens at place i of a draft.

    `rate` is SGLang's gauge of the share accepted, where only that is published.
    """

    drafted: int
    accepted: int
    per_position: tuple[int, ...] = ()
    rate: float | None = None

    def since(self, earlier: Counters) -> Counters:
        """What was added since an earlier reading."""
        before = (*earlier.per_position, *[0] * len(self.per_position))
        positions = tuple(now - then for now, then in zip(self.per_position, before, strict=False))
        drafted, accepted = self.drafted - earlier.drafted, self.accepted - earlier.accepted
        return Counters(drafted, accepted, positions, self.rate)


def parse_counters(page: str) -> Counters | None:
    """Read a /metrics page, summing over models and engines; None if it has no speculation counters."""
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    rate = None
    for match in _LINE.finditer(page):
        name, labels, value = match["name"], match["labels"] or "", float(match["value"])
        if not math.isfinite(value):  # a gauge before its first reading
            continue
        if name == "sglang:spec_accept_rate":
            rate = value
        short = next((name.removeprefix(p) for p in PREFIXES if name.startswith(p + "spec_decode_")), None)
        if short is None:
            continue
        if position := _POSITION.search(labels):
            at = int(position[1])
            positions[at] = positions.get(at, 0) + int(value)
        else:
            sums[short] = sums.get(short, 0) + int(value)
    drafted, accepted = (sums.get(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted"))
    if drafted is not None and accepted is not None:
        return Counters(drafted, accepted, tuple(positions[i] for i in sorted(positions)), rate)
    return None if rate is None else Counters(0, 0, (), rate)
