"""The promise: the same request gives the same bytes, whatever else happens. And the life of a request."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import FILLS, POLICIES, RECURRENT_FAMILIES, TABLE, model, model_file, tokens
from drafters import AlwaysWrong, EverySecondStep, Prophet
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, FinishReason, Generation, Request
from redraft.errors import ConfigError, RequestError
from redraft.speculate import Drafter, DraftModel, DraftQuery, NGram, NoDraft, Stateless

EXHAUSTIVE = bool(os.environ.get("REDRAFT_EXHAUSTIVE"))
NUM_OUTPUT = 20
PROMPTS = [tuple(tokens(n, seed=n) * 2) for n in (12, 3, 33, 8)]  # repeated, so that lookup finds something
GREEDY = SamplingParams(max_tokens=NUM_OUTPUT)
SAMPLED = SamplingParams(
    max_tokens=NUM_OUTPUT, temperature=0.8, seed=11, top_k=60, top_p=0.98, repetition_penalty=1.1,
    presence_penalty=0.1, logit_bias={7: 0.5},
)  # fmt: skip
SETTINGS = {0: GREEDY, 0.8: SAMPLED}

AXES: dict[str, Sequence[Any]] = {
    "drafter": ("none", "ngram", "model", "foreign model", "wrong", "every second step", "prophet"),
    "depth": (1, 3, 7),
    "policy": POLICIES,
    "neighbours": (0, 3),
    "chunk": (1, 7, 64, 1000),
    "fill": FILLS,
    "temperature": tuple(SETTINGS),
    "family": RECURRENT_FAMILIES,
}
Case = dict[str, Any]


def engine(family: str, drafter: Drafter | None = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"num_slots": 1, "max_context": 160, "depth": 0, **settings})
    return Engine(
        model(family), config, TABLE, tokenizer=model_file(family).require_tokenizer(), drafter=drafter
    )


def outputs(made: Engine, params: SamplingParams, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    generations = [made.submit(Request(tokens=prompt, params=params)) for prompt in prompts]
    made.run()
    return [generation.output for generation in generations]


@cache
def plain(family: str, temperature: float) -> list[list[int]]:
    """Each prompt alone, without speculation, one token a step."""
    return [outputs(engine(family), SETTINGS[temperature], [prompt])[0] for prompt in PROMPTS]


def drafter_for(case: Case, config: EngineConfig) -> Drafter:
    truth = plain(case["family"], case["temperature"])
    other = "kimi_linear" if case["family"] == "kimi_k3" else "kimi_k3"
    makers = {
        "none": NoDraft,
        "ngram": lambda: NGram(max_match=3, min_match=1),
        "model": lambda: DraftModel(model(case["family"]), config, TABLE),
        "foreign model": lambda: DraftModel(model(other), config, TABLE),
        "wrong": AlwaysWrong,
        "every second step": EverySecondStep,
        "prophet": lambda: Prophet([[*p, *t] for p, t in zip(PROMPTS, truth, strict=True)]),
    }
    return makers[case["drafter"]]()


def all_pairs(rng: random.Random) -> list[Case]:
    """Cases in which every value of every axis meets every value of every other axis."""
    wanted = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    cases = []
    while wanted:
        tries = [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(60)]
        best = max(tries, key=lambda case: len(wanted & _pairs(case)))
        wanted -= _pairs(best)
        cases.append(best)
    return cases


def _pairs(case: Case) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(AXES, 2)}


def cases() -> list[Case]:
    if EXHAUSTIVE:
        return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    rng = random.Random(20)
    return all_pairs(rng) + [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(150)]


def test_the_same_request_gives_the_same_bytes() -> None:
    """Drafter × depth × policy × neighbours × prompt chunks × dirty memory × temperature × family.

    All pairs of values, and more at random; all combinations with REDRAFT_EXHAUSTIVE=1.
    """
    accepted: dict[str, set[int]] = {name: set() for name in AXES["drafter"]}
    for case in cases():
        config = EngineConfig(
            num_slots=1 + case["neighbours"], max_context=160, depth=case["depth"], policy=case["policy"],
            prefill_chunk=case["chunk"], fill=case["fill"],
        )  # fmt: skip
        made = Engine(
            model(case["family"]), config, TABLE,
            tokenizer=model_file(case["family"]).require_tokenizer(), drafter=drafter_for(case, config),
        )  # fmt: skip
        prompts = PROMPTS[: config.num_slots]
        generations = [
            made.submit(Request(tokens=prompt, params=SETTINGS[case["temperature"]])) for prompt in prompts
        ]
        made.run()
        truth = plain(case["family"], case["temperature"])
        assert [g.output for g in generations] == truth[: len(generations)], case
        accepted[case["drafter"]] |= {g.num_accepted for g in generations}
    assert max(accepted["prophet"]) > 10  # the cases do accept drafts
    assert max(accepted["model"]) > 10
    assert max(accepted["wrong"]) <= 1


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 12, 15, 16])
def test_prompts_of_several_equal_chunks(chunk: int) -> None:
    """A prompt of exactly two chunks was once taken for finished after the first."""
    made = engine("kimi_k3", prefill_chunk=chunk)
    assert outputs(made, GREEDY, [PROMPTS[3]])[0] == plain("kimi_k3", 0)[3]


def test_a_draft_model_of_itself_is_always_right() -> None:
    """With shared noise, also at a temperature and with penalties: the drafter samples what the target
    samples.
    """
    for temperature, params in SETTINGS.items():
        config = EngineConfig(num_slots=1, max_context=160, depth=3)
        made = Engine(model("kimi_k3"), config, TABLE, drafter=DraftModel(model("kimi_k3"), config, TABLE))
        generation = made.submit(Request(tokens=PROMPTS[0], params=params))
        made.run()
        assert generation.output == plain("kimi_k3", temperature)[0]
        assert generation.num_accepted == generation.num_drafted > 10


def test_seeds_differ_and_repeat() -> None:
    """One seed: one text, alone, in a batch, after other requests. Another seed: another text."""
    params = [replace(SAMPLED, seed=seed) for seed in (1, 2)]
    made = engine("kimi_k3", num_slots=4)
    first = [outputs(made, p, [PROMPTS[0]])[0] for p in params]
    assert first[0] != first[1]
    outputs(made, SAMPLED, PROMPTS)
    assert outputs(made, params[0], [PROMPTS[1], PROMPTS[0], PROMPTS[2]])[1] == first[0]


def test_more_requests_than_slots(family: str, policy: str) -> None:
    """Slots are reused, on memory that was dirty from the start and is dirtier now; some requests are
    cancelled.
    """
    made = engine(family, NGram(3, 1), num_slots=2, depth=3, policy=policy, fill=0xFF, prefill_chunk=5)
    order = [0, 1, 2, 3] * 3
    generations = [made.submit(Request(tokens=PROMPTS[i], params=GREEDY)) for i in order]
    for step in range(1000):
        if not made.has_work:
            break
        if step in (3, 9, 15):
            made.cancel(next(g for g in generations if g.finish_reason is None and g.slot is not None))
        made.step()
    cancelled = [g for g in generations if g.finish_reason is FinishReason.CANCELLED]
    assert len(cancelled) == 3
    for i, generation in zip(order, generations, strict=True):
        truth = plain(family, 0)[i]
        assert generation.output == (truth[: len(generation.output)] if generation in cancelled else truth)


def test_per_request_depth_and_parameters_in_one_batch() -> None:
    made = engine("kimi_k3", NGram(3, 1), num_slots=4, depth=7)
    mixed = [
        made.submit(Request(tokens=prompt, params=params, depth=depth))
        for prompt, params, depth in zip(
            PROMPTS, (GREEDY, SAMPLED, GREEDY, SAMPLED), (0, 1, 7, None), strict=True
        )
    ]
    made.run()
    assert [g.output for g in mixed] == [
        plain("kimi_k3", temperature)[i] for i, temperature in enumerate((0, 0.8, 0, 0.8))
    ]
    assert mixed[0].num_drafted == 0


def test_the_output_ends_exactly_at_its_limits() -> None:
    """max_tokens, and the end of the context, also in the middle of an accepted draft."""
    truth = plain("kimi_k3", 0)[0]
    for limit in (1, 2, 5, 19):
        made = engine(
            "kimi_k3",
            DraftModel(model("kimi_k3"), EngineConfig(num_slots=1, max_context=160), TABLE),
            depth=7,
        )
        generation = made.submit(Request(tokens=PROMPTS[0], params=SamplingParams(max_tokens=limit)))
        made.run()
        assert (generation.output, generation.finish_reason) == (truth[:limit], FinishReason.LENGTH)
    for room in (1, 2, 3, 9):
        context = len(PROMPTS[0]) + room
        config = EngineConfig(num_slots=1, max_context=context, depth=7)
        made = Engine(model("kimi_k3"), config, TABLE, drafter=DraftModel(model("kimi_k3"), config, TABLE))
        generation = made.submit(Request(tokens=PROMPTS[0], params=GREEDY))
        made.run()
        assert (generation.output, generation.finish_reason) == (truth[:room], FinishReason.LENGTH)


def test_a_stop_inside_an_accepted_draft() -> None:
    """A stop takes precedence over a length in the same step, and nothing after it is kept or counted."""
    truth = plain("kimi_k3", 0)[0]
    stop = truth[4]
    at = truth.index(stop)
    for limit in (at + 1, at + 2, 20):
        for drafter in (None, Prophet([[*PROMPTS[0], *truth]])):
            made = engine("kimi_k3", drafter, depth=7)
            params = SamplingParams(max_tokens=limit, stop_tokens=(stop,))
            generation = made.submit(Request(tokens=PROMPTS[0], params=params))
            made.run()
            assert (generation.output, generation.finish_reason) == (truth[: at + 1], FinishReason.STOP)
            assert generation.num_accepted <= len(generation.output)


def test_stop_strings_and_streamed_text() -> None:
    """The text ends before the stop string, however tokens and steps cut it, and streams without a hint of
    it.
    """
    whole = engine("kimi_k3")
    full = whole.submit(Request(tokens=PROMPTS[0], params=SamplingParams(max_tokens=40)))
    streamed = "".join(event.text for event in whole.run())
    assert streamed == full.text
    visible = full.text.replace("\ufffd", "")
    assert len(visible) > 8
    start = next(i for i in range(4, len(full.text) - 3) if "\ufffd" not in full.text[i : i + 3])
    stop = full.text[start : start + 3]
    for depth in (0, 1, 7):
        drafter = Prophet([[*PROMPTS[0], *full.output]])
        made = engine("kimi_k3", drafter, depth=depth)
        params = SamplingParams(max_tokens=40, stop_strings=(stop, "never"))
        generation = made.submit(Request(tokens=PROMPTS[0], params=params))
        pieces = [event.text for event in made.run()]
        assert generation.text == "".join(pieces) == full.text[: full.text.index(stop)]
        assert generation.finish_reason is FinishReason.STOP


def test_the_end_token_ends_unless_ignored() -> None:
    end = model_file("kimi_k3").require_tokenizer().eos_tokens[0]
    biased = SamplingParams(max_tokens=5, logit_bias={end: 100.0})
    for ignore, expected in ((False, [end]), (True, [end] * 5)):
        made = engine("kimi_k3")
        generation = made.submit(Request(tokens=(1, 2), params=replace(biased, ignore_eos=ignore)))
        made.run()
        assert generation.output == expected
        assert generation.text == ""


@pytest.mark.parametrize("depth", [0, 3])
def test_a_session_goes_on_where_its_slot_is(family: str, policy: str, depth: int) -> None:
    """The second turn evaluates only what is new, and gives the bytes of a cold run."""
    made = engine(family, NGram(3, 1), num_slots=2, depth=depth, policy=policy)
    first = made.submit(Request(tokens=PROMPTS[0], params=GREEDY, session="a"))
    outputs(made, GREEDY, [PROMPTS[2]])
    longer = (*first.tokens, *tokens(9, seed=3))
    second = made.submit(Request(tokens=longer, params=SAMPLED, session="a"))
    made.run()
    assert second.num_cached == len(first.tokens) - 1
    assert second.output == outputs(engine(family), SAMPLED, [longer])[0]


def test_a_session_that_turns_elsewhere_starts_anew() -> None:
    """An edited, shortened or identical prompt cannot use the state; nor can one whose slot was needed."""
    held = [*PROMPTS[0], *plain("kimi_k3", 0)[0]][:-1]
    for prompt in ((*PROMPTS[0][:-1], 5), PROMPTS[0][:6], tuple(held)):
        made = engine("kimi_k3", num_slots=1)
        made.submit(Request(tokens=PROMPTS[0], params=GREEDY, session="a"))
        made.run()
        generation = made.submit(Request(tokens=prompt, params=GREEDY, session="a"))
        made.run()
        assert generation.num_cached == 0
        assert generation.output == outputs(engine("kimi_k3"), GREEDY, [prompt])[0]
    outputs(made, GREEDY, [PROMPTS[1]])
    again = made.submit(Request(tokens=(*held, 9), params=GREEDY, session="a"))
    made.run()
    assert again.num_cached == 0


@pytest.mark.parametrize("depth", [0, 7])
def test_a_session_goes_on_after_a_stop_inside_an_accepted_draft(policy: str, depth: int) -> None:
    """Tokens after the stop were verified and accepted, and are no part of the state."""
    truth = plain("kimi_k3", 0)[0]
    made = engine("kimi_k3", Prophet([[*PROMPTS[0], *truth]]), depth=depth, policy=policy)
    params = replace(GREEDY, stop_tokens=(truth[9],))
    first = made.submit(Request(tokens=PROMPTS[0], params=params, session="a"))
    made.run()
    longer = (*first.tokens, 3, 1, 4)
    second = made.submit(Request(tokens=longer, params=GREEDY, session="a"))
    made.run()
    assert second.num_cached == len(first.tokens) - 1
    assert second.output == outputs(engine("kimi_k3"), GREEDY, [longer])[0]


class Failing(Stateless):
    """Raises at given calls."""

    def __init__(self, calls: set[int]) -> None:
        self._calls = calls
        self._call = 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        self._call += 1
        if self._call in self._calls:
            raise RuntimeError("drafter failed")
        return [[1] * query.max_draft for query in queries]


def run_through(made: Engine, error: type[Exception]) -> int:
    """Step until done, again after each failure → failures."""
    failures = 0
    while made.has_work:
        try:
            made.step()
        except error:
            failures += 1
    return failures


def test_a_failing_drafter_loses_nothing(policy: str) -> None:
    made = engine("kimi_k3", Failing({1, 2, 5, 9}), num_slots=2, depth=3, policy=policy, prefill_chunk=7)
    generations = [made.submit(Request(tokens=prompt, params=SAMPLED)) for prompt in PROMPTS]
    assert run_through(made, RuntimeError) == 4
    assert [g.output for g in generations] == plain("kimi_k3", 0.8)


@pytest.mark.parametrize("depth", [0, 3])
def test_a_failing_pass_loses_nothing(policy: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception inside the model: prompts in flight start again, windows to verify are simply verified
    again.
    """
    target = model("kimi_k3")
    whole, calls = target.forward, itertools.count()

    def failing(*args: Any) -> np.ndarray:
        if next(calls) in (1, 4, 12, 13):
            raise MemoryError
        return whole(*args)

    config = EngineConfig(num_slots=2, max_context=160, depth=depth, policy=policy, prefill_chunk=9)  # type: ignore[arg-type]
    drafter = DraftModel(model("kimi_linear"), config, TABLE) if depth else None
    made = Engine(target, config, TABLE, drafter=drafter)
    monkeypatch.setattr(target, "forward", failing)
    generations = [made.submit(Request(tokens=prompt, params=GREEDY)) for prompt in PROMPTS]
    assert run_through(made, MemoryError) == 4
    assert [g.output for g in generations] == plain("kimi_k3", 0)


