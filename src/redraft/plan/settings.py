"""What is planned for: an engine, its slots, their context, and how it speculates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from redraft.config import EngineConfig
from redraft.errors import ConfigError
from redraft.plan.sizes import TYPE_BYTES
from redraft.plan.spec import PlanSpec

EngineName = Literal["redraft", "llama.cpp", "vllm", "sglang"]
ENGINES: tuple[EngineName, ...] = ("redraft", "llama.cpp", "vllm", "sglang")

# Drafters that propose from the target's own hidden states; llama.cpp keeps state planes for these alone.
HEAD_DRAFTERS = ("mtp", "eagle3", "dflash", "dspark")
DRAFTERS = (*HEAD_DRAFTERS, "ngram", "model")

# The first of each is the engine's default.
POLICIES: dict[EngineName, tuple[str, ...]] = {
    "redraft": ("replay", "snapshot", "checkpoint"),
    "llama.cpp": ("snapshot", "checkpoint"),
    "vllm": ("snapshot", "replay"),
    "sglang": ("snapshot", "replay"),
}
KV_TYPES: dict[EngineName, tuple[str, ...]] = {
    "redraft": ("float32", "bfloat16"),
    "llama.cpp": ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
    "vllm": ("bf16", "f16", "fp8", "int8"),
    "sglang": ("bf16", "f16", "fp8", "int8"),
}

DEFAULTS = EngineConfig()
MAX_SLOTS, MAX_CONTEXT, MAX_DEPTH = 2**20, 2**24, 64


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """One configuration of one engine. Checked when made: `ConfigError` names the value and the limits.

    `context` is tokens a slot. `policy` and `kv_type` None are the engine's default. `drafter` None with a
    depth: some drafter for which the engine keeps its usual rollback memory; the drafter itself is not
    counted. `draft_spec` belongs to drafter `model`. `unified_kv` (llama.cpp): one pool for all slots, else
    each slot's share is padded by itself. `state_type` (vLLM, SGLang) overrides the state's type.
    `state_pool` and `kv_tokens` (SGLang): the state pool's size and the KV pool's tokens, where they are
    known; else three states a slot (one runs, two for the prefix cache) and slots × context.
    """

    engine: EngineName = "redraft"
    slots: int = DEFAULTS.num_slots
    context: int = DEFAULTS.max_context
    depth: int = DEFAULTS.depth
    policy: str | None = None
    drafter: str | None = None
    draft_spec: PlanSpec | None = None
    kv_type: str | None = None
    tp: int = 1
    unified_kv: bool = True
    state_type: str | None = None
    state_pool: int | None = None
    kv_tokens: int | None = None

    def __post_init__(self) -> None:
        _require(self.engine in ENGINES, f"engine must be one of {', '.join(ENGINES)}, not '{self.engine}'")
        _require(1 <= self.slots <= MAX_SLOTS, f"slots must be 1 to {MAX_SLOTS}, not {self.slots}")
        _require(
            1 <= self.context <= MAX_CONTEXT, f"context must be 1 to {MAX_CONTEXT} tokens, not {self.context}"
        )
        _require(
            0 <= self.depth <= MAX_DEPTH, f"depth must be 0 to {MAX_DEPTH} draft tokens, not {self.depth}"
        )
        self._check_choice("policy", self.policy, POLICIES[self.engine])
        self._check_choice("KV type", self.kv_type, KV_TYPES[self.engine])
        self._check_choice("drafter", self.drafter, DRAFTERS)
        _require(
            (self.drafter == "model") == (self.draft_spec is not None),
            "drafter 'model' and a draft model's description belong together",
        )
        self._check_tp()
        _require(
            self.state_type is None or self.state_type in TYPE_BYTES,
            f"unknown state type '{self.state_type}'",
        )
        _require(
            self.state_pool is None or self.state_pool >= self.slots,
            f"a state pool of {self.state_pool} is smaller than the {self.slots} slots",
        )

    def _check_choice(self, what: str, value: str | None, choices: tuple[str, ...]) -> None:
        _require(
            value is None or value in choices,
            f"{what} on {self.engine} must be one of {', '.join(choices)}, not '{value}'",
        )

    def _check_tp(self) -> None:
        _require(1 <= self.tp <= 1024, f"tensor parallelism must be 1 to 1024 devices, not {self.tp}")
        _require(
            self.tp == 1 or self.engine in ("vllm", "sglang"),
            f"{self.engine} does not split heads over devices; plan it with --tp 1, "
            "or choose --engine vllm or sglang",
        )

    def at_depth(self, depth: int) -> PlanSettings:
        """The same with another depth; at 0 there is no drafter."""
        if depth:
            return replace(self, depth=depth)
        return replace(self, depth=0, drafter=None, draft_spec=None)

    @property
    def rollback(self) -> str:
        """The policy, with the engine's default filled in."""
        return self.policy or POLICIES[self.engine][0]

    @property
    def kv(self) -> str:
        """The KV type, with the engine's default filled in."""
        return self.kv_type or KV_TYPES[self.engine][0]
