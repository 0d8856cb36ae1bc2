"""The blocks of the Kimi families, made of a file's weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from redraft.models.kimi_spec import KimiLinearSpec
from redraft.models.layers import (
    GatedMLP,
    KimiDeltaAttention,
    Latent,
    LatentAttention,
    MixtureOfExperts,
    Routing,
)
from redraft.models.weights import Weights
from redraft.ops import Array, KDAConstants, Ops, RMSNorm


def delta_block(spec: KimiLinearSpec, w: Weights, ops: Ops, layer: int) -> KimiDeltaAttention:
    """The KDA block of one layer; its gate is full-rank or through a bottleneck, as the file has it."""
    name, hidden, heads, dim = f"blk.{layer}", spec.hidden_size, spec.delta_heads, spec.delta_dim
    inner = heads * dim
    recurrent = spec.layers[layer].recurrent
    assert recurrent is not None, "a KDA layer has a recurrent spec"
    full_gate = w.has(f"{name}.ssm_g.weight")
    gate, gate_dim = ("ssm_g", inner) if full_gate else ("ssm_g_a", dim)
    inputs = w.parallel(
        [f"{name}.{part}" for part in ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_beta", gate)],
        [inner, inner, inner, dim, heads, gate_dim],
        hidden,
        outputs=[3 * inner, dim, heads, gate_dim],
    )
    convs = [w.array(f"{name}.ssm_conv1d_{part}.weight", inner, recurrent.conv_width) for part in "qkv"]
    return KimiDeltaAttention(
        ops,
        layer,
        inputs=inputs,
        conv=np.ascontiguousarray(np.concatenate(convs).T),
        decay_up=replace(w.linear(f"{name}.ssm_f_b", inner, dim), bias=w.array(f"{name}.ssm_dt.bias", inner)),
        gate_up=None if full_gate else w.linear(f"{name}.ssm_g_b", inner, dim),
        constants=KDAConstants(w.array(f"{name}.ssm_a", heads), spec.lower_bound, spec.l2_eps),
        norm=RMSNorm(w.array(f"{name}.ssm_norm.weight", dim), spec.eps),
        out=w.linear(f"{name}.attn_output", hidden, inner),
    )


def latent_block(spec: KimiLinearSpec, w: Weights, ops: Ops, layer: int) -> LatentAttention:
    """The latent-attention block of one layer, absorbed; the file has W_kb and W_vb apart or as one W_kvb."""
    name, hidden, heads = f"blk.{layer}", spec.hidden_size, spec.num_heads
    query_dim, rank = spec.nope_dim + spec.rope_dim, spec.q_rank
    is_gated = w.has(f"{name}.attn_gate.weight")
    parts = {
        "attn_q_a" if rank else "attn_q": rank or heads * query_dim,
        "attn_kv_a_mqa": spec.kv_rank + spec.rope_dim,
    } | ({"attn_gate": heads * spec.value_dim} if is_gated else {})
    k_up, v_up = _key_value_up(spec, w, name)
    return LatentAttention(
        ops,
        layer,
        inputs=w.parallel([f"{name}.{part}" for part in parts], list(parts.values()), hidden),
        q_up=w.linear(f"{name}.attn_q_b", heads * query_dim, rank) if rank else None,
        q_norm=RMSNorm(w.array(f"{name}.attn_q_a_norm.weight", rank), spec.eps) if rank else None,
        kv_norm=RMSNorm(w.array(f"{name}.attn_kv_a_norm.weight", spec.kv_rank), spec.eps),
        k_up=k_up,
        v_up=v_up,
        is_gated=is_gated,
        out=w.linear(f"{name}.attn_output", hidden, heads * spec.value_dim),
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
            RMSNorm(w.array(f"{name}.ffn_routed_norm.weight", width), spec.eps),
        )
    return MixtureOfExperts(
        ops,
        routing=Routing(
            w.linear(f"{name}.ffn_gate_inp", experts, spec.hidden_size),
            w.optional(f"{name}.exp_probs_b.bias", experts),
            spec.num_chosen,
            spec.expert_scale,
            spec.normalise,
        ),
        experts=(
            w.matrix(f"{name}.ffn_gate_exps.weight", experts, inner, width),
            w.matrix(f"{name}.ffn_up_exps.weight", experts, inner, width),
            w.matrix(f"{name}.ffn_down_exps.weight", experts, width, inner),
        ),
        shared=_mlp(spec, w, ops, name, suffix="_shexp", inner=inner * spec.num_shared)
        if spec.num_shared
        else None,
        latent=latent,
        activation=spec.activation,
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
