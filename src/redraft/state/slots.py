"""The pool: all state of one model for a number of slots, how far each slot is, and who may change it.

A slot's committed state is changed by `commit`, `rollback`, `reset` and `write` alone. A pass opens with
`begin`, works through a `view`, and closes with `end`; until the commit its windows are proposals, and not
committing them takes them back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redraft.config import EngineConfig
from redraft.errors import StateError
from redraft.models import ModelSpec
from redraft.ops import Array, AttentionWeights, DeltaInputs, Ops, RMSNorm
from redraft.state.batch import Batch, Window, int_array
from redraft.state.buffers import Buffer
from redraft.state.kv import KVCache, kv_buffers
from redraft.state.rollback import LayerState, RollbackPolicy, policy_named, state_shape


def state_buffers(spec: ModelSpec, config: EngineConfig) -> list[Buffer]:
    """Every buffer that a pool of this configuration allocates, with its bytes over all slots."""
    policy = policy_named(config.policy)
    buffers: list[Buffer] = []
    for i, layer in enumerate(spec.layers):
        if layer.attention is not None:
            buffers += kv_buffers(i, layer.attention, config.max_context, config.kv_type)
        if layer.recurrent is not None:
            own = policy.buffers(layer.recurrent, config.depth, config.compute)
            buffers += [b._replace(name=f"{b.name}.{i}") for b in own]
    return [b._replace(shape=(config.num_slots, *b.shape)) for b in buffers]


@dataclass(frozen=True)
class Committed:
    """The committed value of one slot: what a fresh sequence of the same tokens would have."""

    position: int
    arrays: dict[str, Array]

    def digest(self) -> str:
        """A hash of position and every byte."""
        digest = hashlib.sha256(str(self.position).encode())
        for name in sorted(self.arrays):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.arrays[name]).view(np.uint8).tobytes())
        return digest.hexdigest()


Layout = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class SlotStatus:
    """Where a slot stands, in tokens of its sequence."""

    position: int  # committed
    floor: int  # the lowest position that `rollback` reaches now
    num_proposed: int  # after `position`, not committed
    num_pending: int  # before `position`, not folded into the state buffer yet (`replay`)
    depth: int  # at most depth + 1 tokens may be proposed
    is_valid: bool  # False: never reset, or a pass that moved the state was interrupted


class StatePool:
    """State of `config.num_slots` sequences."""

    def __init__(self, spec: ModelSpec, config: EngineConfig, ops: Ops) -> None:
        self.config = config
        self.spec = spec
        attention = {i: layer.attention for i, layer in enumerate(spec.layers) if layer.attention is not None}
        recurrent = {i: layer.recurrent for i, layer in enumerate(spec.layers) if layer.recurrent is not None}
        self._kv = KVCache(
            attention,
            ops,
            num_slots=config.num_slots,
            max_context=config.max_context,
            kv_type=config.kv_type,
            fill=config.fill,
        )
        self._policy = policy_named(config.policy)(
            recurrent,
            ops,
            num_slots=config.num_slots,
            depth=config.depth,
            dtype=config.compute,
            fill=config.fill,
        )
        self.position = np.zeros(config.num_slots, np.int64)  # committed tokens of each slot
        self._num_proposed = np.zeros(config.num_slots, np.int64)
        self._advanced = np.zeros(config.num_slots, np.bool_)  # the round moved the state at once
        self._torn = np.ones(config.num_slots, np.bool_)  # not a valid value: never reset, or interrupted

    def buffers(self) -> list[Buffer]:
        """What the pool holds."""
        return state_buffers(self.spec, self.config)

    def begin(self, windows: Sequence[Window], *, extend: bool = False) -> Batch:
        """Lay windows out for a pass. With `extend` they follow what is proposed; else they start at the
        commit.

        Raises `StateError`, with nothing changed, for a window that does not fit.
        """
        slots = int_array([w.slot for w in windows])
        lengths = int_array([len(w.tokens) for w in windows])
        before = self._num_proposed[slots] if extend else np.zeros(len(slots), np.int64)
        advance = np.array([w.advance or self.config.depth == 0 for w in windows], np.bool_)
        for window, num_before, moves in zip(windows, before, advance, strict=True):
            self._check(window, int(num_before), bool(moves))
        assert len(set(slots.tolist())) == len(slots), "a slot has one window in a pass"
        self._num_proposed[slots] = before
        self._advanced[slots] = advance
        self._torn[slots] = advance  # until the commit
        starts = np.zeros(len(slots) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        first = self.position[slots] + before - starts[:-1]
        positions = np.arange(starts[-1]) + np.repeat(first, lengths)
        batch = Batch(slots, starts, positions, before, advance)
        self._policy.begin(batch)
        return batch

    def _check(self, window: Window, num_before: int, advance: bool) -> None:
        slot, length = window.slot, len(window.tokens)
        assert length > 0, "a window has at least one token"
        if self._torn[slot] and not (num_before and self._advanced[slot]):
            raise StateError(f"slot {slot} holds no valid state: reset it, or restore one, before use")
        if num_before and (advance or self._advanced[slot]):
            raise StateError(
                f"slot {slot}: a window that advances the state must be the only one of its round"
            )
        if not advance and num_before + length > self.config.depth + 1:
            raise StateError(
                f"slot {slot}: {num_before + length} tokens proposed, but depth {self.config.depth} allows "
                f"{self.config.depth + 1} before a commit"
            )
        end = int(self.position[slot]) + num_before + length
        if end > self.config.max_context:
            raise StateError(f"slot {slot}: {end} tokens do not fit the context of {self.config.max_context}")

    def view(self, batch: Batch) -> PoolView:
        """What a model sees during the pass."""
        return PoolView(self._kv, self._policy, batch)

    def end(self, batch: Batch) -> None:
        """Count the windows of a finished pass as proposed."""
        self._num_proposed[batch.slots] += np.diff(batch.starts)

    def commit(self, slot: int, num_consumed: int) -> bool:
        """Make the first `num_consumed` proposed tokens history.

        False: the policy restored the state before the round, and these tokens have to be run again, in full.
        """
        proposed = int(self._num_proposed[slot])
        lowest = proposed if self._advanced[slot] else 1
        if not lowest <= num_consumed <= proposed:
            raise StateError(
                f"slot {slot}: cannot commit {num_consumed} of {proposed} proposed tokens (at least {lowest})"
            )
        self._num_proposed[slot] = 0
        if not self._advanced[slot] and not self._policy.commit(slot, num_consumed, proposed):
            return False
        self.position[slot] += num_consumed
        self._torn[slot] = False
        return True

    def reset(self, slot: int) -> None:
        """Make a slot empty: position 0, state zero."""
        self._torn[slot] = True
        self._policy.reset(slot)
        self.position[slot] = 0
        self._num_proposed[slot] = 0
        self._torn[slot] = False

    def num_proposed(self, slot: int) -> int:
        """Tokens proposed on a slot and not committed."""
        return int(self._num_proposed[slot])

    def status(self, slot: int) -> SlotStatus:
        """Position, floor and open round of a slot. Changes nothing."""
        if not 0 <= slot < self.config.num_slots:
            raise StateError(
                f"slot {slot} does not exist: the pool has slots 0 to {self.config.num_slots - 1}"
            )
        position = int(self.position[slot])
        kept = self._policy.num_kept(slot) if self._policy.layers else position  # rows can always be cut
        return SlotStatus(
            position=position,
            floor=position - kept,
            num_proposed=self.num_proposed(slot),
            num_pending=self._policy.num_pending(slot),
            depth=self.config.depth,
            is_valid=not self._torn[slot],
        )

    def can_rollback(self, slot: int, position: int) -> bool:
        """Whether `rollback` to `position` would succeed now. Changes nothing."""
        status = self.status(slot)
        return status.is_valid and status.floor <= position <= status.position

    def rollback(self, slot: int, position: int) -> None:
        """Take a slot back to `position`, exactly, or raise `StateError` with nothing changed.

        What is proposed and not committed is dropped; `position` may be the committed one, which does only
        that. A position inside the open round is reached by committing part of it, not by a rollback.
        Below the committed position, `replay` reaches the tokens of the last commit until the next pass
        begins, at most depth of them; `snapshot` reaches whatever its planes still hold, at most depth
        tokens; `checkpoint` reaches nothing; a model without recurrent layers reaches every position.
        A state that was reset, written, or moved by a prompt chunk has no past.

        Rollbacks compose: after one, every lower position that was in reach still is, and going to p and
        then to q is going to q. Attention rows and recurrent state always agree on the position.
        """
        status = self.status(slot)
        if not self.can_rollback(slot, position):
            if not status.is_valid:
                raise StateError(f"slot {slot} holds no valid state: reset it, or restore one, before use")
            raise StateError(
                f"slot {slot} is at {status.position} and cannot go back to {position}: policy "
                f"'{self.config.policy}' still holds {status.floor} to {status.position}; "
                "reset the slot and run the tokens again"
            )
        if self._policy.layers and position < status.position:
            self._policy.go_back(slot, status.position - position)
        self.position[slot] = position
        self._num_proposed[slot] = 0

    def layout(self, position: int) -> Layout:
        """Shapes and dtypes of a committed value at `position`, by name: what `read` gives, `write` takes."""
        layout = self._kv.layout(position)
        for layer, spec in self._policy.layers.items():
            layout[f"state.{layer}"] = (state_shape(spec), self.config.compute)
            layout[f"conv.{layer}"] = ((spec.conv_width - 1, spec.conv_channels), self.config.compute)
        return layout

    def value_bytes(self, position: int) -> int:
        """Bytes of a committed value at `position`."""
        return sum(
            math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self.layout(position).values()
        )

    def require_fits(self, value: Committed) -> None:
        """Raise `StateError` for a value of another shape, dtype or length than a slot of this pool holds."""
        if value.position > self.config.max_context:
            raise StateError(
                f"a state of {value.position} tokens does not fit the context of {self.config.max_context}: "
                "raise the context"
            )
        layout = self.layout(value.position)
        found = {name: (array.shape, array.dtype.name) for name, array in value.arrays.items()}
        for name in sorted(layout.keys() | found.keys()):
            if layout.get(name) != found.get(name):
                raise StateError(
                    f"a state whose '{name}' is {_described(found.get(name))} cannot be written: "
                    f"a slot holds {_described(layout.get(name))}; use the model it was read from"
                )

    def read(self, slot: int) -> Committed:
        """A copy of a slot's committed value."""
        position = int(self.position[slot])
        arrays = self._kv.read(slot, position)
        for layer in self._policy.layers:
            arrays[f"state.{layer}"], arrays[f"conv.{layer}"] = self._policy.read(layer, slot)
        return Committed(position, arrays)

    def write(self, slot: int, value: Committed) -> None:
        """Replace a slot's committed value by a copy of `value`, dropping what is proposed.

        Raises `StateError`, with nothing changed, where `require_fits` does.
        """
        self.require_fits(value)
        self._torn[slot] = True
        self._kv.write(slot, value.position, value.arrays)
        for layer in self._policy.layers:
            self._policy.write(
                layer, slot, LayerState(value.arrays[f"state.{layer}"], value.arrays[f"conv.{layer}"])
            )
        self.position[slot] = value.position
        self._num_proposed[slot] = 0
        self._torn[slot] = False


def _described(entry: tuple[tuple[int, ...], str] | None) -> str:
    return f"{entry[1]} {list(entry[0])}" if entry else "absent"


class PoolView:
    """A `StateView` over one pass."""

    def __init__(self, kv: KVCache, policy: RollbackPolicy, batch: Batch) -> None:
        self._kv = kv
        self._policy = policy
        self._batch = batch

    def short_conv(self, layer: int, x: Array, taps: Array) -> Array:
        """See `StateView`."""
        return self._policy.short_conv(layer, x, taps, self._batch)

    def delta_rule(self, layer: int, inputs: DeltaInputs) -> Array:
        """See `StateView`."""
        return self._policy.delta_rule(layer, inputs, self._batch)

    def attention(
        self, layer: int, q: Array, k: Array, v: Array | None, scale: float, inv_freq: Array | None = None
    ) -> Array:
        """See `StateView`."""
        return self._kv.attention(layer, q, k, v, scale, inv_freq, self._batch)

    def attention_block(
        self, layer: int, x: Array, weights: AttentionWeights, norm: RMSNorm | None, residual: Array | None
    ) -> Array:
        """See `StateView`."""
        return self._kv.attention_block(layer, x, weights, norm, residual, self._batch)
