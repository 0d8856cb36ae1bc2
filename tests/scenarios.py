"""Scenarios that a planted fault has to fail: each runs a part of the engine and checks after every step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from checks import check_slots, check_tokens, truth
from conftest import TABLE, tokens
from field import FAMILY, Slots, made_engine
from redraft.config import SamplingParams
from redraft.engine import Request
from redraft.errors import StateError
from redraft.speculate import NGram
from redraft.state import Window
from redraft.state.saved import SavedState


def rounds(policy: str) -> None:
    """Every accept count, beside another slot, on memory that was never cleared and on a slot used before."""
    slots = Slots(policy, 3)
    slots.prefill(2, 6, seed=9)
    for _ in range(2):
        slots.joint({0: tokens(7, seed=1), 1: tokens(4, seed=2)}, advance=True)
        for accepted in (0, 2, 3, 1):
            window = tokens(4, seed=accepted)
            slots.joint({0: window, 1: window[:2]}, {0: accepted + 1, 1: 1 + accepted % 2})
        slots.runner.pool.reset(0)
        slots.seen[0] = []


def rollbacks(policy: str) -> None:
    """As far back as the policy says it goes, one by one and at once, and on from there."""
    for back, consumed in product(([1], [2], [1, 1], [3], [4]), (1, 3)):
        slots = Slots(policy, 3)
        slots.prefill(0, 7)
        slots.decode(0, 1, 2)
        slots.verify(0, [4, 5, 6], consumed)
        for number in back:
            slots.rollback(0, number)
        slots.runner.forward([Window(0, [8, 9], num_logits=0)])
        slots.rollback(0, 0)
        assert slots.runner.pool.num_proposed(0) == 0
        slots.verify(0, [8, 9, 1, 2], 2)


def saves(policy: str) -> None:
    """With records pending and a round proposed; then the source goes on."""
    slots = Slots(policy, 3)
    slots.prefill(0, 7)
    slots.verify(0, [4, 5, 6, 7], 3)
    slots.runner.forward([Window(0, [8, 9], num_logits=0)])
    data = slots.saved(0)
    slots.restore(1, data)
    value = slots.runner.pool.read(1)
    slots.verify(0, [1, 2], 2)
    slots.verify(1, [3, 4], 1)
    assert value.digest() == truth(FAMILY, tuple(SavedState.from_bytes(data).tokens))[0]


def requests(temperature: float = 0.0, **settings: Any) -> None:
    """Tokens and states of requests with shared beginnings, after every step."""
    made = made_engine(
        NGram(3, 1), depth=3, prefix_bytes=2**24, prefix_interval=4, prefill_chunk=7, **settings
    )
    shared, params = tokens(8, seed=1) * 2, SamplingParams(max_tokens=8, temperature=temperature, seed=3)
    for tail in ([1, 2], tokens(18, seed=4), [3], [3], []):
        prompt = tail if len(tail) > 2 else [*shared[: 16 - len(tail)], *tail]
        generation = made.submit(Request(tokens=tuple(prompt), params=params, session="s"))
        for _ in range(60):
            if generation.finish_reason is None:
                made.step()
                check_slots(FAMILY, made, [generation] if generation.finish_reason is None else [])
        assert generation.finish_reason is not None
        assert len(generation.output) == 8
        check_tokens(FAMILY, generation, 0, TABLE)


def is_refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except StateError:
        return True
    return False


def refusals(where: str) -> None:
    """Of a saved state with one altered bit, or of another model's."""
    made = made_engine()
    made.submit(Request(tokens=(1, 2, 3)))
    data = made.save(made.submit(Request(tokens=(1, 2, 3))))
    if where == "bit":
        assert is_refused(lambda: made.restore(bytes([*data[:-40], data[-40] ^ 1, *data[-39:]])))
    else:
        assert is_refused(lambda: made_engine(family="kimi_linear").restore(data))
