"""Kimi-Linear: Kimi Delta Attention beside latent attention without positions, and routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.config import ComputeType
from redraft.errors import ModelFileError
from redraft.models.layers import (
    GatedMLP,
    KimiDeltaAttention,
    Latent,
    LatentAttention,
    Linear,
    LowRank,
    MixtureOfExperts,
    Norm,
)
from redraft.models.metadata import Metadata
from redraft.models.spec import AttentionSpec, LayerSpec, ModelSpec, RecurrentSpec, StateView
from redraft.models.weights import Recipe, TensorSource, Weights, elementwise, stacked
from redraft.ops import SWIGLU, Activation, Array, IntArray, Ops

GGUF_ARCHITECTURE = "kimi-linear"
HF_MODEL_TYPES = ("kimi_linear",)


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


def spec_from_gguf(meta: Metadata) -> KimiLinearSpec:
    """Read a GGUF file's description."""
    return KimiLinearSpec(model_type="kimi_linear", **gguf_fields(meta))


def spec_from_hf(config: Metadata) -> KimiLinearSpec:
    """Read a config.json."""
    config.require("hidden_act", "silu")
    return KimiLinearSpec(model_type="kimi_linear", **hf_fields(config))


def hf_recipes(spec: KimiLinearSpec, names: set[str]) -> dict[str, Recipe]:
    """Canonical names from those of a Hugging Face checkpoint that has `names`."""
    root = "language_model." if any(name.startswith("language_model.") for name in names) else ""
    recipes = {
        "token_embd.weight": Recipe((f"{root}model.embed_tokens.weight",)),
        "output_norm.weight": Recipe((f"{root}model.norm.weight",)),
        "output.weight": Recipe((f"{root}lm_head.weight",)),
    }
    attention = {
        "attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj",
        "ssm_f_a": "f_a_proj", "ssm_f_b": "f_b_proj", "ssm_beta": "b_proj", "ssm_norm": "o_norm",
        "ssm_conv1d_q": "q_conv1d", "ssm_conv1d_k": "k_conv1d", "ssm_conv1d_v": "v_conv1d",
        "ssm_g_a": "g_a_proj", "ssm_g_b": "g_b_proj",
        "attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj",
        "attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm", "attn_kv_b": "kv_b_proj",
    }  # fmt: skip
    for i, layer in enumerate(spec.layers):
        new, old = f"blk.{i}", f"{root}model.layers.{i}"
        for name, part in attention.items():
            recipes[f"{new}.{name}.weight"] = Recipe((f"{old}.self_attn.{part}.weight",))
        gate = "ssm_g" if layer.recurrent else "attn_gate"
        recipes[f"{new}.{gate}.weight"] = Recipe((f"{old}.self_attn.g_proj.weight",))
        recipes[f"{new}.ssm_dt.bias"] = Recipe((f"{old}.self_attn.dt_bias",))
        recipes[f"{new}.ssm_a"] = Recipe((f"{old}.self_attn.A_log",), elementwise(lambda a: -np.exp(a)))
        recipes[f"{new}.attn_norm.weight"] = Recipe((f"{old}.input_layernorm.weight",))
        recipes[f"{new}.ffn_norm.weight"] = Recipe((f"{old}.post_attention_layernorm.weight",))
        recipes |= (
            _hf_dense(new, old, names) if i < spec.num_dense else _hf_sparse(new, old, spec.num_experts)
        )
    return recipes


def _hf_dense(new: str, old: str, names: set[str]) -> dict[str, Recipe]:
    older = f"{old}.mlp.gate_proj.weight" in names
    block = f"{old}.mlp" if older else f"{old}.block_sparse_moe"
    return {
        f"{new}.ffn_{part}.weight": Recipe((f"{block}.{part}_proj.weight",))
        for part in ("gate", "up", "down")
    }


def _hf_sparse(new: str, old: str, num_experts: int) -> dict[str, Recipe]:
    moe = f"{old}.block_sparse_moe"
    recipes = {
        f"{new}.ffn_gate_inp.weight": Recipe((f"{moe}.gate.weight",)),
        f"{new}.exp_probs_b.bias": Recipe((f"{moe}.gate.e_score_correction_bias",)),
        f"{new}.ffn_routed_down.weight": Recipe((f"{moe}.routed_expert_down_proj.weight",)),
        f"{new}.ffn_routed_up.weight": Recipe((f"{moe}.routed_expert_up_proj.weight",)),
        f"{new}.ffn_routed_norm.weight": Recipe((f"{moe}.routed_expert_norm.weight",)),
    }
    for part, w in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        experts = tuple(f"{moe}.experts.{e}.{w}.weight" for e in range(num_experts))
        recipes[f"{new}.ffn_{part}_exps.weight"] = Recipe(experts, stacked)
        recipes[f"{new}.ffn_{part}_shexp.weight"] = Recipe((f"{moe}.shared_experts.{part}_proj.weight",))
    return recipes


