"""What a rollback policy is. A policy owns the recurrent states and conv windows of all slots, and decides
where a window's effect goes until it is committed.

Committed state is a value: `read` returns it, `commit`, `reset` and `write` change it, and a pass over a
window does not, unless the window is known to be consumed in full (`Batch.advance`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from redraft.models import RecurrentSpec
from redraft.ops import Array, DeltaInputs, Ops, Records
from redraft.ops import Windows as OpWindows
from redraft.state.batch import Batch, int_array
from redraft.state.buffers import Buffer, allocate


class LayerState(NamedTuple):
    """The committed value of one layer and slot."""

    state: Array  # [HV, K, V]
    conv: Array  # [W − 1, C], oldest first


class RollbackPolicy(ABC):
    """Recurrent states and conv windows of `num_slots` slots, for drafts of at most `depth` tokens.

    A round is every window proposed on a slot since its last commit; it has at most depth + 1 tokens.
    """

    name: ClassVar[str]

    def __init__(
        self,
        layers: Mapping[int, RecurrentSpec],
        ops: Ops,
        *,
        num_slots: int,
        depth: int,
        dtype: str,
        fill: int | None,
    ) -> None:
        self.layers = layers
        self.ops = ops
        self.depth = depth
        self.arrays = {
            layer: {b.name: allocate(b, num_slots, fill) for b in self.buffers(spec, depth, dtype)}
            for layer, spec in layers.items()
        }

    @staticmethod
    @abstractmethod
    def buffers(layer: RecurrentSpec, depth: int, dtype: str = "float32") -> tuple[Buffer, ...]:
        """What one layer holds for one slot: the one declaration that allocation and planning share."""

    def begin(self, batch: Batch) -> None:  # noqa: B027  (most policies have nothing to prepare)
        """Prepare a pass. A window with nothing before it starts from the committed state, whatever was
        proposed.
        """

    @abstractmethod
    def short_conv(self, layer: int, x: Array, taps: Array, batch: Batch) -> Array:
        """See `StateView.short_conv`."""

    @abstractmethod
    def delta_rule(self, layer: int, inputs: DeltaInputs, batch: Batch) -> Array:
        """See `StateView.delta_rule`."""

    @abstractmethod
    def commit(self, slot: int, num_consumed: int, num_proposed: int) -> bool:
        """Make the first `num_consumed` of `num_proposed` tokens the slot's history.

        True: done. False: the state is the one before the round, and the consumed tokens have to be run
        again.
        """

    def reset(self, slot: int) -> None:
        """Set a slot to the state before any token: zero."""
        for layer in self.layers:
            self.write(layer, slot, LayerState(np.zeros(()), np.zeros(())))

    def num_kept(self, slot: int) -> int:  # noqa: ARG002
        """How many tokens the committed state of a slot can go back by now, exactly. 0: the policy keeps no
        earlier state once a round is committed.
        """
        return 0

    def num_pending(self, slot: int) -> int:  # noqa: ARG002
        """Committed tokens of a slot that a later pass has yet to fold into its state."""
        return 0

    def go_back(self, slot: int, count: int) -> None:
        """Make the state of `count` tokens ago the committed one, dropping what is proposed.

        `count` is 1 to `num_kept(slot)`; afterwards that many fewer are kept.
        """
        raise AssertionError(f"{self.name} keeps nothing to go back to: slot {slot}, {count} tokens")

    @abstractmethod
    def read(self, layer: int, slot: int) -> LayerState:
        """A copy of the committed value."""

    @abstractmethod
    def write(self, layer: int, slot: int, value: LayerState) -> None:
        """Replace the committed value, dropping what is proposed."""


def state_shape(layer: RecurrentSpec) -> tuple[int, int, int]:
    """[HV, K, V]."""
    return layer.num_value_heads, layer.key_dim, layer.value_dim


def record_buffers(
    layer: RecurrentSpec, count: int, prefix: str, category: str, dtype: str
) -> tuple[Buffer, ...]:
    """`count` records: decay, k and u of one token each."""
    shapes = {
        "decay": (layer.num_value_heads, layer.decay_dim),
        "k": (layer.num_heads, layer.key_dim),
        "u": (layer.num_value_heads, layer.value_dim),
    }
    return tuple(Buffer(f"{prefix}.{part}", category, (count, *s), dtype) for part, s in shapes.items())  # type: ignore[arg-type]


def records(arrays: Mapping[str, Array], prefix: str) -> Records | None:
    """The record arrays of a layer, where it has any."""
    if f"{prefix}.u" not in arrays:
        return None
    return Records(arrays[f"{prefix}.decay"], arrays[f"{prefix}.k"], arrays[f"{prefix}.u"])


def fold(ops: Ops, state: Array, source: Records, slot: int, count: int) -> None:
    """Fold the first `count` records of `slot` into `state` [HV, K, V], in place, by the op that makes all
    states.
    """
    one = Records(*(part[slot : slot + 1] for part in source))
    empty = np.empty((0, *source.k.shape[2:]), state.dtype)  # [0, H, K]
    ops.delta_scan(
        empty,
        empty,
        np.empty((0, *source.u.shape[2:]), state.dtype),
        np.empty((0, *source.decay.shape[2:]), state.dtype),
        np.empty((0, len(state)), state.dtype),
        windows=OpWindows(int_array([0]), int_array([0, 0])),
        state=state[None],
        records=one,
        num_folded=int_array([count]),
        num_replayed=int_array([0]),
        advance=np.array([False]),
    )


def last_columns(history: Array, x: Array) -> Array:
    """The conv window after `x` [T, C] has followed `history` [W − 1, C]."""
    return np.concatenate([history, x])[len(x) :]


def policy_named(name: str) -> type[RollbackPolicy]:
    """The policy of that name."""
    from redraft.state import checkpoint, replay, snapshot  # noqa: PLC0415  (they derive from this module's class)

    found: Iterable[type[RollbackPolicy]] = (replay.Replay, snapshot.Snapshot, checkpoint.Checkpoint)
    return next(policy for policy in found if policy.name == name)
