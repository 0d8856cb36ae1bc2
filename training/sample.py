"""What the target itself writes, for its draft to learn from: RUN_DIRECTORY/samples.npy.

    python training/sample.py RUN_DIRECTORY MODEL_DIRECTORY [--tokens 300000]

The target is the exported model, run by redraft. Half of the prompts are conversations up to an answer, half
are beginnings of windows of text, all from the training arrays; half of the answers are greedy, half at
temperature 0.8.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.progress import track

from prepare import SPECIAL, START
from redraft import ops
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Request
from redraft.loading import open_model

SLOTS = 16
PROMPT, ANSWER = 192, 128  # tokens, at most


def prompts(run: Path, seed: int = 0) -> Iterator[list[int]]:
    """Token lists without end, conversations and text in turns."""
    source = np.random.default_rng(seed)
    chats, text = (np.load(run / f"{name}.npy", mmap_mode="r") for name in ("chats", "text"))
    start, assistant = SPECIAL.index(START), SPECIAL.index("<|assistant|>")
    while True:
        at = int(source.integers(len(chats) - 4 * PROMPT))
        window = np.asarray(chats[at : at + 4 * PROMPT])
        begins = np.flatnonzero(window == start)
        answers = np.flatnonzero(window == assistant)
        answers = (
            answers[(answers > begins[0]) & (answers - begins[0] < PROMPT)] if len(begins) else answers[:0]
        )
        if len(answers):
            yield window[begins[0] : source.choice(answers) + 1].tolist()
        at = int(source.integers(len(text) - PROMPT))
        yield [start, *np.asarray(text[at : at + int(source.integers(16, PROMPT - 1))]).tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=300_000, help="of answers (default: 300000)")
    arguments = parser.parse_args()
    table = ops.choose()
    config = EngineConfig(num_slots=SLOTS, max_context=PROMPT + ANSWER, depth=0)
    engine = Engine(open_model(arguments.model).load(table), config, table)
    source = prompts(arguments.run)
    wanted = arguments.tokens // ANSWER
    made: list[np.ndarray] = []
    for first in track(range(0, wanted, SLOTS), "sampling"):
        running = []
        for number in range(first, first + SLOTS):
            params = SamplingParams(
                temperature=0.8 * (number % 2), seed=number, max_tokens=ANSWER, ignore_eos=True
            )
            running.append(engine.submit(Request(tokens=tuple(next(source)), params=params)))
        engine.run()
        made += [np.array(generation.tokens, np.uint16) for generation in running]
    np.save(arguments.run / "samples.npy", np.concatenate(made))
    print(f"{len(made)} samples, {sum(map(len, made))} tokens")


if __name__ == "__main__":
    main()
