"""Public bugs of kind F: what is sampled, where it stops, and what is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from conftest import TABLE, model_file, tokens
from field import Scripted, ask, cold, each_policy, knowing, made_engine
from redraft.config import SamplingParams
from redraft.engine import FinishReason, Generation, Request
from redraft.loading import TextStream
from redraft.speculate import accept, choose
from test_engine import engine

NUM_DRAWS = 8_000


def frequencies(logits: list[float], draft: dict[int, float] | int, **params: float) -> np.ndarray:
    """How often each token is emitted after a draft token from the given distribution."""
    rng, counts = np.random.default_rng(3), np.zeros(len(logits))
    row = np.array(logits, np.float32)
    for seed in range(NUM_DRAWS):
        drafted = draft if isinstance(draft, int) else int(rng.choice(list(draft), p=list(draft.values())))
        made = SamplingParams(seed=seed, **params)  # type: ignore[arg-type]
        emitted = accept([drafted], lambda _, made=made: choose(row, made, [1], 1, TABLE))  # type: ignore[misc]
        counts[emitted[0]] += 1
    return counts / NUM_DRAWS


def assert_close(found: np.ndarray, expected: list[float]) -> None:
    """Within 4 standard errors."""
    for share, p in zip(found, expected, strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / NUM_DRAWS)


@pytest.mark.parametrize(
    ("p", "draft"), [([0.35, 0.35, 0.30], {0: 0.8, 1: 0.2}), ([0.5, 0.3, 0.2], {0: 1.0})]
)
def test_f1_a_drafter_that_misreports_its_distribution(p: list[float], draft: dict[int, float]) -> None:
    """The drafter's q was not what it had sampled from, and the residual was wrong. Acceptance here knows no
    q: the target's distribution comes out for any draft.
    https://github.com/huggingface/transformers/issues/47932
    """
    assert_close(frequencies(np.log(p).tolist(), draft, temperature=1.0), p)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_f2_sampling_stays_sampling(temperature: float) -> None:
    """Drafts were compared with the argmax at any temperature, so that text with drafts was greedy.
    https://github.com/lablup/mlxcel/issues/902
    """
    logits = [2.0, 1.5, 1.0, 0.5]
    e = np.exp(np.array(logits) / temperature)
    assert_close(frequencies(logits, 0, temperature=temperature), (e / e.sum()).tolist())


@each_policy
def test_f3_a_seed_is_of_its_request(policy: str) -> None:
    """One generator for all advanced with every call: neighbours and uptime showed in the text.
    https://github.com/vllm-project/vllm/issues/6038
    """
    prompt, params = tokens(8, seed=1), SamplingParams(max_tokens=10, temperature=2.0, seed=42)
    made = made_engine(Scripted(lambda seen: [seen[-1]] * 2), policy=policy, num_slots=4)
    alone = ask(made, prompt, params).output
    batch = [made.submit(Request(tokens=tuple(tokens(6, seed=i)), params=params)) for i in range(3)]
    preempted = made.submit(Request(tokens=tuple(prompt), params=params))
    for _ in range(4):
        made.step()
    made.preempt(preempted)
    made.run()
    for i in range(20):
        ask(made, tokens(3, seed=i), replace(params, max_tokens=2))
    again = ask(made, prompt, params).output
    assert alone == preempted.output == again == cold(prompt, params)
    assert len({tuple(g.output) for g in batch}) == 3


@pytest.mark.parametrize("stop_at", [2, 4, 5])
@pytest.mark.parametrize("kind", ["stop token", "end token"])
def test_f5_a_stop_and_a_length_in_one_run(stop_at: int, kind: str) -> None:
    """The length was tested first, after the whole run had been appended.
    https://github.com/sgl-project/sglang/issues/31599
    """
    tokenizer = model_file("kimi_k3").require_tokenizer()
    stop = 250 if kind == "stop token" else tokenizer.eos_tokens[0]
    run = [10, 11, 20, 21, 22, 23]
    run.insert(stop_at, stop)
    params = SamplingParams(max_tokens=5, stop_tokens=(250,))
    ends = frozenset({250, *tokenizer.eos_tokens})
    generation = Generation(0, Request(tokens=(1,), params=params), TextStream(tokenizer), ends, 0.0)
    for token in run:
        if generation.finish_reason is None:
            generation.append(token, 0.0, 100)
    expected = (run[: stop_at + 1], FinishReason.STOP) if stop_at < 5 else (run[:5], FinishReason.LENGTH)
    assert (generation.output, generation.finish_reason) == expected


@pytest.mark.parametrize("include", ["stop first", "end first"])
def test_f6_a_stop_string_early_in_a_run(include: str) -> None:
    """Only the last few tokens were searched, or only one of two reasons to stop was looked at.
    https://github.com/sgl-project/sglang/pull/23802
    """
    tokenizer = model_file("kimi_k3").require_tokenizer()
    end = tokenizer.eos_tokens[0]
    before, after = tokenizer.encode("x END a b c", start=False), tokenizer.encode("d e f", start=False)
    run = [*before, end, *after] if include == "stop first" else [*tokenizer.encode("x EN", start=False), end]
    params = SamplingParams(max_tokens=50, stop_strings=("END",))
    generation = Generation(
        0, Request(tokens=(1,), params=params), TextStream(tokenizer), frozenset({end}), 0.0
    )
    shown = ""
    for token in run:
        if generation.finish_reason is None:
            shown += generation.append(token, 0.0, 100)
    assert shown == generation.text == ("x " if include == "stop first" else "x EN")
    assert generation.finish_reason is FinishReason.STOP


@each_policy
def test_f6_a_turn_after_a_stop_string(policy: str) -> None:
    """The state holds the tokens that were kept, so that the next turn is right."""
    params = SamplingParams(max_tokens=30)
    first = engine("kimi_k3").submit(Request(tokens=(5, 6, 7), params=params))
    made = engine("kimi_k3")
    first = made.submit(first.request)
    made.run()
    at = next(i for i in range(4, len(first.text) - 2) if "\ufffd" not in first.text[i : i + 2])
    stopped = replace(params, stop_strings=(first.text[at : at + 2],))
    text = [5, 6, 7, *first.output]
    made = engine("kimi_k3", knowing(text), depth=7, policy=policy)
    generation = made.submit(Request(tokens=(5, 6, 7), params=stopped, session="s"))
    made.run()
    assert generation.text == first.text[: first.text.index(stopped.stop_strings[0])]
    turn = [*generation.tokens, 9, 9]
    second = made.submit(Request(tokens=tuple(turn), params=params, session="s"))
    made.run()
    assert second.num_cached == len(generation.tokens) - 1
    assert second.output == cold(turn, params)


@each_policy
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_f7_exactly_max_tokens(policy: str, max_tokens: int) -> None:
    """Accepted drafts went beyond the limit, or a block was charged in full and cut.
    https://github.com/ohdearquant/lattice/issues/242
    """
    prompt, params = tokens(9, seed=2), SamplingParams(max_tokens=max_tokens)
    text = [*prompt, *cold(prompt, SamplingParams(max_tokens=20))]
    for wrong in (frozenset(), frozenset({len(prompt) + 2})):
        generation = ask(made_engine(knowing(text, wrong), policy=policy), prompt, params)
        assert generation.output == text[9 : 9 + max_tokens]
        assert generation.num_accepted <= max_tokens - 1


@each_policy
def test_f10_drafts_of_before_a_preemption(policy: str) -> None:
    """Drafts made before a preemption were verified after it. Here a preempted request has none.
    https://github.com/vllm-project/vllm/pull/31955
    """
    prompt, params = tokens(9, seed=2), SamplingParams(max_tokens=9)
    asked: list[int] = []

    def script(seen: list[int]) -> list[int]:
        asked.append(len(seen))
        return [1, 2, 3]

    made = made_engine(Scripted(script), policy=policy)
    generation = made.submit(Request(tokens=tuple(prompt), params=params))
    for _ in range(3):
        made.step()
    made.preempt(generation)
    before, length = len(asked), len(generation.tokens)
    made.run()
    assert all(count >= length for count in asked[before:])
    assert generation.output == cold(prompt, params)


@each_policy
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=12, presence_penalty=2.0),
        SamplingParams(max_tokens=12, repetition_penalty=1.8),
        SamplingParams(max_tokens=12, frequency_penalty=1.5, temperature=0.7, seed=3),
    ],
)
def test_f11_penalties_count_each_token_once(policy: str, params: SamplingParams) -> None:
    """Penalties were not applied to drafts, or the last token counted twice.
    https://github.com/NVIDIA/TensorRT-LLM/pull/17701
    """
    prompt = tokens(6, seed=1) * 2
    own = cold(prompt, params)
    for script in (lambda seen: [seen[-1]] * 4, lambda seen: (prompt + own)[len(seen) :]):
        assert ask(made_engine(Scripted(script), policy=policy), prompt, params).output == own


def test_f11_the_second_draft_sees_the_first() -> None:
    """presence_penalty 2 on logits (1, 0.9, 0): token 0, then token 1, then token 2."""
    row, params = np.array([1.0, 0.9, 0.0], np.float32), SamplingParams(presence_penalty=2.0)
    draft, context = [0, 1], [9]
    emitted = accept(
        draft, lambda i: choose(np.append(row, [-9.0] * 7), params, [*context, *draft[:i]], 1, TABLE)
    )
    assert emitted == [0, 1, 2]
