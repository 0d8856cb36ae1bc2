"""A `PlanSpec` from the header of a GGUF file: llama.cpp's own keys and rules for what a layer is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from redraft.errors import ModelFileError
from redraft.loading.gguf import GGUFFile
from redraft.models import AttentionSpec, LayerSpec, RecurrentSpec
from redraft.plan import layers
from redraft.plan.description import Description
from redraft.plan.spec import PlanLayer, PlanSpec, Rule, WeightGroup

_RULES: dict[Rule, tuple[str, ...]] = {
    "kda": ("kimi-linear", "kimi-k3", "bailingmoe3", "glm5-next"),
    "gdn": ("qwen3next", "qwen35", "qwen35moe", "qwen4exp"),
    "mamba2": ("mamba2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"),
    "mamba": ("mamba", "jamba"),
    "rwkv": ("rwkv6", "rwkv7"),
    "conv": ("lfm2", "lfm2moe"),
    "none": (
        "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss", "smollm3",
        "olmo2", "phi3", "glm4", "glm4moe", "granite", "granitemoe", "deepseek2",
    ),
}  # fmt: skip
RULES: dict[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names}

# Attention-only families in which all but each n-th layer slide, unless the file has a pattern of its own.
_SLIDING_PERIOD = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
_FLOAT32_STATE = ("qwen35", "qwen35moe", "qwen4exp")


def spec_from_gguf(path: Path) -> PlanSpec:
    """A model from a GGUF file or any part of a split one. Only headers are read.

    Raises `ModelFileError` for a file that is none, an unknown architecture, or missing keys.
    """
    file = GGUFFile(path)
    architecture = str(Description(file.metadata).get("general.architecture"))
    if architecture not in RULES:
        raise ModelFileError(
            f"{path}: architecture '{architecture}' cannot be planned; these can: {', '.join(sorted(RULES))}"
        )
    meta = Description(file.metadata, f"{architecture}.")
    num_layers, num_mtp = (
        meta.num_layers("block_count"),
        meta.optional("nextn_predict_layers"),
    )
    if num_mtp >= num_layers:
        raise ModelFileError(f"{path}: {num_mtp} draft layers of {num_layers}: the header is damaged")
    rule = RULES[architecture]
    all_layers = _layers(meta, rule, architecture, num_layers, num_layers - num_mtp)
    return PlanSpec(
        name=str(file.metadata.get("general.name") or path.stem),
        architecture=architecture,
        rule=rule,
        hidden_size=meta.size("embedding_length"),
        vocab_size=_vocab_size(meta, file),
        max_context=meta.optional("context_length", 2**20),
        layers=all_layers[: num_layers - num_mtp],
        mtp_layers=all_layers[num_layers - num_mtp :],
        float32_state=architecture in _FLOAT32_STATE,
        weights=_weights(file, num_layers - num_mtp),
        weights_exact=True,
        source=str(path),
    )


def _vocab_size(meta: Description, file: GGUFFile) -> int:
    if (size := meta.optional("vocab_size")) or (size := len(file.metadata.get("tokenizer.ggml.tokens", []))):
        return size
    table = file.tensors.get("token_embd.weight")
    return table.shape[0] if table else 0


def _weights(file: GGUFFile, num_layers: int) -> tuple[WeightGroup, ...]:
    """Bytes by encoding; blocks beyond the last layer belong to the draft head."""
    totals: dict[tuple[bool, str], int] = {}
    for tensor in file.tensors.values():
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        key = (block is not None and int(block[1]) >= num_layers, tensor.encoding)
        totals[key] = totals.get(key, 0) + tensor.num_bytes
    return tuple(WeightGroup(encoding, size, mtp) for (mtp, encoding), size in sorted(totals.items()))


def _attention(meta: Description, num_kv_heads: int) -> AttentionSpec:
    if meta.optional("attention.key_length_mla"):
        return layers.latent(meta.size("attention.kv_lora_rank"), meta.optional("rope.dimension_count"))
    heads = max(meta.sizes("attention.head_count", meta.num_layers("block_count")))
    width = meta.size("embedding_length") // max(heads, 1)
    key_dim = meta.optional("attention.key_length", width)
    return layers.grouped(num_kv_heads, key_dim, meta.optional("attention.value_length", width))


def _recurrent(meta: Description, rule: Rule) -> RecurrentSpec:
    """The recurrence, by llama.cpp's keys: `ssm.*`, `kda.head_dim`, `wkv.head_size`, `shortconv.l_cache`."""
    hidden = meta.size("embedding_length")
    if rule == "rwkv":
        return layers.rwkv(hidden, meta.size("wkv.head_size"), meta.optional("token_shift_count", 2))
    if rule == "conv":
        return layers.short_conv(hidden, meta.size("shortconv.l_cache"))
    width = meta.size("ssm.conv_kernel")
    if rule == "kda":
        heads = max(meta.sizes("attention.head_count", meta.num_layers("block_count")))
        return layers.kda(heads, meta.size("kda.head_dim"), width)
    inner, state = meta.size("ssm.inner_size"), meta.size("ssm.state_size")
    if rule == "mamba":
        return layers.mamba(inner, state, width)
    heads, groups = meta.size("ssm.time_step_rank"), meta.size("ssm.group_count")
    if rule == "gdn":
        return layers.gated_delta(groups, heads, state, inner // heads, width)
    return layers.mamba2(heads, inner // heads, state, groups, width)


def _layers(
    meta: Description, rule: Rule, architecture: str, num_layers: int, num_target: int
) -> tuple[PlanLayer, ...]:
    kv_heads = meta.sizes("attention.head_count_kv", num_layers, _default_kv_heads(meta, rule))
    recurrent = None if rule == "none" else _recurrent(meta, rule)
    is_recurrent = _recurrent_test(meta, rule, architecture, kv_heads, num_target)
    windows = _windows(meta, architecture, num_layers)
    indexer = meta.optional("attention.indexer.key_length")
    found = []
    for i in range(num_layers):
        attends = kv_heads[i] > 0 and (not is_recurrent(i) or architecture == "falcon-h1")
        state = LayerSpec(
            attention=_attention(meta, kv_heads[i]) if attends else None,
            recurrent=recurrent if is_recurrent(i) else None,
        )
        found.append(PlanLayer(state, windows[i] if attends else 0, indexer if attends else 0))
    return tuple(found)


def _default_kv_heads(meta: Description, rule: Rule) -> int:
    if rule in ("rwkv", "mamba") or meta.get("attention.head_count", None) is None:
        return 0
    return max(meta.sizes("attention.head_count", meta.num_layers("block_count")))


def _recurrent_test(
    meta: Description, rule: Rule, architecture: str, kv_heads: list[int], num_target: int
) -> Callable[[int], bool]:
    """Which layers are recurrent; layers of the draft head never are."""
    if rule == "none":
        return lambda _: False
    if rule == "rwkv" or architecture in ("mamba", "mamba2", "falcon-h1"):
        return lambda i: i < num_target
    if rule == "gdn":
        interval = meta.size("full_attention_interval", default=4)
        return lambda i: i < num_target and (i + 1) % interval != 0
    if architecture.startswith("nemotron_h"):
        inner = meta.sizes("feed_forward_length", len(kv_heads), 0)
        return lambda i: i < num_target and kv_heads[i] == 0 and inner[i] == 0
    return lambda i: i < num_target and kv_heads[i] == 0


def _windows(meta: Description, architecture: str, num_layers: int) -> list[int]:
    window = meta.optional("attention.sliding_window")
    pattern = meta.get("attention.sliding_window_pattern", _SLIDING_PERIOD.get(architecture, 0))
    if not window or RULES[architecture] != "none":
        return [0] * num_layers
    if isinstance(pattern, list):
        slides = [bool(one) for one in pattern]
    else:
        period = meta.optional("attention.sliding_window_pattern", pattern)
        slides = [period > 0 and (i + 1) % period != 0 for i in range(num_layers)]
    if len(slides) != num_layers:
        raise ModelFileError(f"the sliding window pattern names {len(slides)} layers of {num_layers}")
    return [window if one else 0 for one in slides]
