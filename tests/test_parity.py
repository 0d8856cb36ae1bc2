"""The models compute what other implementations compute. Figures of llama.cpp and transformers; see
fixtures/README.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import FAMILIES, FIXTURES, REFERENCE, TABLE, model, model_file, nmse
from redraft.config import EngineConfig
from redraft.errors import ModelFileError
from redraft.loading import ModelFile, open_model
from redraft.loading.packaged import cached_path
from redraft.models import Model
from redraft.ops import Ops
from redraft.runner import Runner
from redraft.state import Window

LIMIT = 1e-9  # NMSE of one float32 implementation against another; a wrong detail gives 1e-3


def logits(made: Model, count: int, compute: str = "float32", table: Ops = TABLE) -> np.ndarray:
    config = EngineConfig(num_slots=1, max_context=128, depth=0, compute=compute)  # type: ignore[arg-type]
    runner = Runner(made, config, table)
    runner.pool.reset(0)
    tokens = [(7 * i + 1) % made.spec.vocab_size for i in range(count)]
    return runner.forward([Window(0, tokens, num_logits=count, advance=True)])[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["float32", "float64"])
def test_logits_equal_llama_cpp(family: str, compute: str) -> None:
    """The reference, and the native operations on the same float32 weights."""
    truth = np.load(FIXTURES / f"{family}.logits.npy")
    for table in (REFERENCE, TABLE):
        assert nmse(logits(model(family, compute, table), len(truth), compute, table), truth) < LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_near_the_oracle(family: str) -> None:
    assert (
        nmse(logits(model(family), 80), logits(model(family, "float64"), 80, "float64")) < 1e-10
    )  # rounding only


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("kimi-k3-small.gguf", "kimi-k3-small.logits.npy"),
        ("kimi-linear-small.gguf", "kimi-linear-small.logits.npy"),
        ("kimi-linear-hf", "kimi-linear-hf/logits.npy"),
        ("llama-dense.gguf", "llama-dense.logits.npy"),
    ],
)
def test_logits_equal_the_peers(peer: Callable[[str], Path], name: str, truth: str) -> None:
    expected = np.load(peer(truth))
    for table in (REFERENCE, TABLE):
        made = open_model(peer(name)).load(table)
        assert nmse(logits(made, len(expected), table=table), expected) < LIMIT


@pytest.fixture(scope="module")
def smollm2() -> ModelFile:
    try:
        return open_model("smollm2")
    except ModelFileError:
        pytest.skip(f"SmolLM2 is not at {cached_path('smollm2')}")


def test_smollm2_writes_what_transformers_writes(smollm2: ModelFile) -> None:
    """Greedy tokens of four prompts, equal wherever the margin between the first two logits exceeds 0.05."""
    cases = json.loads((FIXTURES / "smollm2.greedy.json").read_text())["cases"]
    runner = Runner(smollm2.load(REFERENCE), EngineConfig(num_slots=1, max_context=256, depth=0), REFERENCE)
    tokenizer = smollm2.require_tokenizer()
    compared = 0
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        runner.pool.reset(0)
        tokens, count = [*case["prompt_ids"], *case["greedy_ids"]], len(case["greedy_ids"])
        rows = runner.forward([Window(0, tokens[:-1], num_logits=count, advance=True)])[0]
        for token, margin, row in zip(case["greedy_ids"], case["margin"], rows, strict=True):
            if margin > 0.05:
                compared += 1
                assert int(np.argmax(row)) == token
        assert tokenizer.decode(case["greedy_ids"]) == case["text"].replace("<|im_end|>", "")
    assert compared > 150


def test_specs_are_read_from_the_header_alone() -> None:
    spec = model_file("kimi_k3").spec
    assert (spec.model_type, spec.vocab_size, spec.num_recurrent_layers, len(spec.layers)) == (
        "kimi_k3",
        264,
        4,
        6,
    )
