"""Giving up a slot, and several answers from one state: nothing in the text tells of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conftest import TABLE, model, tokens
from drafters import Prophet
from redraft.config import EngineConfig
from redraft.engine import Engine, Request, Status
from redraft.errors import RequestError
from redraft.speculate import DraftModel, NGram
from test_engine import GREEDY, PROMPTS, SAMPLED, SETTINGS, engine, outputs, plain


@pytest.mark.parametrize("temperature", list(SETTINGS))
@pytest.mark.parametrize("store", [0, 2**24])
def test_preempted_at_every_step(policy: str, temperature: float, store: int) -> None:
    """Twice each, while the other waits or runs; with the store, resuming is a hit."""
    for first in range(1, 9, 2):
        made = engine(
            "kimi_k3", NGram(3, 1), depth=3, policy=policy, prefill_chunk=9, prefix_bytes=store,
            prefix_interval=16,
        )  # fmt: skip
        a, b = (made.submit(Request(tokens=p, params=SETTINGS[temperature])) for p in PROMPTS[:2])
        for _ in range(first):
            made.step()
        made.preempt(a)
        assert (a.slot, a.status) == (None, Status.WAITING)
        made.step()
        assert b.slot is not None
        made.preempt(b)
        made.run()
        assert [a.output, b.output] == plain("kimi_k3", temperature)[:2]
        if store:
            assert made.prefix_stats.num_hits >= 1


def test_a_preempted_draft_model_catches_up() -> None:
    config = EngineConfig(num_slots=1, max_context=160, depth=3)
    made = Engine(model("kimi_k3"), config, TABLE, drafter=DraftModel(model("kimi_k3"), config, TABLE))
    generation = made.submit(Request(tokens=PROMPTS[0], params=SAMPLED))
    for _ in range(3):
        made.step()
    made.preempt(generation)
    made.run()
    assert generation.output == plain("kimi_k3", 0.8)[0]
    assert generation.num_accepted > 5


def test_only_what_runs_can_be_preempted() -> None:
    made = engine("kimi_k3")
    running, waiting = (made.submit(Request(tokens=p, params=GREEDY)) for p in PROMPTS[:2])
    made.step()
    with pytest.raises(RequestError, match="request 1 is waiting: only a running one"):
        made.preempt(waiting)
    made.preempt(running)
    made.cancel(running)  # from the queue
    made.run()
    with pytest.raises(RequestError, match="request 1 is finished"):
        made.preempt(waiting)
    assert waiting.output == plain("kimi_k3", 0)[1]


def test_answers_to_one_prompt(policy: str) -> None:
    """Forked before there is output, an answer is that to a request with its own seed: with slots for all,
    for some, and for none.
    """
    prompt = tuple(tokens(30, seed=4))
    alone = [
        outputs(engine("kimi_k3"), replace(SAMPLED, seed=SAMPLED.seed + i), [prompt])[0] for i in range(4)
    ]
    assert len({tuple(answer) for answer in alone}) == 4
    for num_slots, num_steps in ((1, 2), (2, 0), (3, 1), (5, 2)):
        made = engine("kimi_k3", NGram(3, 1), num_slots=num_slots, depth=3, policy=policy, prefill_chunk=11)
        first = made.submit(Request(tokens=prompt, params=SAMPLED))
        for _ in range(num_steps):
            made.step()
        answers = [first, *made.fork(first, 3)]
        made.run()
        assert [answer.output for answer in answers] == alone


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_fork_in_the_middle_shares_what_was_said(policy: str, num_slots: int) -> None:
    truth = plain("kimi_k3", 0.8)[0]
    made = engine("kimi_k3", Prophet([[*PROMPTS[0], *truth]]), num_slots=num_slots, depth=3, policy=policy)
    first = made.submit(Request(tokens=PROMPTS[0], params=SAMPLED))
    while len(first.output) < 8:
        made.step()
    said = first.output
    forks = made.fork(first, 2)
    assert [fork.text for fork in forks] == [first.text] * 2
    made.run()
    assert first.output == truth
    for fork in forks:
        assert fork.output[: len(said)] == said
        assert fork.output != truth
        assert len(fork.output) == len(truth)
    with pytest.raises(RequestError, match="is finished: submit it again"):
        made.fork(first, 1)


def test_a_seed_at_the_end_of_its_range_wraps() -> None:
    made = engine("kimi_k3", num_slots=2)
    first = made.submit(Request(tokens=PROMPTS[1], params=replace(SAMPLED, seed=2**64 - 1)))
    assert made.fork(first, 1)[0].request.params.seed == 0
