"""A `PlanSpec` from a Hugging Face configuration: only the keys that size memory are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from redraft.errors import ModelFileError
from redraft.models import AttentionSpec, LayerSpec, RecurrentSpec
from redraft.plan import layers
from redraft.plan.description import Description
from redraft.plan.spec import PlanLayer, PlanSpec, Rule

Layers = tuple[PlanLayer, ...]


class Layout(NamedTuple):
    """How a model type's configuration is read; `architecture` is llama.cpp's name for it."""

    architecture: str
    rule: Rule
    read: Callable[[Description], Layers]


def _heads(config: Description) -> AttentionSpec:
    heads = config.size("num_attention_heads")
    dim = config.size("head_dim", "attention_head_dim", default=config.size("hidden_size") // heads)
    return layers.grouped(config.size("num_key_value_heads", default=heads), dim, dim)


def _latent(config: Description) -> AttentionSpec:
    return layers.latent(config.size("kv_lora_rank"), config.size("qk_rope_head_dim", lowest=0))


def _all_but_each(period: int, num_layers: int) -> list[bool]:
    """True for every layer but each `period`-th."""
    return [(i + 1) % period != 0 for i in range(num_layers)]


def _kinds(config: Description, recurrent: str) -> list[bool]:
    """Which layers are recurrent: from `layer_types`, or every layer but each n-th."""
    kinds, num_layers = config.sequence("layer_types"), config.num_layers("num_hidden_layers")
    if kinds is None:
        return _all_but_each(config.size("full_attention_interval", default=4), num_layers)
    if len(kinds) != num_layers:
        raise ModelFileError(f"'layer_types' names {len(kinds)} layers, 'num_hidden_layers' {num_layers}")
    return [kind == recurrent for kind in kinds]


def _kimi(config: Description) -> Layers:
    """KDA and latent attention; older files say `linear_attn_config`, newer ones `linear_*`."""
    linear, num_layers = config.part("linear_attn_config"), config.num_layers("num_hidden_layers")
    if linear is not None:
        keys = ("num_heads", "head_dim", "short_conv_kernel_size")
        spec = layers.kda(*(linear.size(key) for key in keys))
    else:
        spec = layers.kda(
            config.size("linear_num_heads", "num_attention_heads"),
            config.size("linear_head_dim", "head_dim"),
            config.size("linear_conv_kernel_dim", default=4),
        )
    full = None if linear is None else linear.sequence("full_attn_layers")
    if config.sequence("layer_types") is not None:
        kinds = _kinds(config, "linear_attention")
    elif full is not None:
        kinds = [i + 1 not in full for i in range(num_layers)]  # counted from 1
    else:
        kinds = _all_but_each(config.size("layer_group_size"), num_layers)
    indexer = config.optional("index_head_dim")
    return layers.mixed(kinds, spec, _latent(config), indexer)


def _gated_delta(config: Description) -> Layers:
    spec = layers.gated_delta(
        config.size("linear_num_key_heads"),
        config.size("linear_num_value_heads"),
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim"),
    )
    indexer = config.optional("indexer_head_dim")
    found = layers.mixed(_kinds(config, "linear_attention"), spec, _heads(config), indexer)
    ids = config.sequence("ple_layer_ids") or []  # counted from 1
    if not ids:
        return found
    floats = (config.size("ple_conv_kernel_size") - 1) * config.size("ngram_size")
    floats *= config.size("hc_count") * config.size("hidden_size")
    return tuple(replace(layer, extra_floats=floats if i + 1 in ids else 0) for i, layer in enumerate(found))


def _mamba2_spec(config: Description) -> RecurrentSpec:
    return layers.mamba2(
        config.size("mamba_num_heads", "mamba_n_heads", "num_heads"),
        config.size("mamba_head_dim", "mamba_d_head", "head_dim"),
        config.size("ssm_state_size", "mamba_d_state", "state_size"),
        config.size("mamba_num_groups", "mamba_n_groups", "n_groups"),
        config.size("conv_kernel", "mamba_d_conv"),
    )


def _nemotron(config: Description) -> Layers:
    """One letter a layer: M Mamba-2, * attention, - or E a feed-forward part without state."""
    kinds = {
        "M": layers.recurrent_layer(_mamba2_spec(config)),
        "*": layers.attention_layer(_heads(config)),
    }
    pattern = str(config.get("hybrid_override_pattern"))
    if len(pattern) != config.num_layers("num_hidden_layers"):
        raise ModelFileError(
            f"'hybrid_override_pattern' names {len(pattern)} layers, not 'num_hidden_layers'"
        )
    return tuple(kinds.get(letter, PlanLayer(LayerSpec())) for letter in pattern)


def _granite(config: Description) -> Layers:
    return layers.mixed(_kinds(config, "mamba"), _mamba2_spec(config), _heads(config))


def _falcon(config: Description) -> Layers:
    both = LayerSpec(attention=_heads(config), recurrent=_mamba2_spec(config))
    return (PlanLayer(both),) * config.num_layers("num_hidden_layers")


def _mamba2(config: Description) -> Layers:
    return (layers.recurrent_layer(_mamba2_spec(config)),) * config.size("num_hidden_layers", "n_layer")


def _mamba(config: Description) -> Layers:
    inner = config.size("intermediate_size", "d_inner")
    spec = layers.mamba(inner, config.size("state_size"), config.size("conv_kernel"))
    return (layers.recurrent_layer(spec),) * config.num_layers("num_hidden_layers")


def _rwkv(config: Description) -> Layers:
    head_size = config.size("head_dim", "head_size", default=64)
    spec = layers.rwkv(config.size("hidden_size"), head_size, 2)
    return (layers.recurrent_layer(spec),) * config.num_layers("num_hidden_layers")


def _lfm2(config: Description) -> Layers:
    spec = layers.short_conv(config.size("hidden_size"), config.size("conv_L_cache"))
    full = config.sequence("full_attn_idxs")
    if config.sequence("layer_types") is None and full is not None:
        kinds = [i not in full for i in range(config.num_layers("num_hidden_layers"))]
    else:
        kinds = _kinds(config, "conv")
    return layers.mixed(kinds, spec, _heads(config))


def _latent_only(config: Description) -> Layers:
    return (layers.attention_layer(_latent(config)),) * config.num_layers("num_hidden_layers")


def _attention(config: Description) -> Layers:
    """Plain attention; some layers may slide, named by `layer_types` or all but each n-th."""
    spec, num_layers = _heads(config), config.num_layers("num_hidden_layers")
    window = config.optional("sliding_window")
    if config.get("use_sliding_window", True) is False:
        window = 0
    kinds, period = config.sequence("layer_types"), config.optional("sliding_window_pattern")
    if kinds is not None:
        slides = _kinds(config, "sliding_attention")
    else:
        slides = _all_but_each(period, num_layers) if period else [True] * num_layers
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
    whole = Description(values)
    config = whole.part("text_config") or whole
    kind = str(config.get("model_type")).removesuffix("_text")
    layout = LAYOUTS.get(kind) or LAYOUTS.get(f"{kind}_text")
    if layout is None:
        raise ModelFileError(
            f"model type '{kind}' cannot be planned; these can: {', '.join(sorted(LAYOUTS))}"
        )
    found = layout.read(config)
    num_mtp = config.size("mtp_num_hidden_layers", "num_nextn_predict_layers", default=0, lowest=0)
    if num_mtp > len(found):
        raise ModelFileError(f"{num_mtp} MTP layers for {len(found)} layers: the description is damaged")
    attention = [layer for layer in found if layer.state.attention is not None and not layer.window]
    plain = [
        PlanLayer(LayerSpec(attention=layer.state.attention), 0, layer.indexer_dim) for layer in attention
    ]
    wanted = str(config.get("mamba_ssm_dtype", config.get("mamba_ssm_cache_dtype", "auto")))
    return PlanSpec(
        name=name,
        architecture=_architecture(layout, config),
        rule=layout.rule,
        hidden_size=config.size("hidden_size"),
        vocab_size=config.size("vocab_size"),
        max_context=config.size("max_position_embeddings", "model_max_length", default=2**20),
        layers=found,
        mtp_layers=tuple(plain[-1:]) * num_mtp,
        float32_state=wanted == "float32",
        source=source,
    )


def _architecture(layout: Layout, config: Description) -> str:
    """llama.cpp counts Nemotron-H with experts as an architecture of its own."""
    has_experts = "E" in str(config.get("hybrid_override_pattern", ""))
    return f"{layout.architecture}_moe" if has_experts else layout.architecture
