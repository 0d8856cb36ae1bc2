"""A `PlanSpec` from a Hugging Face configuration: only the keys that size memory are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from redraft.errors import ModelFileError
from redraft.models import AttentionSpec, LayerSpec, Metadata, RecurrentSpec
from redraft.plan import layers
from redraft.plan.spec import PlanLayer, PlanSpec, Rule

Layers = tuple[PlanLayer, ...]


class Layout(NamedTuple):
    """How a model type's configuration is read; `architecture` is llama.cpp's name for it."""

    architecture: str
    rule: Rule
    read: Callable[[Metadata], Layers]


def first(config: Metadata, *keys: str, default: int | None = None) -> int:
    """The first of several spellings of one number."""
    for key in keys:
        if config.get(key, None) is not None:
            return config.integer(key)
    if default is None:
        return config.integer(keys[0])  # raises, naming the usual spelling
    return default


def _heads(config: Metadata) -> AttentionSpec:
    heads = config.integer("num_attention_heads")
    dim = first(config, "head_dim", "attention_head_dim", default=config.integer("hidden_size") // heads)
    return layers.grouped(first(config, "num_key_value_heads", default=heads), dim, dim)


def _latent(config: Metadata) -> AttentionSpec:
    return layers.latent(config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim"))


def _kinds(config: Metadata, recurrent: str) -> list[bool]:
    """Which layers are recurrent: from `layer_types`, or every layer but each n-th."""
    kinds = config.get("layer_types", None)
    num_layers = config.integer("num_hidden_layers")
    if kinds is not None:
        if len(kinds) != num_layers:
            raise ModelFileError(f"'layer_types' names {len(kinds)} layers, 'num_hidden_layers' {num_layers}")
        return [kind == recurrent for kind in kinds]
    interval = config.integer("full_attention_interval", 4)
    return [(i + 1) % interval != 0 for i in range(num_layers)]


def _kimi(config: Metadata) -> Layers:
    """KDA and latent attention; older files say `linear_attn_config`, newer ones `linear_*`."""
    linear, num_layers = Metadata(config.get("linear_attn_config", {})), config.integer("num_hidden_layers")
    if linear.values:
        spec = layers.kda(
            *(linear.integer(key) for key in ("num_heads", "head_dim", "short_conv_kernel_size"))
        )
    else:
        spec = layers.kda(
            first(config, "linear_num_heads", "num_attention_heads"),
            first(config, "linear_head_dim", "head_dim"),
            first(config, "linear_conv_kernel_dim", default=4),
        )
    full, group = linear.get("full_attn_layers", None), config.get("layer_group_size", None)
    if config.get("layer_types", None) is not None:
        kinds = _kinds(config, "linear_attention")
    elif full is not None:
        kinds = [i + 1 not in full for i in range(num_layers)]  # counted from 1
    else:
        kinds = [(i + 1) % int(group or 4) != 0 for i in range(num_layers)]
    return layers.mixed(kinds, spec, _latent(config), first(config, "index_head_dim", default=0))


def _gated_delta(config: Metadata) -> Layers:
    spec = layers.gated_delta(
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
    )
    indexer = first(config, "indexer_head_dim", default=0)
    found = layers.mixed(_kinds(config, "linear_attention"), spec, _heads(config), indexer)
    ids = config.get("ple_layer_ids", None) or []  # counted from 1
    if not ids:
        return found
    floats = (config.integer("ple_conv_kernel_size") - 1) * config.integer("ngram_size")
    floats *= config.integer("hc_count") * config.integer("hidden_size")
    return tuple(replace(layer, extra_floats=floats if i + 1 in ids else 0) for i, layer in enumerate(found))


def _mamba2_spec(config: Metadata) -> RecurrentSpec:
    return layers.mamba2(
        first(config, "mamba_num_heads", "mamba_n_heads", "num_heads"),
        first(config, "mamba_head_dim", "mamba_d_head", "head_dim"),
        first(config, "ssm_state_size", "mamba_d_state", "state_size"),
        first(config, "mamba_num_groups", "mamba_n_groups", "n_groups"),
        first(config, "conv_kernel", "mamba_d_conv"),
    )


def _nemotron(config: Metadata) -> Layers:
    """One letter a layer: M Mamba-2, * attention, - or E a feed-forward part without state."""
    kinds = {
        "M": layers.recurrent_layer(_mamba2_spec(config)),
        "*": layers.attention_layer(_heads(config)),
    }
    pattern = str(config.get("hybrid_override_pattern"))
    return tuple(kinds.get(letter, PlanLayer(LayerSpec())) for letter in pattern)


def _granite(config: Metadata) -> Layers:
    return layers.mixed(_kinds(config, "mamba"), _mamba2_spec(config), _heads(config))


def _falcon(config: Metadata) -> Layers:
    both = LayerSpec(attention=_heads(config), recurrent=_mamba2_spec(config))
    return (PlanLayer(both),) * config.integer("num_hidden_layers")


def _mamba2(config: Metadata) -> Layers:
    return (layers.recurrent_layer(_mamba2_spec(config)),) * first(config, "num_hidden_layers", "n_layer")


def _mamba(config: Metadata) -> Layers:
    inner = first(config, "intermediate_size", "d_inner")
    spec = layers.mamba(inner, config.integer("state_size"), config.integer("conv_kernel"))
    return (layers.recurrent_layer(spec),) * config.integer("num_hidden_layers")


def _rwkv(config: Metadata) -> Layers:
    head_size = first(config, "head_dim", "head_size", default=64)
    spec = layers.rwkv(config.integer("hidden_size"), head_size, 2)
    return (layers.recurrent_layer(spec),) * config.integer("num_hidden_layers")


def _lfm2(config: Metadata) -> Layers:
    spec = layers.short_conv(config.integer("hidden_size"), config.integer("conv_L_cache"))
    full = config.get("full_attn_idxs", None)
    if config.get("layer_types", None) is None and full is not None:
        kinds = [i not in full for i in range(config.integer("num_hidden_layers"))]
    else:
        kinds = _kinds(config, "conv")
    return layers.mixed(kinds, spec, _heads(config))


def _latent_only(config: Metadata) -> Layers:
    return (layers.attention_layer(_latent(config)),) * config.integer("num_hidden_layers")


def _attention(config: Metadata) -> Layers:
    """Plain attention; some layers may slide, named by `layer_types` or all but each n-th."""
    spec, num_layers = _heads(config), config.integer("num_hidden_layers")
    window = (
        0 if config.get("use_sliding_window", True) is False else (config.get("sliding_window", None) or 0)
    )
    kinds, pattern = config.get("layer_types", None), config.get("sliding_window_pattern", None)
    if kinds is not None:
        slides = [kind == "sliding_attention" for kind in kinds]
    elif pattern is not None:
        slides = [(i + 1) % int(pattern) != 0 for i in range(num_layers)]
    else:
        slides = [True] * num_layers
    return tuple(layers.attention_layer(spec, window if slide else 0) for slide in slides)


_PLAIN = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss", "smollm3": "smollm3", "olmo2": "olmo2", "glm4": "glm4", "glm4_moe": "glm4moe",
    "phi3": "phi3",
    "granite": "granite", "granitemoe": "granitemoe",
}  # fmt: skip

LAYOUTS: dict[str, Layout] = {
    "kimi_linear": Layout("kimi-linear", "kda", _kimi),
    "kimi_k3": Layout("kimi-k3", "kda", _kimi),
    "glm5_next": Layout("glm5-next", "kda", _kimi),
    "bailing_moe_v3": Layout("bailingmoe3", "kda", _kimi),
    "qwen3_next": Layout("qwen3next", "gdn", _gated_delta),
    "qwen3_5": Layout("qwen35", "gdn", _gated_delta),
    "qwen3_5_moe": Layout("qwen35moe", "gdn", _gated_delta),
    "qwen4_exp": Layout("qwen4exp", "gdn", _gated_delta),
    "nemotron_h": Layout("nemotron_h", "mamba2", _nemotron),
    "granitemoehybrid": Layout("granitehybrid", "mamba2", _granite),
    "falcon_h1": Layout("falcon-h1", "mamba2", _falcon),
    "mamba2": Layout("mamba2", "mamba2", _mamba2),
    "mamba": Layout("mamba", "mamba", _mamba),
    "falcon_mamba": Layout("mamba", "mamba", _mamba),
    "rwkv7": Layout("rwkv7", "rwkv", _rwkv),
    "lfm2": Layout("lfm2", "conv", _lfm2),
    "lfm2_moe": Layout("lfm2moe", "conv", _lfm2),
    "deepseek_v2": Layout("deepseek2", "none", _latent_only),
    "deepseek_v3": Layout("deepseek2", "none", _latent_only),
} | {kind: Layout(architecture, "none", _attention) for kind, architecture in _PLAIN.items()}


def spec_from_config(values: Mapping[str, Any], *, name: str, source: str) -> PlanSpec:
    """A model from its config.json, or from the text part of a larger one.

    Raises `ModelFileError` for a model type that is not known and for keys that are missing.
    """
    config = Metadata(values.get("text_config", values))
    kind = str(config.get("model_type")).removesuffix("_text")
    layout = LAYOUTS.get(kind) or LAYOUTS.get(f"{kind}_text")
    if layout is None:
        raise ModelFileError(
            f"model type '{kind}' cannot be planned; these can: {', '.join(sorted(LAYOUTS))}"
        )
    found = layout.read(config)
    num_mtp = first(config, "mtp_num_hidden_layers", "num_nextn_predict_layers", default=0)
    attention = [layer for layer in found if layer.state.attention is not None and not layer.window]
    plain = [
        PlanLayer(LayerSpec(attention=layer.state.attention), 0, layer.indexer_dim) for layer in attention
    ]
    wanted = str(config.get("mamba_ssm_dtype", config.get("mamba_ssm_cache_dtype", "auto")))
    return PlanSpec(
        name=name,
        architecture=_architecture(layout, config),
        rule=layout.rule,
        hidden_size=config.integer("hidden_size"),
        vocab_size=config.integer("vocab_size"),
        max_context=first(config, "max_position_embeddings", "model_max_length", default=2**20),
        layers=found,
        mtp_layers=tuple(plain[-1:]) * num_mtp,
        float32_state=wanted == "float32",
        source=source,
    )


def _architecture(layout: Layout, config: Metadata) -> str:
    """llama.cpp counts Nemotron-H with experts as an architecture of its own."""
    has_experts = "E" in str(config.get("hybrid_override_pattern", ""))
    return f"{layout.architecture}_moe" if has_experts else layout.architecture
