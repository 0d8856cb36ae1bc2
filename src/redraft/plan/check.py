"""Plan against reality: load a model, allocate its pool, and compare bytes planned, allocated and resident.

The one module of the planner that loads weights; it is imported on demand.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import psutil

from redraft.loading import open_model
from redraft.ops import choose
from redraft.plan.pool import engine_config
from redraft.plan.settings import PlanSettings
from redraft.runner import Runner
from redraft.state import bytes_by_category, state_buffers


@dataclass(frozen=True)
class Checked:
    """Bytes. `state_allocated` is what NumPy's allocator handed out for the pool, bookkeeping included;
    `resident_growth` is that of the whole process, model and pool together.
    """

    weights_in_file: int
    weights_loaded: int
    state_planned: dict[str, int]
    state_allocated: int
    resident_before: int
    resident_growth: int

    @property
    def is_exact(self) -> bool:
        """Whether the pool took what was planned, up to the cursors it keeps for each slot."""
        surplus = self.state_allocated - sum(self.state_planned.values())
        return 0 <= surplus <= max(2**16, self.state_allocated // 1000)


def check(model: str, settings: PlanSettings, weights_in_file: int) -> Checked:
    """Load `model` (a path or packaged name), allocate a pool as planned, and measure.

    Every byte of the pool is written once, so that it becomes resident. Raises `ModelFileError` for a model
    that the engine does not run.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    file, config = open_model(model), replace(engine_config(settings), fill=0)
    loaded = file.load(choose())
    tracemalloc.start()
    try:
        runner = Runner(loaded, config, choose())
        traces = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)]  # arrays' data alone
        )
    finally:
        tracemalloc.stop()
    growth = process.memory_info().rss - before
    assert runner.pool.config == config, "the pool keeps its configuration"
    return Checked(
        weights_in_file=weights_in_file,
        weights_loaded=loaded.weight_bytes,
        state_planned=bytes_by_category(state_buffers(file.spec, config)),
        state_allocated=sum(statistic.size for statistic in traces.statistics("filename")),
        resident_before=before,
        resident_growth=growth,
    )
