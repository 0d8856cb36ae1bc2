"""What is checked, apart from when: each check compares with a sequence that only ever saw the surviving
tokens, bit for bit, and raises AssertionError where it differs.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from conftest import runner
from redraft.engine import Engine, Generation
from redraft.runner import Runner
from redraft.speculate import choose
from redraft.state import Window


@lru_cache(30_000)
def truth(family: str, history: tuple[int, ...]) -> tuple[str, np.ndarray]:
    """Digest of every state tensor, and the next logits, after `history` in one piece on clean memory."""
    made = runner(family, depth=0, num_slots=1)
    if not history:
        return made.pool.read(0).digest(), np.empty(0)
    out = made.forward([Window(0, list(history), num_logits=1, advance=True)])[0]
    made.commit([0], [len(history)])
    return made.pool.read(0).digest(), out[0]


def check_state(family: str, made: Runner, slot: int, history: list[int]) -> None:
    """A slot's committed value: position, attention rows, recurrent states and conv windows."""
    assert int(made.pool.position[slot]) == len(history), "position"
    assert made.pool.read(slot).digest() == truth(family, tuple(history))[0], "state"


def check_logits(family: str, row: np.ndarray, history: list[int]) -> None:
    """The logits after `history`."""
    assert np.array_equal(row, truth(family, tuple(history))[1]), "logits"


def check_next(family: str, made: Runner, slot: int, history: list[int], token: int) -> None:
    """What the next token would see. Leaves it proposed."""
    row = made.forward([Window(slot, [token], num_logits=1)])[0][0]
    check_logits(family, row, [*history, token])


def check_tokens(family: str, generation: Generation, first: int, table: object) -> int:
    """From the `first` on, every token is the target's own choice given what precedes it → how many there
    are.
    """
    tokens, params = generation.tokens, generation.request.params
    for i in range(max(first, generation.num_prompt), len(tokens)):
        row = truth(family, tuple(tokens[:i]))[1]
        own = choose(row, params, tokens[:i], generation.num_prompt, table)  # type: ignore[arg-type]
        assert tokens[i] == own, f"token {i}"
    return len(tokens)


def check_slots(family: str, made: Engine, running: list[Generation]) -> None:
    """Every slot is running, parked or free; the states of running and parked ones are their tokens'."""
    made._scheduler.check()
    for generation in running:
        if generation.slot is not None:
            position = int(made._runner.pool.position[generation.slot])
            check_state(family, made._runner, generation.slot, generation.tokens[:position])
    for slot, parked in made._scheduler._parked.items():
        check_state(family, made._runner, slot, parked.tokens)
    store = made._handover.prefixes
    if store is not None:
        assert store.stats.num_bytes <= made.config.prefix_bytes, "prefix budget"
        for key, value in store._entries.items():
            history = np.frombuffer(key, np.int32).tolist()
            assert value.position == len(history), "kept position"
            assert value.digest() == truth(family, tuple(history))[0], "kept state"
