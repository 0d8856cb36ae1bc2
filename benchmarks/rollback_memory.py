"""State of Kimi K3 by rollback policy and depth, as the pool would allocate it. Allocates nothing.

python benchmarks/rollback_memory.py
"""

from __future__ import annotations

import json

from redraft.config import POLICIES, EngineConfig
from redraft.models import LayerSpec, ModelSpec, RecurrentSpec
from redraft.state import bytes_by_category, state_buffers

SLOTS = 4
# 69 recurrent layers of 96 heads of 128 × 128, conv width 4: the published configuration.
LAYER = LayerSpec(recurrent=RecurrentSpec(96, 96, 128, 128, 128, 3 * 96 * 128, 4))
KIMI_K3 = ModelSpec(
    model_type="kimi_k3", vocab_size=163_840, hidden_size=7168, max_context=2**20, layers=(LAYER,) * 69
)


def main() -> None:
    figures = {}
    print(f"Kimi K3, {SLOTS} slots, MiB{'state and rollback':>32}{'scratch':>12}")
    for policy in POLICIES:
        for depth in (0, 1, 3, 7):
            config = EngineConfig(num_slots=SLOTS, depth=depth, policy=policy)  # type: ignore[arg-type]
            totals = bytes_by_category(state_buffers(KIMI_K3, config))
            scratch = totals.pop("scratch", 0) / 2**20
            kept = sum(totals.values()) / 2**20
            figures[f"{policy} {depth}"] = {"state_mib": kept, "scratch_mib": scratch}
            print(f"{policy:<12} depth {depth}{kept:>33.2f}{scratch:>12.2f}")
    assert f"{figures['snapshot 0']['state_mib']:.2f}" == "1772.44"  # what llama.cpp prints
    assert f"{figures['snapshot 7']['state_mib']:.2f}" == "14179.50"  # likewise, with seven drafts
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
