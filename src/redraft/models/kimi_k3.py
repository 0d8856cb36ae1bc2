"""Kimi K3: Kimi-Linear's blocks with a bounded decay, gated latent attention, latent experts, SiTU
everywhere, and attention residuals: each block reads a learned mixture of earlier residual streams.
"""

from __future__ import annotations

from dataclasses import dataclass

from redraft.config import ComputeType
from redraft.models.kimi_blocks import delta_block, feed_forward, latent_block
from redraft.models.kimi_names import recipes_of_blocks
from redraft.models.kimi_spec import KimiLinearSpec, gguf_fields, hf_fields
from redraft.models.layers import GatedMLP, KimiDeltaAttention, LatentAttention, MixtureOfExperts
from redraft.models.metadata import Metadata
from redraft.models.spec import StateView
from redraft.models.weights import Recipe, TensorSource, Weights, elementwise
from redraft.ops import Activation, Array, IntArray, Ops, RMSNorm

GGUF_ARCHITECTURE = "kimi-k3"
HF_MODEL_TYPES = ("kimi_k3",)
IGNORED_HF_PREFIXES = ("vision_tower.", "mm_projector.")  # text only


@dataclass(frozen=True, kw_only=True)
class KimiK3Spec(KimiLinearSpec):
    """Kimi K3 in numbers: a residual stream is banked before every `block_size`-th layer."""

    block_size: int


def spec_from_gguf(meta: Metadata) -> KimiK3Spec:
    """Read a GGUF file's description."""
    fields = gguf_fields(meta) | {"latent_dim": meta.integer("expert_latent_length", 0)}
    activation = Activation(
        "situ", meta.number("activation.situ_beta"), meta.number("activation.situ_linear_beta", 0.0)
    )
    return KimiK3Spec(
        model_type="kimi_k3", activation=activation, block_size=meta.integer("attn_res.block_size"), **fields
    )


def spec_from_hf(config: Metadata) -> KimiK3Spec:
    """Read a config.json; the text model's part where the file describes a larger one."""
    config = Metadata(config.get("text_config", config.values))
    config.require("hidden_act", "situ")
    fields = hf_fields(config) | {"latent_dim": config.get("routed_expert_hidden_size", None) or 0}
    activation = Activation(
        "situ", config.number("activation_situ_beta"), config.number("activation_situ_linear_beta", 0.0)
    )
    return KimiK3Spec(
        model_type="kimi_k3",
        activation=activation,
        block_size=config.integer("attn_res_block_size"),
        **fields,
    )


def hf_recipes(spec: KimiK3Spec, names: set[str]) -> dict[str, Recipe]:
    """Canonical names; a score weight is the product of a norm's weight and a projection."""
    recipes = recipes_of_blocks(spec, names)
    root = "language_model." if any(name.startswith("language_model.") for name in names) else ""
    pairs = {"output_res_score.weight": f"{root}model.output_attn_res"}
    for i in range(len(spec.layers)):
        pairs[f"blk.{i}.attn_res_score.weight"] = f"{root}model.layers.{i}.self_attention_res"
        pairs[f"blk.{i}.ffn_res_score.weight"] = f"{root}model.layers.{i}.mlp_res"
    product = elementwise(lambda norm, proj: norm * proj)
    return recipes | {
        name: Recipe((f"{old}_norm.weight", f"{old}_proj.weight"), product) for name, old in pairs.items()
    }


@dataclass(frozen=True)
class _Layer:
    attention_mix: Array  # [D]
    attention_norm: RMSNorm
    attention: KimiDeltaAttention | LatentAttention
    ffn_mix: Array  # [D]
    ffn_norm: RMSNorm
    ffn: GatedMLP | MixtureOfExperts


class KimiK3:
    """The model."""

    def __init__(self, spec: KimiK3Spec, source: TensorSource, ops: Ops, compute: ComputeType) -> None:
        w = Weights(source, ops, compute)
        hidden = spec.hidden_size
        self.spec = spec
        self._ops = ops
        self._embedding = w.matrix("token_embd.weight", spec.vocab_size, hidden)
        self._layers = [
            _Layer(
                w.array(f"blk.{i}.attn_res_score.weight", hidden),
                RMSNorm(w.array(f"blk.{i}.attn_norm.weight", hidden), spec.eps),
                (delta_block if layer.recurrent else latent_block)(spec, w, ops, i),
                w.array(f"blk.{i}.ffn_res_score.weight", hidden),
                RMSNorm(w.array(f"blk.{i}.ffn_norm.weight", hidden), spec.eps),
                feed_forward(spec, w, ops, i),
            )
            for i, layer in enumerate(spec.layers)
        ]
        self._output_mix = w.array("output_res_score.weight", hidden)
        self._norm = RMSNorm(w.array("output_norm.weight", hidden), spec.eps)
        self._output = w.output(spec.vocab_size, hidden, self._embedding)
        w.finish()
        self.weight_bytes = w.num_bytes

    def forward(self, tokens: IntArray, view: StateView, rows: IntArray) -> Array:
        """Run tokens [B] → logits [len(rows), vocab] of the chosen rows."""
        stream = self._ops.embed(self._embedding, tokens)  # [B, D], the sum since the last banking
        bank: list[Array] = []
        for i, layer in enumerate(self._layers):
            x = self._mix(bank, stream, layer.attention_mix, layer.attention_norm)
            if i % self.spec.block_size == 0:
                bank.append(stream)
                stream = layer.attention(x, view)
            else:
                stream = layer.attention(x, view, residual=stream)
            x = self._mix(bank, stream, layer.ffn_mix, layer.ffn_norm)
            stream = layer.ffn(x, residual=stream)
        bank, stream = [banked[rows] for banked in bank], stream[rows]
        return self._output(self._mix(bank, stream, self._output_mix, self._norm))

    def _mix(self, bank: list[Array], stream: Array, score_weight: Array, norm: RMSNorm) -> Array:
        if not bank:
            return self._ops.rms_norm(stream, norm)
        return self._ops.mix_streams([*bank, stream], score_weight, self.spec.eps, norm)


def build(spec: KimiK3Spec, source: TensorSource, ops: Ops, compute: ComputeType) -> KimiK3:
    """Load a model."""
    return KimiK3(spec, source, ops, compute)
