"""Public bugs of kind C: kept states, prefix hits, save and restore."""

from __future__ import annotations

import itertools

import pytest

from checks import check_slots
from conftest import TABLE, model, tokens
from field import FAMILY, ask, cold, each_policy, made_engine
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Request
from redraft.speculate import DraftModel, NGram

GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.9, seed=4)
STORE = {"prefix_bytes": 2**24, "prefix_interval": 16}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_c1_two_prompts_in_one_batch(order: tuple[int, int]) -> None:
    """States were cut from one grid over the whole batch, so that only the first request's were right.
    https://github.com/sgl-project/sglang/pull/37836
    """
    prompts = [tokens(n, seed=n) for n in (40, 52)]
    made = made_engine(prefill_chunk=64, **STORE)
    for prompt in prompts:
        made.submit(Request(tokens=tuple(prompt), params=GREEDY))
    made.run()
    check_slots(FAMILY, made, [])  # compares every kept state
    for i in order:
        longer = [*prompts[i], 1, 2, 3, 4, 5]
        generation = ask(made, longer, GREEDY)
        assert generation.output == cold(longer, GREEDY)
        assert generation.num_cached == len(prompts[i]) // 16 * 16


@each_policy
def test_c2_rescoring_one_s_own_text(policy: str) -> None:
    """A finished request gave the tree a state from the stale end of a buffer.
    https://github.com/sgl-project/sglang/pull/32555
    """
    made = made_engine(NGram(3, 1), policy=policy, **STORE)
    first = ask(made, tokens(12) * 2, SAMPLED)
    check_slots(FAMILY, made, [])
    again = ask(made, [*first.tokens, 8], SAMPLED)
    assert again.output == cold([*first.tokens, 8], SAMPLED)
    assert again.num_cached == len(first.tokens) - 1


def test_c4_the_unit_of_a_position() -> None:
    """A state was looked up by a position divided by another cache's block size. A kept state here has no
    index: its key is the tokens, its position their number.
    https://github.com/vllm-project/vllm/issues/55600
    """
    prompt = tokens(100, seed=3)
    made = made_engine(**STORE)
    ask(made, prompt, GREEDY)
    for length in (97, 96, 65, 33):
        cut = [*prompt[:length], 1]
        generation = ask(made, cut, GREEDY)
        assert generation.num_cached == length // 16 * 16
        assert generation.output == cold(cut, GREEDY)


def test_c5_a_chunk_that_ends_inside_a_block() -> None:
    """The state after 1866 tokens was stored under the hash of 2048.
    https://github.com/vllm-project/vllm/pull/34587
    """
    prompt = tokens(25, seed=3)
    made = made_engine(prefill_chunk=14, **STORE)
    ask(made, prompt, GREEDY)
    check_slots(FAMILY, made, [])
    other = [*prompt[:16], 1, 2, 3]
    generation = ask(made, other, GREEDY)
    assert (generation.num_cached, generation.output) == (16, cold(other, GREEDY))


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_c6_a_kept_state_that_covers_the_whole_prompt(max_tokens: int) -> None:
    """With nothing left to evaluate there are no logits, and those of another request were sampled.
    https://github.com/JamePeng/llama-cpp-python/issues/178
    """
    params = SamplingParams(max_tokens=max_tokens)
    made = made_engine(prefix_bytes=2**24, prefix_interval=4)
    prompt = tokens(9, seed=1)
    for asked, num_cached in ((prompt, 0), (prompt[:8], 4), (prompt[:4], 0), (prompt, 8), (prompt, 8)):
        generation = ask(made, asked, params)
        assert generation.output == cold(asked, params)
        assert generation.num_cached == num_cached < generation.num_prompt


@each_policy
def test_c7_an_edit_before_kept_states(policy: str) -> None:
    """Checkpoints beyond the edit stayed and were restored.
    https://github.com/ggml-org/llama.cpp/pull/20671
    """
    made = made_engine(NGram(3, 1), policy=policy, prefix_bytes=2**24, prefix_interval=8)
    prompt = tokens(30, seed=5)
    first = ask(made, prompt, GREEDY, session="s")
    edited = [*first.tokens[:25], 200, *first.tokens[26:]]
    for asked, num_cached in ((edited, 24), (first.tokens, 24), ([*prompt, 1], 24)):
        generation = ask(made, asked, GREEDY, session="s")
        assert generation.output == cold(asked, GREEDY)
        assert generation.num_cached >= num_cached
    assert ask(made, edited, GREEDY).num_cached >= 32  # its own states are there too


