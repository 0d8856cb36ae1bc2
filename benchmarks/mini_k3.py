"""How good the built-in model is, and how often its drafts are accepted.

    python benchmarks/mini_k3.py [--skip-held-out]

Bits a byte of the target and the draft on files of the standard library that training never saw (the recipe
in training/ tells which; another Python version has other files). Then the built-in agent queue at depth 1, 3
and 7, at temperature 0 and 0.8, drafted by the draft model and by n-gram lookup: accepted / drafted for each
kind of task. All texts of one temperature must be those without speculation, or no figure is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from redraft import ops
from redraft.config import EngineConfig, SamplingParams
from redraft.decide import Arm, builtin_tasks, measure, summarise
from redraft.decide.measure import Workload
from redraft.decide.summary import reference_texts
from redraft.engine import Engine
from redraft.loading import ModelFile, open_model
from redraft.models import Model
from redraft.runner import Runner
from redraft.speculate import Drafter, DraftModel, NGram, NoDraft
from redraft.state import Window

CONTEXT = 2048
CHUNK = 256
DEPTHS = (1, 3, 7)
TEMPERATURES = (0.0, 0.8)


def held_out_texts() -> list[str]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    from corpus import documents

    return [document.text.replace("<|", "< |") for document in documents() if document.held_out]


def bits_per_byte(file: ModelFile, model: Model, table: ops.Ops, texts: list[str]) -> float:
    """Each text after the start token, cut into windows of CONTEXT tokens that know nothing of each other."""
    tokenizer = file.require_tokenizer()
    runner = Runner(model, EngineConfig(num_slots=1, max_context=CONTEXT, depth=0), table)
    bits = 0.0
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        for start in range(0, len(tokens) - 1, CONTEXT - 1):
            bits += window_bits(runner, tokens[start : start + CONTEXT])
    return bits / sum(len(text.encode()) for text in texts)


def window_bits(runner: Runner, tokens: list[int]) -> float:
    runner.pool.reset(0)
    bits = 0.0
    for start in range(0, len(tokens), CHUNK):
        piece = tokens[start : start + CHUNK]
        logits = runner.forward([Window(0, piece, num_logits=len(piece), advance=True)])[0].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        runner.commit([0], [len(piece)])
        following = tokens[start + 1 : start + 1 + CHUNK]
        rows = np.arange(len(following))
        bits += float(np.sum(np.log(np.exp(logits[rows]).sum(-1)) - logits[rows, following]) / np.log(2))
    return bits


def acceptance(
    model: Model, draft: Model, table: ops.Ops, tokenizer: Any, temperature: float
) -> dict[str, Any]:
    """accepted / drafted by drafter, depth and kind."""
    makers: dict[str, Callable[[EngineConfig], Drafter]] = {
        "draft model": lambda config: DraftModel(draft, config, table, model.spec.vocab_size),
        "n-gram": lambda _: NGram(),
    }
    plans = [("none", 0), *((name, depth) for name in makers for depth in DEPTHS)]
    arms = [
        Arm(f"{name}, {depth}", EngineConfig(num_slots=1, max_context=CONTEXT, depth=depth), 0)
        for name, depth in plans
    ]

    def make(arm: Arm, clock: Callable[[], float]) -> Engine:
        name = arm.name.split(",")[0]
        drafter = makers[name](arm.config) if name in makers else NoDraft()
        return Engine(model, arm.config, table, tokenizer=tokenizer, drafter=drafter, clock=clock)

    workload = Workload(
        builtin_tasks(), SamplingParams(temperature=temperature, seed=1), tokenizer, model.spec.vocab_size
    )
    runs, whole = measure(arms, workload, make, alone=True)
    if not whole:
        sys.exit(130)
    reference = reference_texts(runs[0])
    found = {}
    for run in runs:
        summary = summarise(run, reference)
        assert summary.num_completed == summary.num_tasks, (run.arm.name, summary.failures)
        found[run.arm.name] = summary.accepted_by_kind | {"all": (summary.num_drafted, summary.num_accepted)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--skip-held-out", action="store_true")
    parser.add_argument("--model", default="mini-k3")
    parser.add_argument("--draft", default="mini-k3-draft")
    arguments = parser.parse_args()
    table = ops.choose()
    files = {"target": open_model(arguments.model), "draft": open_model(arguments.draft)}
    models = {name: file.load(table) for name, file in files.items()}
    report: dict[str, Any] = {"redraft": ops.description()}
    if not arguments.skip_held_out:
        texts = held_out_texts()
        report["held_out"] = {"files": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
        for name, model in models.items():
            report["held_out"][name] = bits_per_byte(files["target"], model, table, texts)
            print(f"{name}: {report['held_out'][name]:.3f} bits a byte on {len(texts)} files", flush=True)
    tokenizer = files["target"].require_tokenizer()
    for temperature in TEMPERATURES:
        found = acceptance(models["target"], models["draft"], table, tokenizer, temperature)
        report[f"temperature {temperature}"] = found
        kinds = list(found["none, 0"])
        print(f"\n| temperature {temperature} | " + " | ".join(kinds) + " |\n|" + "---|" * (len(kinds) + 1))
        for name, shares in found.items():
            if name != "none, 0":
                cells = [f"{a / d:.0%} of {d}" if d else "–" for d, a in (shares[kind] for kind in kinds)]
                print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
