"""The choice of a token: its distribution, its filters, and that nothing but its arguments matters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import TABLE
from redraft.config import SamplingParams
from redraft.errors import ConfigError
from redraft.speculate import accept, choose

NUM_DRAWS = 20_000


def draw(logits: list[float], position: int = 1, context: list[int] | None = None, **params: object) -> int:
    tokens = [0] * position if context is None else context
    return choose(np.array(logits, np.float32), SamplingParams(**params), tokens, 1, TABLE)  # type: ignore[arg-type]


def frequencies(logits: list[float], **params: object) -> np.ndarray:
    draws = [draw(logits, seed=seed, **params) for seed in range(NUM_DRAWS)]
    return np.bincount(draws, minlength=len(logits)) / NUM_DRAWS


def assert_distribution(found: np.ndarray, expected: list[float]) -> None:
    """Within 4 standard errors of each probability."""
    for share, p in zip(found, expected, strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / NUM_DRAWS)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = [2.0, 1.5, 1.0, 0.5]
    e = np.exp(np.array(logits) / temperature)
    assert_distribution(frequencies(logits, temperature=temperature), (e / e.sum()).tolist())


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    assert draw([0.0, 3.0, 3.0, 1.0]) == 1


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [0.625, 0.375, 0, 0]),
        ({"min_p": 0.3}, [0.625, 0.375, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"logit_bias": {3: 100.0}}, [0, 0, 0, 1]),
        ({"logit_bias": {0: -100.0}}, [0, 0.6, 0.25, 0.15]),
    ],
)
def test_filters(params: dict[str, object], expected: list[float]) -> None:
    logits = np.log([0.5, 0.3, 0.125, 0.075]).tolist()
    assert_distribution(frequencies(logits, temperature=1.0, **params), expected)


def test_penalties() -> None:
    """Repetition counts the prompt too and works on the logit's sign; presence and frequency count the
    output.
    """
    assert draw([2.0, 1.5, -1.0], context=[0], repetition_penalty=1.5) == 1
    assert draw([-2.0, -2.5, -9.0], context=[0], repetition_penalty=1.5) == 1
    assert draw([2.0, 1.5, 0.0], context=[0], presence_penalty=1.0) == 0  # 0 is in the prompt only
    assert draw([2.0, 1.5, 0.0], context=[2, 0], presence_penalty=1.0) == 1
    assert draw([2.0, 0.5, 0.0], context=[2, 0, 0, 0], frequency_penalty=0.4) == 0
    assert draw([2.0, 0.5, 0.0], context=[2, 0, 0, 0, 0], frequency_penalty=0.4) == 1


def test_nothing_is_modified() -> None:
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    params = SamplingParams(temperature=1, repetition_penalty=2, logit_bias={0: 5.0}, top_k=2)
    choose(logits, params, [0, 1], 1, TABLE)
    assert logits.tolist() == [1.0, 2.0, 3.0]


def test_seed_and_position_decide() -> None:
    flat = [0.0] * 50
    draws = {
        (seed, at): draw(flat, at, seed=seed, temperature=1.0) for seed in range(20) for at in range(1, 20)
    }
    assert draws == {key: draw(flat, key[1], seed=key[0], temperature=1.0) for key in draws}
    assert len(set(draws.values())) > 40


@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), min_size=7, max_size=7))
def test_acceptance_is_the_common_prefix(draft: list[int], own: list[int]) -> None:
    """What is emitted are the target's own tokens; a draft of one token is checked like any other."""
    emitted = accept(draft, lambda i: own[i])
    assert emitted == own[: len(emitted)]
    assert len(emitted) <= len(draft) + 1
    assert draft[: len(emitted) - 1] == own[: len(emitted) - 1]
    assert len(emitted) == len(draft) + 1 or draft[len(emitted) - 1] != own[len(emitted) - 1]


def test_a_wrong_draft_does_not_bend_the_distribution() -> None:
    """First token of a window whose draft always says 0: still the target's softmax, accepted with p(0)."""
    logits = np.array([2.0, 1.5, 1.0, 0.5], np.float32)
    e = np.exp(logits.astype(float))
    counts = np.zeros(4)
    for seed in range(NUM_DRAWS):
        params = SamplingParams(temperature=1.0, seed=seed)
        counts[accept([0], lambda _, params=params: choose(logits, params, [1], 1, TABLE))[0]] += 1
    assert_distribution(counts / NUM_DRAWS, (e / e.sum()).tolist())


def test_shared_noise_makes_similar_models_agree() -> None:
    """At least (1 − δ)/(1 + δ) for total variation δ: the bound of a Gumbel coupling."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    agree = sum(
        draw(np.log(p).tolist(), seed=seed, temperature=1.0)
        == draw(np.log(q).tolist(), seed=seed, temperature=1.0)
        for seed in range(NUM_DRAWS)
    )
    delta = np.abs(p - q).sum() / 2
    assert agree / NUM_DRAWS > (1 - delta) / (1 + delta)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, "temperature must be 0 to 100, not -1"),
        ({"temperature": math.nan}, "temperature must be a finite number, not nan"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_k": -5}, "top_k must be 0"),
        ({"min_p": 1.5}, "min_p must be 0 to 1"),
        ({"seed": -1}, "seed must be 0 to"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"stop_strings": ("",)}, "a stop string must not be empty"),
        ({"logit_bias": {1: math.inf}}, "logit_bias values must be finite"),
    ],
)
def test_absurd_parameters_are_refused(params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**params)  # type: ignore[arg-type]
