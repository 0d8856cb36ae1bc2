"""The settings of an engine and of a request. Frozen, checked when made; the command line takes its defaults
here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from redraft.errors import ConfigError

KV_TYPES = ("float32", "bfloat16")
COMPUTE_TYPES = ("float32", "float64")
MAX_SEED = 2**64 - 1

PolicyName = Literal["replay", "snapshot", "checkpoint"]
KVType = Literal["float32", "bfloat16"]
ComputeType = Literal["float32", "float64"]
POLICIES: tuple[PolicyName, ...] = ("replay", "snapshot", "checkpoint")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine allocates and how it schedules.

    `num_slots` sequences of at most `max_context` tokens each; a draft of at most `depth` tokens a step (0:
    no speculation, and no memory for it); at most `prefill_chunk` prompt tokens a step, over all requests.
    `prefix_bytes` of host memory keep states of prompts for later requests (0: none), taken at the end of a
    request and after every `prefix_interval` prompt tokens, where a prompt is then cut. `fill` sets every
    byte of the state memory before first use: a test that nothing unwritten is read.
    """

    num_slots: int = 4
    max_context: int = 2048
    depth: int = 7
    policy: PolicyName = "replay"
    prefill_chunk: int = 64
    kv_type: KVType = "float32"
    compute: ComputeType = "float32"
    prefix_bytes: int = 0
    prefix_interval: int = 256
    fill: int | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.num_slots <= 4096, f"slots must be 1 to 4096, not {self.num_slots}")
        _require(
            1 <= self.max_context <= 2**24, f"context must be 1 to {2**24} tokens, not {self.max_context}"
        )
        _require(0 <= self.depth <= 64, f"depth must be 0 to 64 draft tokens, not {self.depth}")
        _require(self.policy in POLICIES, f"policy must be one of {', '.join(POLICIES)}, not '{self.policy}'")
        _require(self.prefill_chunk >= 1, f"prefill chunk must be at least 1 token, not {self.prefill_chunk}")
        _require(self.prefix_bytes >= 0, f"prefix bytes must be 0 (off) or more, not {self.prefix_bytes}")
        _require(
            self.prefix_interval >= 1, f"prefix interval must be at least 1 token, not {self.prefix_interval}"
        )
        _require(
            self.kv_type in KV_TYPES, f"KV type must be one of {', '.join(KV_TYPES)}, not '{self.kv_type}'"
        )
        _require(
            self.compute in COMPUTE_TYPES,
            f"compute type must be one of {', '.join(COMPUTE_TYPES)}, not '{self.compute}'",
        )
        _require(
            self.fill is None or 0 <= self.fill <= 255, f"fill must be a byte, 0 to 255, not {self.fill}"
        )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. The order of operations stands in
    `speculate.sampling`.

    `temperature` 0 takes the likeliest token. `top_k` 0, `top_p` 1 and `min_p` 0 switch these filters off.
    `logit_bias` maps token ids to an addend. `stop_tokens` end the request and belong to its tokens, not to
    its text; the first of `stop_strings` to appear ends the text before it. With `ignore_eos` the model's own
    end tokens do not end the request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _require(
                math.isfinite(getattr(self, name)),
                f"{name} must be a finite number, not {getattr(self, name)}",
            )
        _require(0 <= self.temperature <= 100, f"temperature must be 0 to 100, not {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be 0 to 1, not {self.min_p}")
        _require(
            self.repetition_penalty > 0, f"repetition_penalty must be above 0, not {self.repetition_penalty}"
        )
        _require(0 <= self.seed <= MAX_SEED, f"seed must be 0 to 2^64 - 1, not {self.seed}")
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _require(all(self.stop_strings), "a stop string must not be empty")
        _require(
            all(math.isfinite(value) for value in self.logit_bias.values()),
            "logit_bias values must be finite numbers",
        )

    @property
    def has_penalties(self) -> bool:
        """Whether a choice depends on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
