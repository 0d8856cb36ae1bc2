"""Models and machines that the tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redraft import ops
from redraft.config import EngineConfig
from redraft.loading import ModelFile, open_model
from redraft.models import Model
from redraft.runner import Runner

FIXTURES = Path(__file__).parent / "fixtures"
PEER = Path(__file__).parents[2] / "shared" / "peer"  # more data, where a checkout has it beside it
RECURRENT_FAMILIES = ("kimi_k3", "kimi_linear")
FAMILIES = (*RECURRENT_FAMILIES, "llama")
POLICIES = ("replay", "snapshot", "checkpoint")
FILLS = (0x00, 0x3E, 0xFF)  # 0xFF in every byte is NaN
TABLE = ops.choose()  # the native operations where they were compiled
REFERENCE = ops.choose("reference")

_files: dict[str, ModelFile] = {}
_models: dict[tuple[str, str, bool], Model] = {}


def model_file(family: str) -> ModelFile:
    """An opened fixture."""
    if family not in _files:
        _files[family] = open_model(FIXTURES / f"{family}.gguf")
    return _files[family]


def model(family: str, compute: str = "float32", table: ops.Ops = TABLE) -> Model:
    """A loaded fixture."""
    key = family, compute, table is TABLE
    if key not in _models:
        _models[key] = model_file(family).load(table, compute)  # type: ignore[arg-type]
    return _models[key]


def runner(family: str, **settings: object) -> Runner:
    """A runner with all slots reset."""
    config = EngineConfig(**{"num_slots": 3, "max_context": 128, "depth": 7, **settings})  # type: ignore[arg-type]
    made = Runner(model(family, config.compute), config, TABLE)
    for slot in range(config.num_slots):
        made.pool.reset(slot)
    return made


def tokens(count: int, seed: int = 0, vocab: int = 264) -> list[int]:
    """Arbitrary tokens."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def nmse(values: np.ndarray, truth: np.ndarray) -> float:
    """mean((a − b)²) / mean(b²)."""
    truth = truth.astype(np.float64)
    return float(np.mean((values - truth) ** 2) / np.mean(truth**2))


def heed_interrupts() -> None:
    """For a new process: a shell's background jobs ignore SIGINT, and so would what the tests start there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(params=RECURRENT_FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def peer() -> Callable[[str], Path]:
    def find(name: str) -> Path:
        if not (PEER / name).exists():
            pytest.skip("peer models are not beside this checkout")
        return PEER / name

    return find