def test_logits_that_are_no_numbers_end_their_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    target = model("kimi_k3")
    whole = target.forward

    def poisoned(token_ids: np.ndarray, view: Any, rows: np.ndarray) -> np.ndarray:
        out = whole(token_ids, view, rows)
        out[np.isin(view._batch.positions[rows], (30,))] = np.nan
        return out

    monkeypatch.setattr(target, "forward", poisoned)
    made = engine("kimi_k3", num_slots=2)
    long, short = (made.submit(Request(tokens=PROMPTS[i], params=GREEDY)) for i in (0, 1))
    made.run()
    assert (long.finish_reason, long.error) == (
        FinishReason.ERROR,
        "the model's logits are not finite numbers",
    )
    assert short.output == plain("kimi_k3", 0)[1]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(tokens=()), "the prompt is empty"),
        (Request(tokens=(1, 264)), "token 264 is outside the model's vocabulary of 264"),
        (Request(tokens=(-1,)), "token -1 is outside"),
        (Request(tokens=(1,) * 160), "160 tokens leave no room in the context of 160"),
        (Request(tokens=(1,), depth=9), "depth 9 is outside the engine's 0 to 3"),
        (Request(tokens=(1,), params=SamplingParams(logit_bias={999: 1.0})), "token 999 is outside"),
        (Request(tokens=(1,), params=SamplingParams(stop_tokens=(300,))), "token 300 is outside"),
    ],
)
def test_impossible_requests_are_refused(request_: Request, message: str) -> None:
    made = engine("kimi_k3", depth=3)
    with pytest.raises(RequestError, match=message):
        made.submit(request_)
    assert not made.has_work


