"""Canonical tensor names of the Kimi families, made from those of a Hugging Face checkpoint."""

from __future__ import annotations

import numpy as np

from redraft.models.kimi_spec import KimiLinearSpec
from redraft.models.weights import Recipe, elementwise, stacked


def recipes_of_blocks(spec: KimiLinearSpec, names: set[str]) -> dict[str, Recipe]:
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
