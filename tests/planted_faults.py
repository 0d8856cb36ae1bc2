"""Faults of rollback, attention rows, slots and sampling, to be planted one at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from redraft.engine import engine as engine_module
from redraft.engine.handover import Handover
from redraft.engine.prefix import PrefixStore
from redraft.ops import reference
from redraft.runner import Runner
from redraft.speculate import drafters, sampling
from redraft.state import rollback
from redraft.state.checkpoint import Checkpoint
from redraft.state.kv import KVCache
from redraft.state.replay import Replay
from redraft.state.snapshot import Snapshot


def rows_depend_on_each_other(patch: pytest.MonkeyPatch) -> None:
    """A product of all rows at once: its summation order depends on their number."""

    def linear(x, w, bias=None, *, norm=None, residual=None):
        x = x if norm is None else reference.rms_norm(x, norm)
        out = x @ w.T if len(x) < 3 else (x[:, ::-1] @ w[:, ::-1].T)
        out = out if bias is None else out + bias
        return out if residual is None else residual + out

    patch.setattr(reference, "linear", linear)


def conv_history_lost_between_chunks(patch: pytest.MonkeyPatch) -> None:
    whole = reference.short_conv
    patch.setattr(
        reference,
        "short_conv",
        lambda x, taps, history, starts: whole(
            x, taps, history if len(x) > 1 else np.zeros_like(history), starts
        ),
    )


def rows_stored_one_place_off_in_chunks(patch: pytest.MonkeyPatch) -> None:
    whole = KVCache.attention

    def attention(self, layer, q, k, v, scale, inv_freq, batch):
        first = int(batch.positions[0])
        if len(batch.slots) == 1 and first and batch.advance[0]:
            batch = replace(batch, positions=batch.positions - 1)
        return whole(self, layer, q, k, v, scale, inv_freq, batch)

    patch.setattr(KVCache, "attention", attention)


def state_written_during_verify(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(q, k, v, decay, beta, *, state, windows, advance, **rest):
        out = whole(q, k, v, decay, beta, state=state, windows=windows, advance=advance, **rest)
        if len(q):  # not the fold of a read
            state[windows.slots] += np.float32(1e-3) * ~advance[:, None, None, None]
        return out

    patch.setattr(reference, "delta_scan", delta_scan)


def conv_window_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """The matrix of state goes back to the kept count, the conv window keeps the whole window."""

    def commit(self, slot, num_consumed, num_proposed):
        for layer in self.layers:
            self._cursor[layer][slot] = self._columns(layer, slot, num_proposed, 1)[0]
            self._pending[layer][slot] = num_consumed
        return True

    patch.setattr(Replay, "commit", commit)


def plane_off_by_one(patch: pytest.MonkeyPatch) -> None:
    whole = Snapshot.commit
    patch.setattr(
        Snapshot, "commit", lambda self, slot, kept, proposed: whole(self, slot, max(kept - 1, 1), proposed)
    )


def pending_records_not_consumed(patch: pytest.MonkeyPatch) -> None:
    """The pass folds the committed records in and forgets to say so: they are folded in twice."""
    whole = Replay.delta_rule

    def delta_rule(self, layer, *args):
        pending = self._pending[layer].copy()
        out = whole(self, layer, *args)
        self._pending[layer][:] = pending
        return out

    patch.setattr(Replay, "delta_rule", delta_rule)


def fold_forgets_the_decay(patch: pytest.MonkeyPatch) -> None:
    def fold(state, _decay, k, u):
        state += reference._outer(k, u)

    patch.setattr(reference, "_fold", fold)


def consumed_tokens_not_run_again(patch: pytest.MonkeyPatch) -> None:
    whole = Runner.commit

    def commit(self, slots, counts):
        before = self.pool._policy.commit
        self.pool._policy.commit = lambda *args: before(*args) or True
        whole(self, slots, counts)

    patch.setattr(Runner, "commit", commit)


def copy_not_restored_after_a_dropped_round(patch: pytest.MonkeyPatch) -> None:
    def begin(self, batch):
        for n, slot in enumerate(batch.slots):
            if not batch.num_before[n] and not batch.advance[n] and not self._open[slot]:
                self._move(slot, "state", "state copy")
                self._move(slot, "conv", "conv copy")
                self._open[slot] = True

    patch.setattr(Checkpoint, "begin", begin)


def earlier_windows_not_replayed(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(*args, num_replayed, **rest):
        return whole(*args, num_replayed=np.zeros_like(num_replayed), **rest)

    patch.setattr(reference, "delta_scan", delta_scan)


def attention_reads_a_row_too_many(patch: pytest.MonkeyPatch) -> None:
    whole = reference._attend
    patch.setattr(
        reference,
        "_attend",
        lambda q, keys, values, windows, positions, scale: whole(
            q, keys, values, windows, positions + 1, scale
        ),
    )


def conv_window_not_cleared(patch: pytest.MonkeyPatch) -> None:
    def reset(self, slot):
        for layer, arrays in self.arrays.items():
            arrays["state"][slot] = 0
            self._pending[layer][slot] = 0

    patch.setattr(Replay, "reset", reset)


def padding_row_writes_slot_0(patch: pytest.MonkeyPatch) -> None:
    whole = reference.delta_scan

    def delta_scan(q, k, v, decay, beta, *, state, **rest):
        out = whole(q, k, v, decay, beta, state=state, **rest)
        if len(q) and len(state) > 1:
            state[0] *= np.float32(0.5)
        return out

    patch.setattr(reference, "delta_scan", delta_scan)


def state_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """Only the length is forgotten, as for attention rows."""
    patch.setattr(rollback.RollbackPolicy, "reset", lambda *_: None)


def value_written_beside_pending_records(patch: pytest.MonkeyPatch) -> None:
    whole = Replay.write

    def write(self, layer, slot, value):
        pending = int(self._pending[layer][slot])
        whole(self, layer, slot, value)
        self._pending[layer][slot] = pending if value.state.ndim else 0

    patch.setattr(Replay, "write", write)


def rows_not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "write", lambda *_: None)


def restored_state_is_zero(patch: pytest.MonkeyPatch) -> None:
    whole = Handover.opened

    def opened(self, data):
        saved = whole(self, data)
        for name in [name for name in saved.value.arrays if name.startswith("state")]:
            saved.value.arrays[name] = np.zeros_like(saved.value.arrays[name])
        return saved

    patch.setattr(Handover, "opened", opened)


def kept_state_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """Any kept state of the right length will do: the tokens are not compared."""
    whole = PrefixStore.lookup

    def lookup(self, tokens, longer_than=0):
        value = whole(self, tokens, longer_than)
        others = [kept for kept in self._entries.values() if longer_than < kept.position < len(tokens)]
        return value or (others[-1] if others else None)

    patch.setattr(PrefixStore, "lookup", lookup)


def noise_keyed_by_step(patch: pytest.MonkeyPatch) -> None:
    steps = itertools.count()
    whole = reference.gumbel_noise
    patch.setattr(reference, "gumbel_noise", lambda seed, _, size: whole(seed, next(steps) % 50 + 1, size))
    assert sampling.choose is drafters.choose  # both would use it


def first_draft_not_compared(patch: pytest.MonkeyPatch) -> None:
    whole = engine_module.accept

    def accept(draft, choose_at):
        tokens = whole(draft, choose_at)
        return [draft[0], *tokens[1:]] if draft else tokens

    patch.setattr(engine_module, "accept", accept)


def whole_window_committed(patch: pytest.MonkeyPatch) -> None:
    whole = engine_module.Engine._commit

    def commit(self, slots, counts):
        proposed = [self._runner.pool.num_proposed(slot) for slot in slots]
        whole(self, slots, [max(pair) for pair in zip(counts, proposed, strict=True)])

    patch.setattr(engine_module.Engine, "_commit", commit)
