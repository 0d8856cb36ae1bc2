"""Public bugs of kind A: what a rollback restores, and what it says. docs/cases.md lists all cases."""

from __future__ import annotations

import numpy as np
import pytest

from checks import truth
from conftest import FILLS, POLICIES, TABLE, tokens
from field import FAMILY, Scripted, Slots, ask, cold, each_policy, knowing, made_engine
from redraft.config import SamplingParams
from redraft.engine import Request
from redraft.errors import RequestError
from redraft.speculate import accept, choose
from redraft.state import Window

GREEDY = SamplingParams(max_tokens=12)
N = 8


def reach(policy: str, single_steps: int) -> int:
    """Tokens that can be taken back after so many single steps behind a prompt."""
    return {"replay": min(single_steps, 1), "snapshot": min(single_steps, N), "checkpoint": 0}[policy]


@each_policy
@pytest.mark.parametrize("single_steps", [1, 2, 3, 5])
def test_a1_a_plane_that_is_older_than_asked_for(policy: str, single_steps: int) -> None:
    """Single steps moved the wanted state to another plane, and the rollback returned an older one.
    https://github.com/ggml-org/llama.cpp/pull/29117
    """
    for depth in range(1, N + 1):
        slots = Slots(policy, N)
        slots.prefill(0, 19)
        slots.decode(0, *range(single_steps))
        assert slots.rollback(0, depth) == (depth <= reach(policy, single_steps))
        for token in (3, 1, 4):
            slots.decode(0, token)


@each_policy
def test_a2_taking_back_a_whole_batch(policy: str) -> None:
    """The state from before the batch was in no plane, and its absence was not noticed.
    https://github.com/ggml-org/llama.cpp/issues/26695
    """
    for size in range(1, N + 2):
        slots = Slots(policy, N)
        slots.prefill(0, 10)
        slots.verify(0, tokens(size, seed=6), size)
        assert slots.rollback(0, size) == (policy != "checkpoint" and size <= N)
        slots.next(0)


@each_policy
def test_a3_the_probe_knows_what_is_pending(policy: str) -> None:
    """The probe said yes to a second rollback while one was pending, the act then refused, and a request that
    shared all but the tail of the cached prompt failed.
    https://github.com/Anbeeld/beellama.cpp/issues/165
    """
    slots = Slots(policy, N)
    slots.prefill(0, 16)
    slots.verify(0, tokens(4, seed=6), 1)  # all three drafts rejected
    slots.rollback(0, 1)  # checks that probe and act agree
    slots.next(0)
    made = made_engine(Scripted(lambda seen: [seen[-1]] * 3), policy=policy)
    first = ask(made, tokens(16), GREEDY, session="s")
    shorter = first.tokens[:-2]
    assert ask(made, shorter, GREEDY, session="s").output == cold(shorter, GREEDY)


@each_policy
@pytest.mark.parametrize("fill", FILLS)
def test_a4_two_rollbacks_compose(policy: str, fill: int) -> None:
    """The second one replaced the first instead of adding to it.
    https://github.com/JakeATX/llamAmpere/pull/8
    """
    ends = set()
    for counts in ([1, 1], [2]):
        slots = Slots(policy, N, fill=fill)
        slots.prefill(0, 9)
        slots.verify(0, [1, 2, 3, 4], 3)
        done = [slots.rollback(0, count) for count in counts]
        assert done == [policy != "checkpoint"] * len(counts)
        slots.decode(0, 8, 9)
        ends.add(slots.runner.pool.read(0).digest())
    assert len(ends) == 1


@each_policy
def test_a5_a_restored_state_has_no_planes_of_its_own(policy: str) -> None:
    """After a restore a rollback was served from planes of whoever was there before.
    https://github.com/JakeATX/llamAmpere/pull/8
    """
    source, slots = Slots(policy, N), Slots(policy, N)
    source.prefill(0, 9)
    slots.prefill(0, 12, seed=5)
    slots.decode(0, *range(N))
    slots.restore(0, source.saved(0))
    assert not slots.rollback(0, 2)
    slots.decode(0, *range(N))
    assert slots.rollback(0, 2) == (policy == "snapshot")


