"""Kimi-Linear: Kimi Delta Attention beside latent attention without positions, and routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from redraft.config import ComputeType
from redraft.models.kimi_blocks import delta_block, feed_forward, latent_block
from redraft.models.kimi_names import recipes_of_blocks
from redraft.models.kimi_spec import KimiLinearSpec, gguf_fields, hf_fields
from redraft.models.layers import GatedMLP, KimiDeltaAttention, LatentAttention, MixtureOfExperts
from redraft.models.metadata import Metadata
from redraft.models.spec import StateView
from redraft.models.weights import TensorSource, Weights
from redraft.ops import Array, IntArray, Ops, RMSNorm

GGUF_ARCHITECTURE = "kimi-linear"
HF_MODEL_TYPES = ("kimi_linear",)
hf_recipes = recipes_of_blocks


def spec_from_gguf(meta: Metadata) -> KimiLinearSpec:
    """Read a GGUF file's description."""
    return KimiLinearSpec(model_type="kimi_linear", **gguf_fields(meta))


def spec_from_hf(config: Metadata) -> KimiLinearSpec:
    """Read a config.json."""
    config.require("hidden_act", "silu")
    return KimiLinearSpec(model_type="kimi_linear", **hf_fields(config))


@dataclass(frozen=True)
class _Layer:
    attention_norm: RMSNorm
    attention: KimiDeltaAttention | LatentAttention
    ffn_norm: RMSNorm
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
                RMSNorm(w.array(f"blk.{i}.attn_norm.weight", spec.hidden_size), spec.eps),
                delta_block(spec, w, ops, i) if layer.recurrent else latent_block(spec, w, ops, i),
                RMSNorm(w.array(f"blk.{i}.ffn_norm.weight", spec.hidden_size), spec.eps),
                feed_forward(spec, w, ops, i),
            )
            for i, layer in enumerate(spec.layers)
        ]
        self._norm = RMSNorm(w.array("output_norm.weight", spec.hidden_size), spec.eps)
        self._output = w.output(spec.vocab_size, spec.hidden_size, self._embedding)
        w.finish()
        self.weight_bytes = w.num_bytes

    def forward(self, tokens: IntArray, view: StateView, rows: IntArray) -> Array:
        """Run tokens [B] → logits [len(rows), vocab] of the chosen rows."""
        x = self._ops.embed(self._embedding, tokens)  # [B, D]
        for layer in self._layers:
            x = layer.attention(x, view, norm=layer.attention_norm, residual=x)
            x = layer.ffn(x, norm=layer.ffn_norm, residual=x)
        return self._output(x[rows], norm=self._norm)


def build(spec: KimiLinearSpec, source: TensorSource, ops: Ops, compute: ComputeType) -> KimiLinear:
    """Load a model."""
    return KimiLinear(spec, source, ops, compute)
