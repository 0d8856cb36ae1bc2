"""Rollback after a commit: exact, or refused with nothing changed; and the probe agrees with the act."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import FILLS, TABLE, model, runner, tokens
from redraft.config import EngineConfig
from redraft.errors import StateError
from redraft.runner import Runner
from redraft.state import SlotStatus, Window
from test_state import PREFIX, TEXT, fresh, prefilled


def verify(made: Runner, proposed: list[int], count: int, slot: int = 1) -> None:
    made.forward([Window(slot, proposed, num_logits=0)])
    made.commit([slot], [count])


def check_reach(made: Runner, family: str, history: list[int], slot: int = 1) -> int:
    """Every position is reached exactly or refused, as the probe says → how far back it goes."""
    value, status = made.pool.read(slot), made.pool.status(slot)
    assert status.position == len(history)
    for position in range(-1, len(history) + 3):
        assert made.can_rollback(slot, position) == (status.floor <= position <= status.position)
        if not made.can_rollback(slot, position):
            with pytest.raises(StateError, match=f"cannot go back to {position}"):
                made.rollback(slot, position)
            assert made.pool.read(slot).digest() == value.digest()
            assert made.pool.status(slot) == status
    for position in range(status.position, status.floor - 1, -1):  # one after the other: they compose
        made.rollback(slot, position)
        assert position == 0 or made.pool.read(slot).digest() == fresh(family, history[:position])[0]
    return status.position - status.floor


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_what_each_policy_can_take_back(family: str, policy: str, depth: int, fill: int) -> None:
    for count in range(1, depth + 2):
        made = prefilled(family, policy=policy, depth=depth, fill=fill)
        verify(made, TEXT[:count] + tokens(depth + 1 - count, seed=4), count)
        reach = check_reach(made, family, PREFIX + TEXT[:count])
        assert reach == (0 if policy == "checkpoint" else min(count, depth))


def test_a_slot_s_status(policy: str) -> None:
    made = prefilled("kimi_k3", policy=policy, depth=4)
    verify(made, TEXT[:4], 3)
    pending, kept = {"replay": (3, 3), "snapshot": (0, 3), "checkpoint": (0, 0)}[policy]
    at = len(PREFIX) + 3
    assert made.pool.status(1) == SlotStatus(at, at - kept, 0, pending, 4, True)
    made.forward([Window(1, TEXT[:2], num_logits=0)])
    kept = {"replay": 0, "snapshot": 2, "checkpoint": 0}[policy]
    assert made.pool.status(1) == SlotStatus(at, at - kept, 2, 0, 4, True)


def test_snapshot_keeps_planes_over_several_rounds(family: str) -> None:
    """Single steps leave their planes behind, until a longer round needs the places."""
    made = prefilled(family, policy="snapshot", depth=4)
    for i in range(6):
        verify(made, TEXT[i : i + 1], 1)
    assert made.pool.status(1).floor == len(PREFIX) + 6 - 4
    made.forward([Window(1, TEXT[6:9], num_logits=0)])  # three proposals go round over three planes
    assert check_reach(made, family, PREFIX + TEXT[:6]) == 1


def test_two_rollbacks_are_one(family: str) -> None:
    for policy in ("replay", "snapshot"):
        ends = set()
        for steps in ([3], [1, 3], [2, 3], [1, 2, 3]):
            made = prefilled(family, policy=policy, depth=4)
            verify(made, TEXT[:5], 4)
            for back in steps:
                made.rollback(1, len(PREFIX) + 4 - back)
            out = made.forward([Window(1, TEXT[1:4], num_logits=3)])[0]
            made.commit([1], [3])
            ends.add((made.pool.read(1).digest(), out.tobytes()))
        assert {digest for digest, _ in ends} == {fresh(family, PREFIX + TEXT[:4])[0]}
        assert len(ends) == 1


def test_life_goes_on_after_a_rollback(family: str, policy: str) -> None:
    """Rounds, rollbacks and rounds again, as far back as the policy goes each time."""
    made, history = prefilled(family, policy=policy, depth=3, fill=0xFF), list(PREFIX)
    rng = np.random.default_rng(8)
    for _ in range(30):
        drawn = rng.integers(0, 264, int(rng.integers(1, 5))).tolist()
        count = int(rng.integers(1, len(drawn) + 1))
        verify(made, drawn, count)
        history += drawn[:count]
        target = int(rng.integers(made.pool.status(1).floor, len(history) + 1))
        made.rollback(1, target)
        history = history[:target]
    assert made.pool.read(1).digest() == fresh(family, history)[0]


def test_a_rollback_drops_the_open_round(family: str, policy: str) -> None:
    made = prefilled(family, policy=policy)
    made.forward([Window(1, TEXT[:6], num_logits=0)])
    assert made.pool.status(1).num_proposed == 6
    assert not made.can_rollback(1, len(PREFIX) + 3)  # part of a round is reached by a commit
    made.rollback(1, len(PREFIX))
    assert made.pool.status(1).num_proposed == 0
    with pytest.raises(StateError, match="cannot commit 1 of 0"):
        made.commit([1], [1])
    made.forward([Window(1, TEXT[8:10], num_logits=0)], extend=True)  # follows nothing now
    made.commit([1], [1])
    assert made.pool.read(1).digest() == fresh(family, PREFIX + TEXT[8:9])[0]


def test_a_state_without_a_past_goes_nowhere(family: str, policy: str) -> None:
    """After a reset, a prompt chunk or a write, the planes and records belong to somebody else."""
    made = prefilled(family, policy=policy, depth=4)
    verify(made, TEXT[:4], 4)
    value = made.pool.read(1)
    made.pool.write(1, value)
    assert made.pool.status(1).floor == value.position
    verify(made, TEXT[4:8], 4)
    made.forward([Window(1, TEXT[8:9], num_logits=0, advance=True)])
    assert not made.can_rollback(1, value.position + 4)  # interrupted: not even where it stands
    with pytest.raises(StateError, match="slot 1 holds no valid state"):
        made.rollback(1, value.position + 4)
    made.commit([1], [1])
    assert made.pool.status(1).floor == value.position + 5
    made.pool.reset(1)
    assert made.pool.status(1).floor == 0


def test_attention_alone_can_always_be_cut() -> None:
    made = prefilled("llama", policy="replay", depth=2)
    assert check_reach(made, "llama", PREFIX) == len(PREFIX)


def test_a_slot_that_does_not_exist() -> None:
    made = Runner(model("kimi_k3"), EngineConfig(num_slots=2, max_context=32), TABLE)
    for slot in (-1, 2):
        with pytest.raises(StateError, match=f"slot {slot} does not exist: the pool has slots 0 to 1"):
            made.pool.can_rollback(slot, 0)
    assert not made.can_rollback(0, 0)  # never reset


def test_neighbours_are_not_touched(family: str, policy: str) -> None:
    made = runner(family, policy=policy, depth=4)
    for slot in (0, 1):
        made.forward([Window(slot, PREFIX, num_logits=0, advance=True)])
        made.commit([slot], [len(PREFIX)])
    made.forward([Window(0, TEXT[:4], num_logits=0), Window(1, TEXT[4:8], num_logits=0)])
    made.commit([0, 1], [4, 3])
    made.rollback(1, made.pool.status(1).floor)
    assert made.pool.read(0).digest() == fresh(family, PREFIX + TEXT[:4])[0]