@each_policy
def test_a6_the_child_of_a_fork(policy: str) -> None:
    """A child shared its parent's planes without knowing it. Ours has a value of its own and no past.
    https://github.com/JakeATX/llamAmpere/pull/8
    """
    slots = Slots(policy, N)
    slots.prefill(0, 9)
    slots.verify(0, [1, 2, 3], 3)
    slots.restore(1, slots.saved(0))
    assert not slots.rollback(1, 2)
    slots.decode(1, 7, 8)
    assert slots.rollback(0, 2) == (policy != "checkpoint")
    slots.decode(0, 5, 6)


@each_policy
def test_a7_two_sequences_with_different_rollbacks(policy: str) -> None:
    """A shift of planes was computed once for the batch, from the deepest pending rollback.
    https://github.com/JakeATX/llamAmpere/pull/8
    """
    for back in (2, 4, 8):
        slots = Slots(policy, N)
        slots.joint({0: tokens(9, seed=1), 1: tokens(9, seed=2)}, advance=True)
        for i in range(8):
            slots.joint({0: [i], 1: [i + 50]})
        went = slots.rollback(0, 6)
        slots.joint({0: [77], 1: [78]})
        assert slots.rollback(1, back) == (back <= reach(policy, 9))
        if policy == "snapshot":
            assert went
            assert slots.floor(0) == N - 6 + 1
        assert slots.rollback(0, 3) == (policy == "snapshot")
        assert not slots.rollback(0, 4)


@each_policy
@pytest.mark.parametrize("prompt", [3, 9])
def test_a8_the_bound_after_single_steps(policy: str, prompt: int) -> None:
    """Planes that separate steps have to fill were filled with one state, and N + 1 was clamped to N.
    https://github.com/JakeATX/llamAmpere/pull/8
    """
    for parts in ([1], [2], [3], [4], [N], [N + 1], [N, 1], [3, 1]):
        slots = Slots(policy, N)
        slots.prefill(0, prompt)
        slots.decode(0, *range(8))
        limit, gone = reach(policy, 8), 0
        for part in parts:
            done = slots.rollback(0, part)
            assert done == (gone + part <= limit)
            gone += part if done else 0
        slots.decode(0, 4, 5, 6)


@each_policy
@pytest.mark.parametrize("fill", FILLS)
def test_a9_a_long_batch_after_rollbacks(policy: str, fill: int) -> None:
    """Two sequences were rolled back and then given more tokens than a micro-batch holds.
    https://github.com/ggml-org/llama.cpp/issues/28019
    """
    slots = Slots(policy, N, fill=fill)
    slots.joint({0: tokens(16, seed=1), 1: tokens(16, seed=2)}, advance=True)
    mark = slots.saved(0)
    slots.runner.forward([Window(0, [1, 2, 3], num_logits=0), Window(1, [4, 5, 6], num_logits=0)])
    for slot in (0, 1):
        assert slots.rollback(slot, 0)
        assert not slots.rollback(slot, 1)
    slots.joint({0: tokens(40, seed=3), 1: tokens(40, seed=4)}, advance=True)
    slots.decode(0, 9)
    slots.decode(1, 1, 2, 3, 4)
    slots.verify(1, [5, 6, 7, 8], 4)
    slots.rollback(1, 3)
    slots.restore(1, mark)  # onto a slot with a rollback behind it
    slots.verify(1, [1, 2, 3], 3)


@each_policy
def test_a11_every_tensor_not_only_the_logits(policy: str) -> None:
    """The matrix was rolled back and the conv window was not; after W − 1 tokens the window looks right.
    https://github.com/ggml-org/llama.cpp/pull/28123
    """
    slots = Slots(policy, N)
    slots.prefill(0, 12)
    slots.verify(0, [1, 2, 3, 4], 2)
    names = slots.runner.pool.read(0).arrays
    assert {name.split(".")[0] for name in names} == {"keys", "state", "conv"}
    slots.decode(0, 7, 7, 7, 7)  # each step compares all of them


