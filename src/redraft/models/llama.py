"""Llama and its like (SmolLM2): grouped-query attention with rotary positions, and a SwiGLU MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from redraft.config import ComputeType
from redraft.errors import ModelFileError
from redraft.models.layers import GatedMLP, GroupedQueryAttention
from redraft.models.metadata import Metadata
from redraft.models.spec import AttentionSpec, LayerSpec, ModelSpec, StateView
from redraft.models.weights import Recipe, TensorSource, Weights
from redraft.ops import SWIGLU, Array, IntArray, Ops, RMSNorm

GGUF_ARCHITECTURE = "llama"
HF_MODEL_TYPES = ("llama",)


@dataclass(frozen=True, kw_only=True)
class LlamaSpec(ModelSpec):
    """Llama in numbers. `interleaved`: the file pairs rotary channels (2i, 2i+1), as GGUF does."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    inner_dim: int
    rope_base: float
    rope_divisors: tuple[float, ...] = ()
    eps: float
    interleaved: bool


def _layers(num_layers: int, num_kv_heads: int, head_dim: int) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention=AttentionSpec(num_kv_heads, head_dim, head_dim)),) * num_layers


def spec_from_gguf(meta: Metadata) -> LlamaSpec:
    """Read a GGUF file's description."""
    if meta.integer("expert_count", 0):
        raise ModelFileError("llama models with experts are not supported; dense ones are")
    if meta.number("rope.scaling.factor", 0.0) not in (0.0, 1.0):
        raise ModelFileError(
            "rotary scaling by a factor is not supported for llama models; use an unscaled file"
        )
    num_layers, num_heads = meta.integer("block_count"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", meta.integer("embedding_length") // num_heads)
    meta.require("attention.value_length", head_dim, head_dim)
    num_kv_heads = meta.integer("attention.head_count_kv", num_heads)
    return LlamaSpec(
        model_type="llama",
        vocab_size=meta.integer("vocab_size"),
        hidden_size=meta.integer("embedding_length"),
        max_context=meta.integer("context_length"),
        layers=_layers(num_layers, num_kv_heads, head_dim),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=meta.integer("rope.dimension_count", head_dim),
        inner_dim=meta.integer("feed_forward_length"),
        rope_base=meta.number("rope.freq_base", 10000.0),
        eps=meta.number("attention.layer_norm_rms_epsilon"),
        interleaved=True,
    )


def spec_from_hf(config: Metadata) -> LlamaSpec:
    """Read a config.json, in which rotary settings stand at the top or, in newer files, under
    `rope_parameters`.
    """
    config.require("hidden_act", "silu")
    rope: dict[str, Any] = config.get("rope_parameters", None) or config.get("rope_scaling", None) or {}
    base = float(rope.get("rope_theta") or config.number("rope_theta", 10000.0))
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", config.integer("hidden_size") // num_heads)
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    return LlamaSpec(
        model_type="llama",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_context=config.integer("max_position_embeddings"),
        layers=_layers(config.integer("num_hidden_layers"), num_kv_heads, head_dim),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        inner_dim=config.integer("intermediate_size"),
        rope_base=base,
        rope_divisors=_llama3_divisors(rope, base, head_dim),
        eps=config.number("rms_norm_eps"),
        interleaved=False,
    )


def _llama3_divisors(rope: dict[str, Any], base: float, rotary_dim: int) -> tuple[float, ...]:
    """What each rotary frequency is divided by under Llama 3's scaling: 1 for short waves, `factor` for long
    ones.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    if kind != "llama3":
        raise ModelFileError(
            f"rotary scaling '{kind}' is not supported for llama models; 'default' and 'llama3' are"
        )
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(rope["original_max_position_embeddings"])
    divisors = []
    for i in range(rotary_dim // 2):
        turns = context * base ** (-2 * i / rotary_dim) / (2 * math.pi)  # of this channel within the context
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(divisors)


def hf_recipes(spec: LlamaSpec, names: set[str]) -> dict[str, Recipe]:  # noqa: ARG001
    """Canonical names from those of a Hugging Face checkpoint."""
    recipes = {
        "token_embd.weight": Recipe(("model.embed_tokens.weight",)),
        "output_norm.weight": Recipe(("model.norm.weight",)),
        "output.weight": Recipe(("lm_head.weight",)),
    }
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for i in range(len(spec.layers)):
        for new, old in parts.items():
            for kind in ("weight", "bias"):
                recipes[f"blk.{i}.{new}.{kind}"] = Recipe((f"model.layers.{i}.{old}.{kind}",))
    return recipes


@dataclass(frozen=True)
class _Layer:
    attention_norm: RMSNorm
    attention: GroupedQueryAttention
    ffn_norm: RMSNorm
    ffn: GatedMLP


class Llama:
    """The model."""

    def __init__(self, spec: LlamaSpec, source: TensorSource, ops: Ops, compute: ComputeType) -> None:
        w = Weights(source, ops, compute)
        self.spec = spec
        self._ops = ops
        self._embedding = w.matrix("token_embd.weight", spec.vocab_size, spec.hidden_size)
        inv_freq = self._inverse_frequencies(w)
        self._layers = [self._layer(w, i, inv_freq) for i in range(len(spec.layers))]
        self._norm = RMSNorm(w.array("output_norm.weight", spec.hidden_size), spec.eps)
        self._output = w.output(spec.vocab_size, spec.hidden_size, self._embedding)
        w.finish()
        self.weight_bytes = w.num_bytes

    def _inverse_frequencies(self, w: Weights) -> Array:
        rotary = self.spec.rotary_dim
        frequencies = self.spec.rope_base ** (-np.arange(0, rotary, 2) / rotary)
        divisors = w.optional("rope_freqs.weight", rotary // 2)
        if divisors is None and self.spec.rope_divisors:
            divisors = np.array(self.spec.rope_divisors)
        return np.asarray(frequencies if divisors is None else frequencies / divisors)

    def _layer(self, w: Weights, i: int, inv_freq: Array) -> _Layer:
        spec, ops, name = self.spec, self._ops, f"blk.{i}"
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        return _Layer(
            RMSNorm(w.array(f"{name}.attn_norm.weight", spec.hidden_size), spec.eps),
            GroupedQueryAttention(
                i,
                qkv=w.parallel(
                    [f"{name}.attn_{part}" for part in "qkv"],
                    [queries, keys, keys],
                    spec.hidden_size,
                    row_orders=[self._row_order(spec.num_heads), self._row_order(spec.num_kv_heads), None],
                ),
                out=w.linear(f"{name}.attn_output", spec.hidden_size, queries),
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                inv_freq=inv_freq,
            ),
            RMSNorm(w.array(f"{name}.ffn_norm.weight", spec.hidden_size), spec.eps),
            GatedMLP(
                ops,
                gate_up=w.parallel(
                    [f"{name}.ffn_gate", f"{name}.ffn_up"],
                    [spec.inner_dim] * 2,
                    spec.hidden_size,
                    scaled_bias=True,
                ),
                down=w.linear(f"{name}.ffn_down", spec.hidden_size, spec.inner_dim, scaled_bias=True),
                activation=SWIGLU,
            ),
        )

    def _row_order(self, num_heads: int) -> Array | None:
        """Rows from pairs (2i, 2i+1) to halves (i, i + R/2), head by head: scores do not change."""
        if not self.spec.interleaved:
            return None
        head = np.arange(self.spec.head_dim)
        rotary = head[: self.spec.rotary_dim].reshape(-1, 2).T.ravel()
        head = np.concatenate([rotary, head[self.spec.rotary_dim :]])
        return np.asarray((np.arange(num_heads)[:, None] * self.spec.head_dim + head).ravel())

    def forward(self, tokens: IntArray, view: StateView, rows: IntArray) -> Array:
        """Run tokens [B] → logits [len(rows), vocab] of the chosen rows."""
        x = self._ops.embed(self._embedding, tokens)  # [B, D]
        for layer in self._layers:
            x = layer.attention(x, view, norm=layer.attention_norm, residual=x)
            x = layer.ffn(x, norm=layer.ffn_norm, residual=x)
        return self._output(x[rows], norm=self._norm)


def build(spec: LlamaSpec, source: TensorSource, ops: Ops, compute: ComputeType) -> Llama:
    """Load a model."""
    return Llama(spec, source, ops, compute)
