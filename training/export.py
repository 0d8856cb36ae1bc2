"""A checkpoint → the Hugging Face layout that redraft reads.

    python training/export.py target RUN_DIRECTORY OUTPUT_DIRECTORY

Weights are rounded to bf16. Needs NAME.pt and tokenizer.json in RUN_DIRECTORY.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

import model as k3
from model import DeltaAttention, Experts, MiniK3
from prepare import CHAT_TEMPLATE, END, START
from train import load

MAX_CONTEXT = 4096


def config(shape: k3.Shape, start: int, end: int) -> dict[str, object]:
    """config.json."""
    return {
        "architectures": ["KimiK3ForCausalLM"],
        "model_type": "kimi_k3",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "model_max_length": MAX_CONTEXT,
        "num_attention_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.kv_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i in shape.full_attention],  # counted from 1
            "num_heads": shape.heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": k3.CONV_WIDTH,
            "gate_lower_bound": k3.LOWER_BOUND,
        },
        "first_k_dense_replace": shape.num_dense,
        "intermediate_size": shape.dense_dim,
        "moe_intermediate_size": shape.expert_dim,
        "num_experts": shape.num_experts,
        "num_experts_per_token": shape.num_chosen,
        "num_shared_experts": shape.num_shared,
        "routed_expert_hidden_size": shape.latent or None,
        "routed_scaling_factor": 1.0,
        "moe_renormalize": True,
        "rms_norm_eps": k3.EPS,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": shape.block_size,
        "tie_word_embeddings": True,
        "bos_token_id": start,
        "eos_token_id": end,
    }


def tensors(model: MiniK3) -> dict[str, Tensor]:
    """The weights under their published names, in float32."""
    found = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm.weight}
    _score(found, "model.output_attn_res", model.output_mix)
    for i, layer in enumerate(model.layers):
        name = f"model.layers.{i}"
        _score(found, f"{name}.self_attention_res", layer.attention_mix)
        _score(found, f"{name}.mlp_res", layer.ffn_mix)
        found[f"{name}.input_layernorm.weight"] = layer.attention_norm.weight
        found[f"{name}.post_attention_layernorm.weight"] = layer.ffn_norm.weight
        is_delta = isinstance(layer.attention, DeltaAttention)
        (_delta if is_delta else _latent)(found, f"{name}.self_attn", layer.attention)
        if isinstance(layer.ffn, Experts):
            _experts(found, f"{name}.block_sparse_moe", layer.ffn)
        else:
            _mlp(found, f"{name}.mlp", layer.ffn)
    return {name: tensor.detach().float() for name, tensor in found.items()}


def _score(found: dict[str, Tensor], name: str, score: Tensor) -> None:
    """A score weight is published as a norm's weight and a projection, of which it is the product."""
    found[f"{name}_norm.weight"] = torch.ones_like(score)
    found[f"{name}_proj.weight"] = score[None]


def _delta(found: dict[str, Tensor], name: str, block: DeltaAttention) -> None:
    for part, weight in zip("qkvg", block.qkvg, strict=True):
        found[f"{name}.{part}_proj.weight"] = weight
    for part, taps in zip("qkv", block.conv.chunk(3), strict=True):
        found[f"{name}.{part}_conv1d.weight"] = taps[:, None]
    found[f"{name}.f_a_proj.weight"], found[f"{name}.f_b_proj.weight"] = block.f_a, block.f_b
    found[f"{name}.b_proj.weight"] = block.b_proj
    found[f"{name}.dt_bias"], found[f"{name}.A_log"] = block.dt_bias, block.a_log.reshape(1, 1, -1, 1)
    found[f"{name}.o_norm.weight"], found[f"{name}.o_proj.weight"] = block.o_norm.weight, block.o_proj


def _latent(found: dict[str, Tensor], name: str, block: k3.LatentAttention) -> None:
    found[f"{name}.q_proj.weight"] = block.q_proj
    found[f"{name}.kv_a_proj_with_mqa.weight"] = block.kv_a
    found[f"{name}.kv_a_layernorm.weight"] = block.kv_norm.weight
    found[f"{name}.kv_b_proj.weight"] = block.kv_b
    found[f"{name}.g_proj.weight"], found[f"{name}.o_proj.weight"] = block.g_proj, block.o_proj


def _mlp(found: dict[str, Tensor], name: str, block: k3.MLP) -> None:
    found[f"{name}.gate_proj.weight"], found[f"{name}.up_proj.weight"] = block.gate_up
    found[f"{name}.down_proj.weight"] = block.down


def _experts(found: dict[str, Tensor], name: str, block: Experts) -> None:
    found[f"{name}.gate.weight"] = block.router
    found[f"{name}.gate.e_score_correction_bias"] = block.bias
    found[f"{name}.routed_expert_down_proj.weight"] = block.routed_down
    found[f"{name}.routed_expert_up_proj.weight"] = block.routed_up
    found[f"{name}.routed_expert_norm.weight"] = block.routed_norm.weight
    for e, (gate_up, down) in enumerate(zip(block.gate_up, block.down, strict=True)):
        expert = f"{name}.experts.{e}"
        found[f"{expert}.w1.weight"], found[f"{expert}.w3.weight"] = gate_up
        found[f"{expert}.w2.weight"] = down.T
    _mlp(found, f"{name}.shared_experts", block.shared)


def export(model: MiniK3, tokenizer: Path, output: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the directory."""
    output.mkdir(parents=True, exist_ok=True)
    start, end = (Tokenizer.from_file(str(tokenizer)).token_to_id(name) for name in (START, END))
    save_file(
        {n: t.to(dtype).contiguous() for n, t in tensors(model).items()}, str(output / "model.safetensors")
    )
    shutil.copyfile(tokenizer, output / "tokenizer.json")
    files = {
        "config.json": config(model.shape, start, end),
        "generation_config.json": {"bos_token_id": start, "eos_token_id": [end, start]},
        "tokenizer_config.json": {
            "bos_token": START, "eos_token": END, "add_bos_token": True, "chat_template": CHAT_TEMPLATE,
        },
    }  # fmt: skip
    for name, values in files.items():
        (output / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    export(load(arguments.run / f"{arguments.name}.pt"), arguments.run / "tokenizer.json", arguments.output)


if __name__ == "__main__":
    main()
