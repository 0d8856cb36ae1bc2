"""The three arms of the experiment, and how the memory of speculation is turned into slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from redraft.config import EngineConfig
from redraft.engine import Engine
from redraft.errors import ConfigError
from redraft.models import ModelSpec
from redraft.speculate import Drafter
from redraft.state import Buffer, state_buffers


@dataclass(frozen=True)
class Arm:
    """One configuration of the engine. Its full concurrency is its number of slots."""

    name: str
    config: EngineConfig
    num_bytes: int  # weights, draft and state


@dataclass(frozen=True)
class ArmPlan:
    """The arms, and what the speculation costs."""

    plain: Arm
    speculation: Arm
    more_slots: Arm
    extra_bytes: int  # of speculation over the plain arm
    slot_bytes: int  # of one more slot without speculation
    extra_slots: int

    @property
    def arms(self) -> tuple[Arm, Arm, Arm]:
        """All three."""
        return self.plain, self.speculation, self.more_slots


def plan_arms(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    weight_bytes: int,
    draft_buffers: list[Buffer],
    budget: int | None = None,
) -> ArmPlan:
    """Arms of `config` (the speculation's): without speculation, with it, and its memory spent on slots
    instead.

    The third arm has as many slots as fit in `budget`, by default the bytes of the speculation arm.
    """
    plain = replace(config, depth=0)
    plain_bytes = weight_bytes + _total(state_buffers(spec, plain))
    speculation_bytes = weight_bytes + _total(state_buffers(spec, config)) + _total(draft_buffers)
    slot_bytes = _total(state_buffers(spec, replace(plain, num_slots=1)))
    limit = speculation_bytes if budget is None else budget
    if limit < speculation_bytes:
        raise ConfigError(
            f"budget of {limit} bytes is below the {speculation_bytes} that speculation needs: "
            "raise it, or lower the slots, the context or the depth"
        )
    extra_slots = (limit - plain_bytes) // slot_bytes
    more = replace(plain, num_slots=plain.num_slots + extra_slots)
    return ArmPlan(
        Arm("no speculation", plain, plain_bytes),
        Arm("speculation", config, speculation_bytes),
        Arm("more slots", more, plain_bytes + extra_slots * slot_bytes),
        speculation_bytes - plain_bytes,
        slot_bytes,
        extra_slots,
    )


def _total(buffers: list[Buffer]) -> int:
    return sum(buffer.num_bytes for buffer in buffers)


EngineFactory = Callable[[Arm, Callable[[], float]], Engine]
DrafterFactory = Callable[[EngineConfig], Drafter]