def delta_block(spec: KimiLinearSpec, w: Weights, ops: Ops, layer: int) -> KimiDeltaAttention:
    """The KDA block of one layer; its gate is full-rank or through a bottleneck, as the file has it."""
    name, hidden, inner, dim = (
        f"blk.{layer}",
        spec.hidden_size,
        spec.delta_heads * spec.delta_dim,
        spec.delta_dim,
    )
    recurrent = spec.layers[layer].recurrent
    assert recurrent is not None, "a KDA layer has a recurrent spec"
    convs = [w.array(f"{name}.ssm_conv1d_{part}.weight", inner, recurrent.conv_width) for part in "qkv"]
    return KimiDeltaAttention(
        ops,
        layer,
        qkv=w.parallel([f"{name}.attn_{part}" for part in "qkv"], [inner] * 3, hidden),
        conv=np.concatenate(convs),
        decay=LowRank(w.linear(f"{name}.ssm_f_a", dim, hidden), w.linear(f"{name}.ssm_f_b", inner, dim)),
        dt_bias=w.array(f"{name}.ssm_dt.bias", inner),
        neg_exp_a=w.array(f"{name}.ssm_a", spec.delta_heads),
        lower_bound=spec.lower_bound,
        beta=w.linear(f"{name}.ssm_beta", spec.delta_heads, hidden),
        gate=_delta_gate(w, name, hidden, inner, dim),
        norm=Norm(ops, w.array(f"{name}.ssm_norm.weight", dim), spec.eps),
        out=w.linear(f"{name}.attn_output", hidden, inner),
        head_dim=dim,
        l2_eps=spec.l2_eps,
    )


def _delta_gate(w: Weights, name: str, hidden: int, inner: int, dim: int) -> Linear | LowRank:
    if w.has(f"{name}.ssm_g.weight"):
        return w.linear(f"{name}.ssm_g", inner, hidden)
    return LowRank(w.linear(f"{name}.ssm_g_a", dim, hidden), w.linear(f"{name}.ssm_g_b", inner, dim))


def latent_block(spec: KimiLinearSpec, w: Weights, ops: Ops, layer: int) -> LatentAttention:
    """The latent-attention block of one layer, absorbed; the file has W_kb and W_vb apart or as one W_kvb."""
    name, hidden, heads = f"blk.{layer}", spec.hidden_size, spec.num_heads
    query_dim = spec.nope_dim + spec.rope_dim
    queries = heads * query_dim
    k_up, v_up = _key_value_up(spec, w, name)
    low_rank = spec.q_rank > 0
    return LatentAttention(
        ops,
        layer,
        q=None if low_rank else w.linear(f"{name}.attn_q", queries, hidden),
        q_down=w.linear(f"{name}.attn_q_a", spec.q_rank, hidden) if low_rank else None,
        q_norm=Norm(ops, w.array(f"{name}.attn_q_a_norm.weight", spec.q_rank), spec.eps)
        if low_rank
        else None,
        q_up=w.linear(f"{name}.attn_q_b", queries, spec.q_rank) if low_rank else None,
        kv_down=w.linear(f"{name}.attn_kv_a_mqa", spec.kv_rank + spec.rope_dim, hidden),
        kv_norm=Norm(ops, w.array(f"{name}.attn_kv_a_norm.weight", spec.kv_rank), spec.eps),
        k_up=k_up,
        v_up=v_up,
        gate=w.linear(f"{name}.attn_gate", heads * spec.value_dim, hidden)
        if w.has(f"{name}.attn_gate.weight")
        else None,
        out=w.linear(f"{name}.attn_output", hidden, heads * spec.value_dim),
        num_heads=heads,
        nope_dim=spec.nope_dim,
        scale=query_dim**-0.5,
    )


def _key_value_up(spec: KimiLinearSpec, w: Weights, name: str) -> tuple[Array, Array]:
    heads, nope, value, rank = spec.num_heads, spec.nope_dim, spec.value_dim, spec.kv_rank
    if not w.has(f"{name}.attn_kv_b.weight"):
        k_up = w.array(f"{name}.attn_k_b.weight", heads, rank, nope)
        return k_up, w.array(f"{name}.attn_v_b.weight", heads, value, rank)
    both = w.array(f"{name}.attn_kv_b.weight", heads * (nope + value), rank).reshape(
        heads, nope + value, rank
    )
    return np.ascontiguousarray(both[:, :nope].transpose(0, 2, 1)), np.ascontiguousarray(both[:, nope:])