@each_policy
def test_a13_saving_while_something_is_pending(policy: str) -> None:
    """The save aborted, or took the state with the rejected drafts in it.
    https://github.com/am17an/llama.cpp/pull/16
    """
    source = Slots(policy, N)
    source.prefill(0, 9)
    source.verify(0, [1, 2, 3, 4], 1)
    data = source.saved(0)
    source.runner.forward([Window(0, [9, 9], num_logits=0)])  # proposed and not committed
    assert source.saved(0) == data
    for other in POLICIES:
        slots = Slots(other, N)
        slots.restore(0, data)
        slots.prefill(1, 20, seed=8)
        slots.verify(1, [1, 2, 3], 2)
        slots.restore(1, data)
        for slot in (0, 1):
            assert not slots.rollback(slot, 1)
            slots.decode(slot, 6, 6, 6)


@each_policy
@pytest.mark.parametrize("depth", [0, 4])
def test_a14_a_refusal_is_heeded(policy: str, depth: int) -> None:
    """The server ignored that a rollback was refused and went on with a shortened list of tokens.
    https://github.com/ggml-org/llama.cpp/pull/28007
    """
    made = made_engine(Scripted(lambda seen: [seen[-1]] * 4), policy=policy, depth=depth)
    prompt = tokens(40, seed=1)
    ask(made, prompt, GREEDY, session="s")
    edited = [*prompt[:-8], *tokens(8, seed=2)]
    again = ask(made, edited, GREEDY, session="s")
    assert again.output == cold(edited, GREEDY)
    assert again.num_cached == 0  # and it says so


@each_policy
def test_a15_two_rejection_patterns(policy: str) -> None:
    """The cut trimmed conv windows and left the rejected drafts in the matrix, so that the drafter showed in
    the text. One text, two patterns of rejection: the same logits at every position.
    https://github.com/huggingface/transformers/issues/49036
    """
    text = tokens(96, seed=3)
    for wrong in ((), (3, 7, 11)):
        slots = Slots(policy, 15)
        at = 0
        while at < len(text):
            block = text[at : at + 16]
            drafted = [(t + 1) % 264 if i in wrong else t for i, t in enumerate(block)]
            count = next(
                (i for i, (a, b) in enumerate(zip(drafted, block, strict=True)) if a != b), len(block)
            )
            rows = slots.runner.forward([Window(0, drafted, num_logits=len(block))])[0]
            slots.runner.commit([0], [max(count, 1)])
            for i in range(count):
                assert np.array_equal(rows[i], truth(FAMILY, tuple(text[: at + i + 1]))[1])
            slots.seen[0] = text[: at + count]
            slots.check()
            at += count


def test_a16_no_rollback_no_speculation_and_ties() -> None:
    """Trimming a cache that cannot be trimmed did nothing; and two paths broke a tie in two ways.
    https://github.com/ml-explore/mlx-lm/pull/1109
    """
    made = made_engine(knowing(tokens(30)), depth=0)
    with pytest.raises(RequestError, match="depth 2 is outside the engine's 0 to 0"):
        made.submit(Request(tokens=(1,), depth=2))
    assert ask(made, tokens(5), GREEDY).num_drafted == 0
    tied = np.array([1, 5, 5, 0, 5], np.float32)
    assert choose(tied, GREEDY, [1], 1, TABLE) == 1


@each_policy
def test_a17_a_pattern_of_acceptance_repeated(policy: str) -> None:
    """Captured graphs baked in a value that changes between steps. Nothing is captured here; the pattern is
    run all the same.
    https://github.com/spiritbuun/buun-llama-cpp/issues/116
    """
    slots = Slots(policy, 3)
    slots.prefill(0, 5)
    for i, accepted in enumerate([3, 0, 2, 1, 3, 0] * 6):
        slots.verify(0, tokens(4, seed=i), accepted + 1)


def test_a18_the_first_draft_token_is_verified() -> None:
    """A draft of one token was always accepted.
    https://github.com/ohdearquant/lattice/issues/243
    """
    assert accept([1], lambda i: (7, 8)[i]) == [7]
    own = cold([1, 1, 1], GREEDY)
    wrong = (own[0] + 1) % 264
    generation = ask(made_engine(Scripted(lambda _: [wrong])), [1, 1, 1], GREEDY)
    assert generation.output == own
    assert generation.num_accepted <= own.count(wrong)
