"""Faults planted into the engine, and the check that has to find each. A check that finds nothing is none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest

import redraft.engine.engine as engine_module
from checks import check_state, truth
from field import FAMILY, Slots
from redraft.engine import prefix
from redraft.engine.handover import Handover
from redraft.engine.scheduler import Scheduler
from redraft.runner import Runner
from redraft.speculate import choose
from redraft.state import Committed, StatePool
from redraft.state.checkpoint import Checkpoint
from redraft.state.kv import KVCache
from redraft.state.replay import Replay
from redraft.state.rollback import LayerState, RollbackPolicy
from redraft.state.saved import SavedState
from redraft.state.snapshot import Snapshot
from scenarios import refusals, requests, rollbacks, rounds, saves

Patch = pytest.MonkeyPatch


class Fault(NamedTuple):
    """What is planted, and the check that finds it."""

    name: str
    plant: Callable[[Patch], None]
    check: Callable[[], None]


FAULTS: list[Fault] = []


def fault(check: Callable[[], None]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        FAULTS.append(Fault(plant.__name__, plant, check))
        return plant

    return add


def around(patch: Patch, owner: Any, name: str, after: Callable[..., Any]) -> None:
    """Call `after(result, *arguments)` behind a method, and return what it returns."""
    whole = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: after(whole(*args, **kwargs), *args))


@fault(partial(rounds, "snapshot"))
def plane_off_by_one(patch: Patch) -> None:
    whole = Snapshot.commit
    patch.setattr(Snapshot, "commit", lambda self, slot, n, p: whole(self, slot, max(n - 1, 1), p))


@fault(partial(rollbacks, "snapshot"))
def stale_plane(patch: Patch) -> None:
    patch.setattr(Snapshot, "num_kept", lambda self, _: self.depth)


@fault(partial(rounds, "snapshot"))
def last_token_of_a_full_round_lost(patch: Patch) -> None:
    patch.setattr(Snapshot, "_consume_tail", lambda *_: None)


@fault(partial(rollbacks, "replay"))
def conv_window_not_rolled_back(patch: Patch) -> None:
    def go_back(self: Replay, slot: int, number: int) -> None:
        for layer in self.layers:
            self._pending[layer][slot] -= number
        self._num_kept[slot] -= number

    patch.setattr(Replay, "go_back", go_back)


@fault(partial(rounds, "replay"))
def conv_window_not_committed(patch: Patch) -> None:
    def commit(self: Replay, slot: int, num_consumed: int, _: int) -> bool:
        for layer in self.layers:
            self._pending[layer][slot] = num_consumed
        return True

    patch.setattr(Replay, "commit", commit)


@fault(partial(rounds, "replay"))
def conv_column_of_a_full_round_lost(patch: Patch) -> None:
    whole = Replay.commit

    def commit(self: Replay, slot: int, num_consumed: int, num_proposed: int) -> bool:
        for arrays in self.arrays.values():
            arrays["conv tail"][slot] = 0
        return whole(self, slot, num_consumed, num_proposed)

    patch.setattr(Replay, "commit", commit)


@fault(partial(rounds, "replay"))
def pending_records_not_consumed(patch: Patch) -> None:
    whole = Replay.delta_rule

    def delta_rule(self: Replay, layer: int, *args: Any) -> Any:
        before = self._pending[layer].copy()
        out = whole(self, layer, *args)
        self._pending[layer][:] = before
        return out

    patch.setattr(Replay, "delta_rule", delta_rule)


@fault(partial(rounds, "replay"))
def one_record_too_many(patch: Patch) -> None:
    def after(done: bool, self: Replay, slot: int, *_: int) -> bool:
        for pending in self._pending.values():
            pending[slot] = min(pending[slot] + 1, self.depth + 1)
        return done

    around(patch, Replay, "commit", after)


@fault(partial(rounds, "checkpoint"))
def rejected_drafts_stay(patch: Patch) -> None:
    def commit(self: Checkpoint, slot: int, *_: int) -> bool:
        self._open[slot] = False
        return True

    patch.setattr(Checkpoint, "commit", commit)


@fault(partial(rounds, "checkpoint"))
def conv_window_not_in_the_copy(patch: Patch) -> None:
    whole = Checkpoint._move
    patch.setattr(Checkpoint, "_move", lambda self, *a: None if "conv" in a[1] else whole(self, *a))


@fault(partial(saves, "checkpoint"))
def save_takes_the_proposed_round(patch: Patch) -> None:
    def read(self: Checkpoint, layer: int, slot: int) -> LayerState:
        return LayerState(self.arrays[layer]["state"][slot].copy(), self.arrays[layer]["conv"][slot].copy())

    patch.setattr(Checkpoint, "read", read)


@fault(partial(saves, "replay"))
def save_forgets_what_is_pending(patch: Patch) -> None:
    whole = Replay.read

    def read(self: Replay, layer: int, slot: int) -> LayerState:
        return LayerState(self.arrays[layer]["state"][slot].copy(), whole(self, layer, slot).conv)

    patch.setattr(Replay, "read", read)


@fault(partial(rounds, "replay"))
def padding_row_moves_a_parked_state(patch: Patch) -> None:
    def after(out: Any, self: Replay, layer: int, *_: Any) -> Any:
        self.arrays[layer]["state"][2] *= np.float32(0.99)  # the decay of a token that slot 2 never saw
        return out

    around(patch, Replay, "delta_rule", after)


@fault(partial(rounds, "replay"))
def rows_of_two_slots_exchanged(patch: Patch) -> None:
    whole = KVCache.attention

    def attention(self: KVCache, layer: int, q: Any, k: Any, v: Any, scale: float, f: Any, batch: Any) -> Any:
        return whole(self, layer, q, k[::-1], v, scale, f, batch)

    patch.setattr(KVCache, "attention", attention)


@fault(partial(rounds, "replay"))
def slot_not_cleared(patch: Patch) -> None:
    patch.setattr(RollbackPolicy, "reset", lambda *_: None)


@fault(partial(rounds, "snapshot"))
def conv_window_not_cleared(patch: Patch) -> None:
    def reset(self: RollbackPolicy, slot: int) -> None:
        for layer in self.layers:
            self.write(layer, slot, self.read(layer, slot)._replace(state=np.zeros(())))

    patch.setattr(RollbackPolicy, "reset", reset)


@fault(partial(rollbacks, "replay"))
def rows_and_state_at_other_positions(patch: Patch) -> None:
    patch.setattr(Replay, "go_back", lambda *_: None)


@fault(partial(rollbacks, "snapshot"))
def second_rollback_replaces_the_first(patch: Patch) -> None:
    whole = Snapshot.go_back
    patch.setattr(Snapshot, "go_back", lambda self, slot, n: whole(self, slot, 1 if n > 1 else n))


@fault(partial(rollbacks, "replay"))
def rollback_leaves_the_round_open(patch: Patch) -> None:
    whole = StatePool.rollback

    def rollback(self: StatePool, slot: int, position: int) -> None:
        proposed = self.num_proposed(slot)
        whole(self, slot, position)
        self._num_proposed[slot] = proposed

    patch.setattr(StatePool, "rollback", rollback)


@fault(partial(rollbacks, "replay"))
def probe_that_always_agrees(patch: Patch) -> None:
    patch.setattr(StatePool, "can_rollback", lambda *_: True)


@fault(partial(saves, "replay"))
def saved_state_at_another_position(patch: Patch) -> None:
    around(patch, StatePool, "read", lambda value, *_: Committed(value.position - 1, value.arrays))


@fault(requests)
def kept_state_under_another_prefix(patch: Patch) -> None:
    patch.setattr(prefix, "_key", lambda tokens: np.full(len(tokens), 7, np.int32).tobytes())


@fault(requests)
def kept_state_of_another_position(patch: Patch) -> None:
    whole = prefix.PrefixStore.keep
    patch.setattr(prefix.PrefixStore, "keep", lambda self, t, n, read: whole(self, t[:-1], n, read))


@fault(requests)
def kept_state_that_is_no_copy(patch: Patch) -> None:
    def read(self: Replay, layer: int, slot: int) -> LayerState:
        keep = self.layers[layer].conv_width - 1
        arrays = self.arrays[layer]
        return LayerState(arrays["state"][slot], arrays["conv"][slot, self._columns(layer, slot, 0, keep)])

    patch.setattr(Replay, "read", read)


@fault(requests)
def hit_that_leaves_no_token(patch: Patch) -> None:
    whole = prefix.PrefixStore.lookup

    def lookup(self: prefix.PrefixStore, tokens: list[int], longer_than: int = 0) -> Any:
        return whole(self, [*tokens, 0], longer_than=longer_than)

    patch.setattr(prefix.PrefixStore, "lookup", lookup)


@fault(requests)
def session_goes_on_from_another_prompt(patch: Patch) -> None:
    def start(self: Handover, generation: Any, slot: int, held: list[int]) -> int:
        if held:
            return min(len(held), len(generation.tokens) - 1)
        self._runner.pool.reset(slot)
        return 0

    patch.setattr(Handover, "start", start)


@fault(requests)
def chunk_skips_a_token(patch: Patch) -> None:
    whole = Scheduler.schedule

    def schedule(self: Scheduler, start: Any) -> Any:
        return [
            work._replace(prompt=work.prompt[:-1]) if len(work.prompt) > 1 and work.gives_token else work
            for work in whole(self, start)
        ]

    patch.setattr(Scheduler, "schedule", schedule)


@fault(requests)
def consumed_one_token_too_many(patch: Patch) -> None:
    whole = Runner.commit

    def commit(self: Runner, slots: Any, counts: Any) -> None:
        proposed = [self.pool.num_proposed(slot) for slot in slots]
        whole(self, slots, [min(c + 1, p) for c, p in zip(counts, proposed, strict=True)])

    patch.setattr(Runner, "commit", commit)


@fault(requests)
def first_draft_not_verified(patch: Patch) -> None:
    whole = engine_module.accept
    patch.setattr(
        engine_module, "accept", lambda draft, at: [*draft[:1], *whole(draft[1:], lambda i: at(i + 1))]
        if draft else whole(draft, at),
    )  # fmt: skip


@fault(partial(requests, 0.9))
def noise_by_step_instead_of_position(patch: Patch) -> None:
    calls = count(1)

    def stepwise(logits: Any, params: Any, _: Any, num_prompt: int, ops: Any) -> int:
        return choose(logits, params, [0] * next(calls), num_prompt, ops)

    patch.setattr(engine_module, "choose", stepwise)


@fault(partial(refusals, "bit"))
def checksum_not_compared(patch: Patch) -> None:
    patch.setattr("redraft.state.saved._checked_header_length", lambda data: data[20] + 256 * data[21])


@fault(partial(refusals, "model"))
def model_not_compared(patch: Patch) -> None:
    patch.setattr(SavedState, "require", lambda *_: None)


def name_of(check: Callable[[], None]) -> str:
    return f"{check.func.__name__} {check.args[0]}" if isinstance(check, partial) else check.__name__


CHECKS = {name_of(planted.check): planted.check for planted in FAULTS}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_without_faults(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.check()  # what is true is computed before the fault
    with monkeypatch.context() as patch:
        planted.plant(patch)
        with pytest.raises(AssertionError):
            planted.check()
    truth.cache_clear()


def test_a_check_compares_positions_too() -> None:
    slots = Slots("replay", 3)
    slots.prefill(0, 5)
    with pytest.raises(AssertionError, match="position"):
        check_state(FAMILY, slots.runner, 0, slots.seen[0][:-1])