def test_stop_strings_need_a_tokenizer() -> None:
    made = Engine(model("kimi_k3"), EngineConfig(num_slots=1, max_context=32), TABLE)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        made.submit(Request(tokens=(1,), params=SamplingParams(stop_strings=("x",))))


def test_a_context_beyond_the_model_s_is_refused() -> None:
    with pytest.raises(ConfigError, match="context 600 exceeds the model's 512"):
        engine("kimi_k3", max_context=600)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 0}, "slots must be 1 to 4096, not 0"),
        ({"depth": -1}, "depth must be 0 to 64 draft tokens, not -1"),
        ({"policy": "hope"}, "policy must be one of replay, snapshot, checkpoint, not 'hope'"),
        ({"kv_type": "int3"}, "KV type must be one of"),
        ({"compute": "float8"}, "compute type must be one of"),
        ({"max_context": 0}, "context must be 1 to"),
        ({"prefill_chunk": 0}, "prefill chunk must be at least 1"),
        ({"fill": 256}, "fill must be a byte"),
    ],
)
def test_absurd_configurations_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_counts() -> None:
    """Steps, drafts and acceptances of a run whose every accept count is known."""
    truth = plain("kimi_k3", 0)[0]
    made = engine("kimi_k3", Prophet([[*PROMPTS[0], *truth]]), depth=3)
    generation: Generation = made.submit(Request(tokens=PROMPTS[0], params=GREEDY))
    made.run()
    assert 1 + generation.num_steps + generation.num_accepted == len(generation.output)
    assert 0 < generation.num_accepted < generation.num_drafted


def test_buffers_have_names_and_categories() -> None:
    config = EngineConfig(num_slots=2, max_context=64, depth=3)
    made = Engine(model("kimi_k3"), config, TABLE, drafter=DraftModel(model("llama"), config, TABLE))
    categories = {buffer.category for buffer in made.buffers()}
    assert categories == {
        "weights", "KV", "recurrent state", "conv", "rollback", "scratch", "draft weights", "draft KV",
    }  # fmt: skip
    names = [buffer.name for buffer in made.buffers()]
    assert len(names) == len(set(names))
    with_state = Engine(model("llama"), config, TABLE, drafter=DraftModel(model("kimi_k3"), config, TABLE))
    assert "draft state" in {buffer.category for buffer in with_state.buffers()}
