"""The Kimi families in numbers, read from GGUF keys or a config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redraft.errors import ModelFileError
from redraft.models.metadata import Metadata
from redraft.models.spec import AttentionSpec, LayerSpec, ModelSpec, RecurrentSpec
from redraft.ops import SWIGLU, Activation


@dataclass(frozen=True, kw_only=True)
class KimiLinearSpec(ModelSpec):
    """Kimi-Linear in numbers. A layer is recurrent where it has a recurrent spec."""

    num_heads: int
    delta_heads: int
    delta_dim: int
    lower_bound: float | None
    q_rank: int  # 0: one query matrix
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    num_dense: int
    dense_dim: int
    expert_dim: int
    num_experts: int
    num_chosen: int
    num_shared: int
    expert_scale: float
    normalise: bool
    eps: float
    l2_eps: float
    activation: Activation = SWIGLU
    latent_dim: int = 0  # 0: experts see the full width


def layer_specs(
    *, recurrent: list[bool], heads: int, dim: int, width: int, kv_row: int, kv_rank: int
) -> tuple[LayerSpec, ...]:
    """The state of each layer: a KDA state or latent rows."""
    delta = LayerSpec(recurrent=RecurrentSpec(heads, heads, dim, dim, dim, 3 * heads * dim, width))
    latent = LayerSpec(attention=AttentionSpec(1, kv_row, kv_rank, latent=True))
    return tuple(delta if r else latent for r in recurrent)


def gguf_fields(meta: Metadata) -> dict[str, Any]:
    """The spec's fields from GGUF keys that Kimi-Linear and Kimi K3 share."""
    num_layers = meta.integer("block_count")
    kv_heads = meta.per_layer("attention.head_count_kv", num_layers)
    heads = set(meta.per_layer("attention.head_count", num_layers))
    if len(heads) != 1:
        raise ModelFileError(f"'{meta.prefix}attention.head_count' differs between layers: {sorted(heads)}")
    meta.require("expert_gating_func", 2)  # sigmoid
    num_heads, kv_rank, rope_dim = (
        heads.pop(),
        meta.integer("attention.kv_lora_rank"),
        meta.integer("rope.dimension_count"),
    )
    eps = meta.number("attention.layer_norm_rms_epsilon")
    lower_bound = meta.get("kda.gate_lower_bound", None)
    return {
        "vocab_size": meta.integer("vocab_size"),
        "hidden_size": meta.integer("embedding_length"),
        "max_context": meta.integer("context_length"),
        "layers": layer_specs(
            recurrent=[n == 0 for n in kv_heads],
            heads=num_heads,
            dim=meta.integer("kda.head_dim"),
            width=meta.integer("ssm.conv_kernel"),
            kv_row=kv_rank + rope_dim,
            kv_rank=kv_rank,
        ),
        "num_heads": num_heads,
        "delta_heads": num_heads,
        "delta_dim": meta.integer("kda.head_dim"),
        "lower_bound": None if lower_bound is None else float(lower_bound),
        "q_rank": meta.integer("attention.q_lora_rank", 0),
        "kv_rank": kv_rank,
        "nope_dim": meta.integer("attention.key_length_mla") - rope_dim,
        "rope_dim": rope_dim,
        "value_dim": meta.integer("attention.value_length_mla"),
        "num_dense": meta.integer("leading_dense_block_count"),
        "dense_dim": meta.integer("feed_forward_length"),
        "expert_dim": meta.integer("expert_feed_forward_length", 0),
        "num_experts": meta.integer("expert_count", 0),
        "num_chosen": meta.integer("expert_used_count", 0),
        "num_shared": meta.integer("expert_shared_count", 0),
        "expert_scale": meta.number("expert_weights_scale", 1.0),
        "normalise": bool(meta.get("expert_weights_norm", False)),
        "eps": eps,
        "l2_eps": eps,
    }


def hf_fields(config: Metadata) -> dict[str, Any]:
    """The spec's fields from a Hugging Face configuration, in its first form (`linear_attn_config`) or its
    newer one.
    """
    linear = Metadata(config.get("linear_attn_config", {}), "linear_attn_config.")
    linear.prefix = ""
    num_layers = config.integer("num_hidden_layers")
    if "layer_types" in config.values:
        recurrent = [kind == "linear_attention" for kind in config.get("layer_types")]
    else:
        full = set(linear.get("full_attn_layers"))  # counted from 1
        recurrent = [layer + 1 not in full for layer in range(num_layers)]
    heads = linear.integer("num_heads", config.get("linear_num_heads", config.get("num_attention_heads")))
    dim = linear.integer("head_dim", config.get("linear_head_dim", None))
    kv_rank, rope_dim = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    config.require("num_expert_group", 1)
    config.require("mla_use_nope", True)
    lower_bound = linear.get("gate_lower_bound", None)
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "max_context": config.integer("model_max_length", config.get("max_position_embeddings", 2**20)),
        "layers": layer_specs(
            recurrent=recurrent,
            heads=heads,
            dim=dim,
            width=linear.integer("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4)),
            kv_row=kv_rank + rope_dim,
            kv_rank=kv_rank,
        ),
        "num_heads": config.integer("num_attention_heads"),
        "delta_heads": heads,
        "delta_dim": dim,
        "lower_bound": None if lower_bound is None else float(lower_bound),
        "q_rank": config.get("q_lora_rank", None) or 0,
        "kv_rank": kv_rank,
        "nope_dim": config.integer("qk_nope_head_dim"),
        "rope_dim": rope_dim,
        "value_dim": config.integer("v_head_dim"),
        "num_dense": config.integer("first_k_dense_replace", 0),
        "dense_dim": config.integer("intermediate_size"),
        "expert_dim": config.integer("moe_intermediate_size", 0),
        "num_experts": config.integer("num_experts", 0),
        "num_chosen": config.integer("num_experts_per_token", 0),
        "num_shared": config.integer("num_shared_experts", 0),
        "expert_scale": config.number("routed_scaling_factor", 1.0),
        "normalise": bool(config.get("moe_renormalize", True)),
        "eps": config.number("rms_norm_eps"),
        "l2_eps": 1e-6,
    }