def feed_forward(spec: KimiLinearSpec, w: Weights, ops: Ops, layer: int) -> GatedMLP | MixtureOfExperts:
    """The dense MLP of the first layers, or a mixture of experts."""
    name = f"blk.{layer}"
    if layer < spec.num_dense:
        return _mlp(spec, w, ops, name, suffix="", inner=spec.dense_dim)
    width = spec.latent_dim or spec.hidden_size
    experts, inner = spec.num_experts, spec.expert_dim
    latent = None
    if spec.latent_dim:
        latent = Latent(
            w.linear(f"{name}.ffn_routed_down", width, spec.hidden_size),
            w.linear(f"{name}.ffn_routed_up", spec.hidden_size, width),
            Norm(ops, w.array(f"{name}.ffn_routed_norm.weight", width), spec.eps),
        )
    return MixtureOfExperts(
        ops,
        router=w.linear(f"{name}.ffn_gate_inp", experts, spec.hidden_size),
        router_bias=w.optional(f"{name}.exp_probs_b.bias", experts),
        gate=w.matrix(f"{name}.ffn_gate_exps.weight", experts, inner, width),
        up=w.matrix(f"{name}.ffn_up_exps.weight", experts, inner, width),
        down=w.matrix(f"{name}.ffn_down_exps.weight", experts, width, inner),
        shared=_mlp(spec, w, ops, name, suffix="_shexp", inner=inner * spec.num_shared)
        if spec.num_shared
        else None,
        latent=latent,
        activation=spec.activation,
        top_k=spec.num_chosen,
        scale=spec.expert_scale,
        normalise=spec.normalise,
    )


def _mlp(spec: KimiLinearSpec, w: Weights, ops: Ops, name: str, *, suffix: str, inner: int) -> GatedMLP:
    return GatedMLP(
        ops,
        gate_up=w.parallel(
            [f"{name}.ffn_gate{suffix}", f"{name}.ffn_up{suffix}"],
            [inner] * 2,
            spec.hidden_size,
            scaled_bias=True,
        ),
        down=w.linear(f"{name}.ffn_down{suffix}", spec.hidden_size, inner, scaled_bias=True),
        activation=spec.activation,
    )


@dataclass(frozen=True)
class _Layer:
    attention_norm: Norm
    attention: KimiDeltaAttention | LatentAttention
    ffn_norm: Norm
    ffn: GatedMLP | MixtureOfExperts


class KimiLinear:
    """The model."""

    def __init__(self, spec: KimiLinearSpec, source: TensorSource, ops: Ops, compute: ComputeType) -> None:
        w = Weights(source, ops, compute)
        self.spec = spec
        self._ops = ops
        self._embedding = w.matrix("token_embd.weight", spec.vocab_size, spec.hidden_size)
        self._layers = [
            _Layer(
                Norm(ops, w.array(f"blk.{i}.attn_norm.weight", spec.hidden_size), spec.eps),
                delta_block(spec, w, ops, i) if layer.recurrent else latent_block(spec, w, ops, i),
                Norm(ops, w.array(f"blk.{i}.ffn_norm.weight", spec.hidden_size), spec.eps),
                feed_forward(spec, w, ops, i),
            )
            for i, layer in enumerate(spec.layers)
        ]
        self._norm = Norm(ops, w.array("output_norm.weight", spec.hidden_size), spec.eps)
        self._output = output_matrix(spec, w, ops, self._embedding)
        w.finish()
        self.weight_bytes = w.num_bytes

    def forward(self, tokens: IntArray, view: StateView, rows: IntArray) -> Array:
        """Run tokens [B] → logits [len(rows), vocab] of the chosen rows."""
        x = self._ops.embed(self._embedding, tokens)  # [B, D]
        for layer in self._layers:
            x = x + layer.attention(layer.attention_norm(x), view)
            x = x + layer.ffn(layer.ffn_norm(x))
        return self._output(self._norm(x[rows]))


def output_matrix(spec: ModelSpec, w: Weights, ops: Ops, embedding: Any) -> Linear:
    """The output matrix, or the embedding again where the file has none."""
    if w.has("output.weight"):
        return w.linear("output", spec.vocab_size, spec.hidden_size)
    return Linear(ops, embedding)


def build(spec: KimiLinearSpec, source: TensorSource, ops: Ops, compute: ComputeType) -> KimiLinear:
    """Load a model."""
    return KimiLinear(spec, source, ops, compute)
