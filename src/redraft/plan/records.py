"""What one token leaves behind so that its effect on a state can be repeated: bytes a token and layer.

Sources: KDA on vLLM, https://github.com/vllm-project/vllm/pull/51855; Gated DeltaNet on vLLM, its unit test
of record shapes; SGLang, `--enable-linear-replayssm`; why u and not v is stored,
https://github.com/ROCm/ATOM/pull/1883.
"""

from __future__ import annotations

from redraft.errors import ConfigError
from redraft.models import RecurrentSpec
from redraft.plan.spec import Rule


def vllm_record_bytes(rule: Rule, layer: RecurrentSpec) -> int:
    """RecoverSSM: for KDA, u in float32, k and the raw gate in the activation's type; for Gated DeltaNet, u,
    k and one decay a head in float32; for Mamba-2, x and B in the activation's type and dt in float32.

    Raises `ConfigError` for a recurrence that has no records there.
    """
    heads, values = layer.num_heads * layer.key_dim, layer.num_value_heads * layer.value_dim
    if rule == "kda":
        return values * 4 + heads * (2 + 2)
    if rule == "gdn":
        return 4 * (values + heads + layer.num_value_heads)
    if rule == "mamba2":
        return values * 2 + layer.num_value_heads * 4 + heads * 2
    raise ConfigError(f"vLLM replays no '{rule}' layers; plan them with --policy snapshot")


def vllm_record_shapes(layer: RecurrentSpec, depth: int) -> str:
    """The record arrays of a Gated DeltaNet layer, for a window of 1 + depth tokens."""
    tokens, heads, values = 1 + depth, layer.num_heads, layer.num_value_heads
    return f"({values},{tokens},{layer.value_dim}) ({heads},{tokens},{layer.key_dim}) ({values},{tokens}) f32"


def sglang_record_bytes(rule: Rule, layer: RecurrentSpec, state_bytes: int) -> int:
    """ReplaySSM ring: the update and k in the state's type, the decay in float32.

    Raises `ConfigError` for a recurrence that has no ring there.
    """
    heads, values = layer.num_heads * layer.key_dim, layer.num_value_heads * layer.value_dim
    if rule == "kda":
        return values * state_bytes + heads * (state_bytes + 4)
    if rule == "gdn":
        return state_bytes * (values + heads) + 4 * layer.num_value_heads
    raise ConfigError(f"SGLang replays no '{rule}' layers; plan them with --policy snapshot")


def sidecar_bytes(layer: RecurrentSpec, num_rows: int) -> int:
    """A fork's Gated DeltaNet sidecar: k for each value head and u in bfloat16, one bfloat16 decay, and a
    counter. Fitted to one published constant, not read in its source.
    """
    return num_rows * layer.num_value_heads * (2 * layer.key_dim + 2 * layer.value_dim + 2) + 4