def test_c8_a_second_turn_evaluates_what_is_new() -> None:
    """A rule that a recurrent state cannot meet made every turn a full prefill.
    https://github.com/ggml-org/llama.cpp/issues/24055
    """
    for session in ("s", None):
        made = made_engine(**STORE)
        first = ask(made, tokens(90, seed=1), GREEDY, session=session)
        turn = [*first.tokens, *tokens(9, seed=2)]
        second = ask(made, turn, GREEDY, session=session)
        assert second.num_prompt - second.num_cached == 9 + 1
        assert second.output == cold(turn, GREEDY)


def test_c9_a_restored_slot_is_used() -> None:
    """The restore reported success and the next request evaluated everything.
    https://github.com/ggml-org/llama.cpp/issues/27813
    """
    source = made_engine()
    first = ask(source, tokens(80, seed=1), GREEDY, session="s")
    made = made_engine()
    made.restore(source.save("s"))
    turn = [*first.tokens, *tokens(20, seed=2)]
    second = ask(made, turn, GREEDY, session="s")
    assert second.num_prompt - second.num_cached == 20 + 1
    assert second.output == cold(turn, GREEDY)


@each_policy
def test_c10_cache_and_drafts_on_and_off(policy: str) -> None:
    """Only hits with drafts were wrong. Four ways, one answer each.
    https://github.com/vllm-project/vllm/issues/53912
    """
    prompt = tokens(60, seed=2) + tokens(20, seed=2)
    for params in (GREEDY, SAMPLED):
        answers = set()
        for store, depth in itertools.product((0, 2**24), (0, 4)):
            made = made_engine(
                NGram(3, 1), policy=policy, depth=depth, prefix_bytes=store, prefix_interval=16
            )
            answers |= {tuple(ask(made, prompt, params).output) for _ in range(2)}
        assert answers == {tuple(cold(prompt, params))}


@pytest.mark.parametrize("length", [16, 17, 18, 23, 31, 32, 33, 48, 49])
def test_c11_a_tail_of_any_length(length: int) -> None:
    """A tail of exactly one token took another kernel, and gave another first token.
    https://github.com/sgl-project/sglang/pull/29633
    """
    made = made_engine(**STORE)
    prompt = tokens(length, seed=length)
    first, second = (ask(made, prompt, SAMPLED) for _ in range(2))
    assert first.output == second.output == cold(prompt, SAMPLED)
    assert second.num_cached == (length - 1) // 16 * 16


def test_c12_a_store_that_is_on_has_hits() -> None:
    """Caching was on, and never hit anything. Here it is counted, and its unit is a setting.
    https://github.com/vllm-project/vllm/issues/51198
    """
    made = made_engine(**STORE)
    for n, expected in ((10, 0), (32, 16), (64, 48), (100, 96)):
        prompt = tokens(n, seed=n)
        cached = [ask(made, prompt, GREEDY).num_cached for _ in range(2)]
        assert cached == [0, expected]
    stats = made.prefix_stats
    assert (stats.num_lookups, stats.num_hits, stats.num_tokens_saved) == (8, 3, 160)


def test_c14_states_that_come_and_go() -> None:
    """When a state was recycled, drafter and target went apart: every draft was rejected.
    https://github.com/sgl-project/sglang/issues/36537
    """
    rates = []
    for store in (0, 150_000):
        config = EngineConfig(num_slots=2, max_context=160, depth=3, prefix_bytes=store, prefix_interval=8)
        made = Engine(model(FAMILY), config, TABLE, drafter=DraftModel(model(FAMILY), config, TABLE))
        talks = [tokens(12, seed=i) for i in range(5)]
        drafted = accepted = 0
        for _ in range(3):
            for i, talk in enumerate(talks):
                generation = ask(made, talk, GREEDY)
                assert generation.output == cold(talk, GREEDY)
                drafted, accepted = drafted + generation.num_drafted, accepted + generation.num_accepted
                talks[i] = [*generation.tokens[: len(talk) + 4], i, 7]
        check_slots(FAMILY, made, [])
        rates.append(accepted / drafted)
    assert rates == [1.0, 1.0]
