"""Public bugs of kind B: from steps with drafts to steps without and back, and across a preemption."""

from __future__ import annotations

import pytest

from checks import check_slots
from conftest import tokens
from field import FAMILY, Scripted, Slots, ask, cold, each_policy, knowing, made_engine
from redraft.config import SamplingParams
from redraft.engine import Request

GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.9, seed=3)


@each_policy
def test_b1_a_step_without_drafts_after_an_accepted_one(policy: str) -> None:
    """The ordinary step read the state from before the accepted tokens.
    https://github.com/vllm-project/vllm/issues/39273
    """
    slots = Slots(policy, 4)
    slots.prefill(0, 16)
    slots.prefill(1, 9, seed=2)
    for accepted in range(5):
        slots.verify(0, [1, 2, 3, 4, 5], accepted + 1)
        slots.decode(0, 9)
        slots.joint({0: [7, 8, 9], 1: [6]}, {0: 2})  # one drafts, the other does not
    prompt = tokens(12) * 2
    text = [*prompt, *cold(prompt, GREEDY)]
    often = knowing(text)
    made = made_engine(Scripted(lambda seen: text[len(seen) :] if len(seen) % 3 else []), policy=policy)
    assert ask(made, prompt, GREEDY).output == text[24:]
    assert ask(made_engine(often, policy=policy), prompt, GREEDY).output == text[24:]


@each_policy
def test_b2_one_prompt_token_beside_decoding_windows(policy: str) -> None:
    """A one-token tail was padded to the width of a window, and the state after the padding was stored.
    https://github.com/vllm-project/vllm/pull/55178
    """
    slots = Slots(policy, 3)
    slots.prefill(0, 8)
    slots.prefill(1, 11, seed=2)
    slots.joint({0: [1, 2, 3, 4], 1: [5]}, {0: 3, 1: 1})
    a, b = tokens(10, seed=1), tokens(17, seed=2)
    made = made_engine(Scripted(lambda seen: [seen[-1]] * 3), policy=policy, prefill_chunk=8, depth=3)
    first = made.submit(Request(tokens=tuple(a), params=GREEDY))
    made.step()
    made.step()
    second = made.submit(Request(tokens=tuple(b), params=GREEDY))  # 8 + 8 + 1
    while made.has_work:
        made.step()
        check_slots(FAMILY, made, [g for g in (first, second) if g.finish_reason is None])
    assert [first.output, second.output] == [cold(a, GREEDY), cold(b, GREEDY)]


@each_policy
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_b3_an_accepted_length_on_a_block_boundary(policy: str, offset: int) -> None:
    """A copy was computed in the wrong order when the accepted length fell on a block boundary.
    https://github.com/vllm-project/vllm/issues/53505
    """
    for residue in range(8):
        prompt = tokens(12 + residue, seed=residue)
        text = [*prompt, *cold(prompt, SAMPLED)]
        boundary = (len(prompt) // 8 + 1) * 8 + offset
        made = made_engine(
            knowing(text, frozenset({max(boundary, len(prompt) + 1)})),
            policy=policy, prefix_bytes=2**24, prefix_interval=8,
        )  # fmt: skip
        generation = made.submit(Request(tokens=tuple(prompt), params=SAMPLED, session="s"))
        while made.has_work:
            made.step()
            check_slots(FAMILY, made, [generation] if generation.finish_reason is None else [])
        assert generation.tokens == text


@each_policy
@pytest.mark.parametrize("consumed", [1, 2, 3, 4])
def test_b4_more_than_one_accepted_at_a_boundary(policy: str, consumed: int) -> None:
    """Two conventions for the conv window agree as long as one token is accepted; the error shows late.
    https://github.com/vllm-project/vllm-xpu-kernels/pull/544
    """
    slots = Slots(policy, 4)
    slots.prefill(0, 14)
    for i in range(16):
        slots.verify(0, tokens(4, seed=i), consumed)


@each_policy
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
def test_b5_preempted_and_resumed_twice(policy: str, depth: int) -> None:
    """A late result of a step was applied to the request after its preemption. Steps here have no late
    results, and a preempted request keeps no drafts; its text is that of an undisturbed run.
    https://github.com/vllm-project/vllm/pull/49620
    """
    prompt = tokens(12, seed=2)
    made = made_engine(knowing([*prompt, *cold(prompt, SAMPLED)]), policy=policy, depth=depth)
    generation = made.submit(Request(tokens=tuple(prompt), params=SAMPLED))
    for _ in range(2):
        made.step()
        made.step()
        if generation.slot is not None and generation.finish_reason is None:
            made.preempt(generation)
    made.run()
    assert generation.output == cold(prompt, SAMPLED)
