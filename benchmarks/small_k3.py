"""A small Kimi K3 of random weights, under the names of a Hugging Face checkpoint: about 8 M parameters in
six layers of width 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from redraft import ops
from redraft.models import Model, kimi_k3
from redraft.models.metadata import Metadata
from redraft.models.weights import Renamed
from redraft.ops.raw import RawTensor

HIDDEN, HEADS, DIM, WIDTH, LAYERS = 256, 4, 64, 4, 6
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 96, 64, 64, 32, 64
DENSE, EXPERT, EXPERTS, CHOSEN, LATENT = 1024, 128, 8, 2, 192
VOCAB, FULL = 2048, (3, 5)  # layers with attention, counted from 0

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "model_max_length": 4096, "num_attention_heads": HEADS, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "mla_use_nope": True,
    "linear_attn_config": {
        "full_attn_layers": [layer + 1 for layer in FULL], "num_heads": HEADS, "head_dim": DIM,
        "short_conv_kernel_size": WIDTH, "gate_lower_bound": -5.0,
    },
    "first_k_dense_replace": 1, "intermediate_size": DENSE, "moe_intermediate_size": EXPERT,
    "num_experts": EXPERTS, "num_experts_per_token": CHOSEN, "num_shared_experts": 1,
    "routed_scaling_factor": 1.5, "moe_renormalize": True, "rms_norm_eps": 1e-5, "hidden_act": "situ",
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 2,
    "routed_expert_hidden_size": LATENT,
}  # fmt: skip


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    yield from _mix("model.output_attn_res")
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (HIDDEN,)
        yield from _mix(f"{layer}.self_attention_res")
        yield from _mix(f"{layer}.mlp_res")
        yield from (_latent if i in FULL else _delta)(f"{layer}.self_attn")
        yield from _mlp(f"{layer}.mlp", DENSE) if i == 0 else _mixture(f"{layer}.block_sparse_moe")


def _mix(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}_norm.weight", (HIDDEN,)
    yield f"{name}_proj.weight", (1, HIDDEN)


def _delta(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = HEADS * DIM
    for part in "qkv":
        yield f"{name}.{part}_proj.weight", (inner, HIDDEN)
        yield f"{name}.{part}_conv1d.weight", (inner, 1, WIDTH)
    yield f"{name}.f_a_proj.weight", (DIM, HIDDEN)
    yield f"{name}.f_b_proj.weight", (inner, DIM)
    yield f"{name}.b_proj.weight", (HEADS, HIDDEN)
    yield f"{name}.A_log", (1, 1, HEADS, 1)
    yield f"{name}.dt_bias", (inner,)
    yield f"{name}.g_proj.weight", (inner, HIDDEN)
    yield f"{name}.o_norm.weight", (DIM,)
    yield f"{name}.o_proj.weight", (HIDDEN, inner)


def _latent(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.q_a_proj.weight", (Q_RANK, HIDDEN)
    yield f"{name}.q_a_layernorm.weight", (Q_RANK,)
    yield f"{name}.q_b_proj.weight", (HEADS * (NOPE + ROPE), Q_RANK)
    yield f"{name}.kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, HIDDEN)
    yield f"{name}.kv_a_layernorm.weight", (KV_RANK,)
    yield f"{name}.kv_b_proj.weight", (HEADS * (NOPE + VALUE), KV_RANK)
    yield f"{name}.g_proj.weight", (HEADS * VALUE, HIDDEN)
    yield f"{name}.o_proj.weight", (HIDDEN, HEADS * VALUE)


def _mixture(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{name}.gate.e_score_correction_bias", (EXPERTS,)
    for e in range(EXPERTS):
        for w, shape in (("w1", (EXPERT, LATENT)), ("w2", (LATENT, EXPERT)), ("w3", (EXPERT, LATENT))):
            yield f"{name}.experts.{e}.{w}.weight", shape
    yield f"{name}.routed_expert_down_proj.weight", (LATENT, HIDDEN)
    yield f"{name}.routed_expert_up_proj.weight", (HIDDEN, LATENT)
    yield f"{name}.routed_expert_norm.weight", (LATENT,)
    yield from _mlp(f"{name}.shared_experts", EXPERT)


def _mlp(name: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("gate", "up"):
        yield f"{name}.{part}_proj.weight", (inner, HIDDEN)
    yield f"{name}.down_proj.weight", (HIDDEN, inner)


class RandomTensors:
    """Matrices in BF16 that keep the size of their input; all else in float32."""

    def __init__(self) -> None:
        self._shapes = dict(_shapes())

    def names(self) -> set[str]:
        return set(self._shapes)

    def read(self, name: str) -> RawTensor:
        shape = self._shapes[name]
        rng = np.random.default_rng(list(self._shapes).index(name))
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        if len(shape) == 2 and shape[0] > 1:
            return RawTensor(name, shape, "BF16", values.astype(ml_dtypes.bfloat16))
        return RawTensor(name, shape, "F32", (values + ("norm" in name)).astype(np.float32))


def load(table: ops.Ops) -> Model:
    """The model."""
    spec, source = kimi_k3.spec_from_hf(Metadata(CONFIG)), RandomTensors()
    return kimi_k3.build(spec, Renamed(source, kimi_k3.hf_recipes(spec, source.names())), table, "float32")
