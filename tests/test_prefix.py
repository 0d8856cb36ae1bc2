"""The prefix store: a hit gives the bytes of a cold run, the longest wins, and the budget holds."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import POLICIES, TABLE, model, tokens
from drafters import AlwaysWrong
from redraft.config import EngineConfig
from redraft.engine import Engine, Generation, Request
from redraft.engine.prefix import PrefixStore
from redraft.errors import ConfigError
from redraft.speculate import Drafter, DraftModel, NGram
from redraft.state import Committed
from test_engine import GREEDY, PROMPTS, SAMPLED, SETTINGS, engine, outputs, plain

PLENTY = 2**24
SHARED = tuple(tokens(50, seed=40))


def kept(position: int, size: int = 10) -> Committed:
    return Committed(position, {"x": np.full(size, position, np.float32)})


def put(store: PrefixStore, prefix: list[int], size: int = 10) -> None:
    store.keep(prefix, 4 * size, lambda: kept(len(prefix), size))


def test_the_longest_prefix_that_leaves_a_token() -> None:
    store = PrefixStore(PLENTY)
    for length in (2, 4, 6):
        put(store, list(range(length)))
    for count, expected in ((2, None), (3, 2), (4, 2), (5, 4), (6, 4), (7, 6), (50, 6)):
        value = store.lookup(list(range(count)))
        assert (value.position if value else None) == expected
    assert store.lookup([0, 1, 2, 3, 9, 9]).position == 4  # type: ignore[union-attr]
    assert store.lookup([5, 1, 2]) is None
    assert store.lookup(list(range(7)), longer_than=6) is None
    assert store.lookup(list(range(7)), longer_than=5) is not None
    assert store.stats.num_lookups == 11
    assert store.stats.num_hits == 8
    assert store.stats.num_tokens_saved == 2 + 2 + 4 + 4 + 6 + 6 + 4 + 1


def test_an_entry_at_another_position_is_a_miss() -> None:
    store = PrefixStore(PLENTY)
    store.keep([1, 2, 3], 40, lambda: kept(2))
    assert store.lookup([1, 2, 3, 4]) is None
    assert store.stats.num_entries == store.stats.num_bytes == 0


def test_the_budget_holds_at_every_moment() -> None:
    """Room is made before a state is copied; the least recently used goes first."""
    store = PrefixStore(3 * 44)  # 40 bytes of state and 4 of its one token
    for token in (1, 2, 3):
        put(store, [token])
    store.lookup([1, 9])

    def read() -> Committed:
        assert store.stats.num_bytes <= 2 * 44
        return kept(1)

    store.keep([4], 40, read)
    assert [store.lookup([token, 9]) is not None for token in (1, 2, 3, 4)] == [True, False, True, True]
    store.keep([5], 1000, lambda: pytest.fail("a state above the budget is not even copied"))
    assert store.stats.num_bytes == 3 * 44
    put(store, [6] * 23)  # 40 + 92 bytes: everything else goes
    assert store.stats.num_entries == 1


@cache
def cold(family: str, prompt: tuple[int, ...], temperature: float = 0) -> list[int]:
    """What the prompt gives without a store, drafts or a past."""
    return outputs(engine(family, prefill_chunk=200), SETTINGS[temperature], [prompt])[0]


def prefixed(family: str, drafter: Drafter | None = None, **settings: Any) -> Engine:
    return engine(family, drafter, **{"prefix_bytes": PLENTY, "prefix_interval": 16, **settings})


def ask(made: Engine, prompt: tuple[int, ...], params: Any = GREEDY, **more: Any) -> Generation:
    generation = made.submit(Request(tokens=prompt, params=params, **more))
    made.run()
    return generation


@pytest.mark.parametrize(("interval", "chunk"), [(1, 64), (7, 5), (16, 64), (50, 5)])
def test_a_hit_gives_the_bytes_of_a_cold_run(family: str, policy: str, interval: int, chunk: int) -> None:
    """Shared beginnings of every kind, with drafts, on two slots of dirty memory."""
    made = prefixed(
        family, NGram(3, 1), num_slots=2, depth=3, policy=policy, prefix_interval=interval,
        prefill_chunk=chunk, fill=0xFF,
    )  # fmt: skip
    prompts = [(*SHARED, 1, 2), (*SHARED, 3), SHARED, (*SHARED[:20], 7, 8), SHARED[:17], (*SHARED, 1, 2)]
    for temperature, prompt in itertools.product(SETTINGS, prompts):
        generation = ask(made, prompt, SETTINGS[temperature])
        assert generation.output == cold(family, prompt, temperature)
        assert generation.num_cached < generation.num_prompt
    stats = made.prefix_stats
    assert stats.num_lookups == 12
    assert stats.num_hits == (5 if interval == 50 else 11)
    assert stats.num_tokens_saved >= (5 * 50 if interval == 50 else 11 * 16)
    assert {b.category: b.num_bytes for b in made.buffers()}["prefix store"] == stats.num_bytes


@pytest.mark.parametrize("drafter", ["none", "own", "foreign", "wrong"])
@pytest.mark.parametrize("store", [0, PLENTY])
def test_cache_on_and_off_with_drafts_on_and_off(drafter: str, store: int) -> None:
    """Four ways, one answer; the draft model catches up after a hit and is right again."""
    config = EngineConfig(num_slots=1, max_context=160, depth=3, prefix_bytes=store, prefix_interval=16)
    makers = {
        "none": lambda: None,
        "own": lambda: DraftModel(model("kimi_k3"), config, TABLE),
        "foreign": lambda: DraftModel(model("kimi_linear"), config, TABLE),
        "wrong": AlwaysWrong,
    }
    made = Engine(model("kimi_k3"), config, TABLE, drafter=makers[drafter]())
    for temperature in SETTINGS:
        first, second = (ask(made, PROMPTS[2], SETTINGS[temperature]) for _ in range(2))
        assert first.output == second.output == plain("kimi_k3", temperature)[2]
        assert second.num_cached == (64 if store else 0)
        if drafter == "own":
            assert second.num_accepted > 10


def test_a_following_turn_evaluates_what_is_new() -> None:
    """The state at the end of a request is the longest there is."""
    made = prefixed("kimi_k3", NGram(3, 1), num_slots=1, depth=3)
    first = ask(made, PROMPTS[0])
    outputs(made, SAMPLED, PROMPTS[1:3])
    second = ask(made, (*first.tokens, 5, 6, 7))
    assert second.num_cached == len(first.tokens) - 1
    assert second.output == cold("kimi_k3", (*first.tokens, 5, 6, 7))


def test_the_longer_of_slot_and_store_wins(policy: str) -> None:
    made = prefixed("kimi_k3", NGram(3, 1), num_slots=2, depth=3, policy=policy)
    first = ask(made, PROMPTS[0], session="a")
    hits = made.prefix_stats.num_hits
    second = ask(made, (*first.tokens, 1), session="a")
    assert second.num_cached == len(first.tokens) - 1
    assert made.prefix_stats.num_hits == hits  # the slot had as much
    ask(made, (*second.tokens, 2, 3))
    third = ask(made, (*first.tokens, 9, 9), session="a")  # leaves the slot's path, not the store's
    assert third.num_cached == len(first.tokens) - 1
    assert third.output == cold("kimi_k3", (*first.tokens, 9, 9))


@pytest.mark.parametrize("policy_", ["replay", "snapshot"])
def test_a_session_goes_back_by_an_exact_rollback(policy_: str) -> None:
    """A prompt that differs from what the slot holds only in the last tokens needs no store."""
    made = engine("kimi_k3", NGram(3, 1), depth=7, policy=policy_)
    truth = plain("kimi_k3", 0)[0]
    made = engine("kimi_k3", _Right([*PROMPTS[0], *truth]), depth=7, policy=policy_)
    first = ask(made, PROMPTS[0], session="a")
    status = made._runner.pool.status(made._scheduler.parked("a")[0])  # type: ignore[index]
    assert status.floor < status.position - 1
    edited = (*first.tokens[: status.position - 2], 7, 7, 7)
    second = ask(made, edited, session="a")
    assert second.num_cached == status.position - 2
    assert second.output == cold("kimi_k3", edited)


class _Right(NGram):
    """Knows one text."""

    def __init__(self, text: list[int]) -> None:
        super().__init__()
        self._known = text

    def propose(self, queries: Any) -> list[list[int]]:
        return [
            self._known[len(q.tokens) :][: q.max_draft]
            if self._known[: len(q.tokens)] == list(q.tokens)
            else []
            for q in queries
        ]


def test_states_are_cut_from_a_batch_at_their_own_positions() -> None:
    """Prompts of other lengths in one batch, each kept and used at its own multiples."""
    made = prefixed("kimi_k3", num_slots=3, prefill_chunk=70)
    prompts = [tuple(tokens(n, seed=n)) for n in (40, 29, 33)]
    outputs(made, GREEDY, prompts)
    for prompt in prompts:
        longer = (*prompt, 1, 2, 3, 4, 5)
        generation = ask(made, longer)
        assert generation.num_cached == len(prompt) // 16 * 16
        assert generation.output == cold("kimi_k3", longer)


def test_a_small_budget_only_costs_time(policy: str) -> None:
    """Conversations in turn, more than fit: states come and go, texts stay, slots in use are not touched."""
    config = EngineConfig(
        num_slots=2, max_context=160, depth=3, policy=policy, prefix_interval=8, prefix_bytes=450_000
    )  # type: ignore[arg-type]
    made = Engine(model("kimi_k3"), config, TABLE, drafter=NGram(3, 1))
    talks = [tuple(tokens(9, seed=i)) for i in range(6)]
    for _ in range(3):
        for i, talk in enumerate(talks):
            generation = ask(made, talk)
            assert generation.output == cold("kimi_k3", talk)
            assert made.prefix_stats.num_bytes <= 450_000
            talks[i] = (*generation.tokens[: len(talk) + 5], 3, i)
    assert made.prefix_stats.num_hits > 0


@pytest.mark.parametrize("policy_", POLICIES)
def test_a_cancelled_request_leaves_only_whole_states(policy_: str) -> None:
    made = prefixed("kimi_k3", AlwaysWrong(), depth=3, policy=policy_, prefill_chunk=10)
    for num_steps in range(1, 12):
        generation = made.submit(Request(tokens=(*SHARED, num_steps), params=GREEDY))
        for _ in range(num_steps):
            made.step()
        made.cancel(generation)
    assert ask(made, (*SHARED, 77)).output == cold("kimi_k3", (*SHARED, 77))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="prefix bytes must be 0"):
        EngineConfig(prefix_bytes=-1)
    with pytest.raises(ConfigError, match="prefix interval must be at least 1 token, not 0"):
        EngineConfig(prefix_interval=0)
