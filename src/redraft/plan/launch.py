"""The command that runs a model as planned, for each engine. Flags as of October 2026."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from redraft.plan.llamacpp import num_cells
from redraft.plan.settings import EngineName, PlanSettings
from redraft.plan.sglang import pool_size
from redraft.plan.term import Plan

_LLAMA_TYPES = {"model": "draft-simple", "ngram": "ngram-simple"}
_VLLM_METHODS = {"model": "draft_model"}
_SGLANG_ALGORITHMS = {"mtp": "NEXTN", "model": "STANDALONE"}
_VLLM_KV = {"f16": "auto", "bf16": "auto"}
_NEED_A_FILE = ("model", "eagle3", "dflash", "dspark")


def launch_line(plan: Plan, model: str, draft: str | None = None) -> str:
    """A shell command; `model` and `draft` as the server is to find them.

    Where no drafter was named, it is the model's own head, or else an EAGLE-3 head whose file is left open.
    """
    settings = plan.settings
    kind = settings.drafter or ("mtp" if plan.spec.mtp_layers else "eagle3")
    path = (draft if settings.drafter == "model" else None) or "DRAFT_MODEL"
    words = _WORDS[settings.engine](settings, model, kind, path)
    return " ".join(shlex.quote(word) for word in words)


def _redraft(settings: PlanSettings, model: str, kind: str, draft: str) -> list[str]:
    words = ["redraft", "serve", "--model", model, "--slots", str(settings.slots)]
    words += ["--ctx", str(settings.context), "--kv-type", settings.kv, "--prefix-mib", "0"]
    if settings.depth:
        words += ["--draft", draft if kind == "model" else "ngram"]
        words += ["--depth", str(settings.depth), "--policy", settings.rollback]
    return words


def _llama(settings: PlanSettings, model: str, kind: str, draft: str) -> list[str]:
    words = ["llama-server", "-m", model, "-c", str(num_cells(settings)), "-np", str(settings.slots)]
    words += ["-ctk", settings.kv, "-ctv", settings.kv]
    if settings.depth:
        words += ["--spec-type", _LLAMA_TYPES.get(kind, f"draft-{kind}")]
        words += ["--spec-draft-n-max", str(settings.depth)]
        words += ["-md", draft] if kind in _NEED_A_FILE else []
    return words


def _vllm(settings: PlanSettings, model: str, kind: str, draft: str) -> list[str]:
    words = ["vllm", "serve", model, "--max-num-seqs", str(settings.slots)]
    words += ["--max-model-len", str(settings.context)]
    words += ["--kv-cache-dtype", _VLLM_KV.get(settings.kv, settings.kv)]
    words += ["--tensor-parallel-size", str(settings.tp)] if settings.tp > 1 else []
    if settings.depth:
        speculation: dict[str, str | int] = {"method": _VLLM_METHODS.get(kind, kind)}
        speculation |= {"model": draft} if kind in _NEED_A_FILE else {}
        words += [
            "--speculative-config",
            json.dumps(speculation | {"num_speculative_tokens": settings.depth}),
        ]
    return words


def _sglang(settings: PlanSettings, model: str, kind: str, draft: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--max-running-requests", str(settings.slots), "--context-length", str(settings.context)]
    words += ["--max-mamba-cache-size", str(pool_size(settings))]
    words += ["--tp-size", str(settings.tp)] if settings.tp > 1 else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if settings.kv == "fp8" else []
    if settings.depth:
        words += ["--speculative-algorithm", _SGLANG_ALGORITHMS.get(kind, kind.upper())]
        words += ["--speculative-num-steps", str(settings.depth), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(settings.depth + 1)]
        words += ["--speculative-draft-model-path", draft] if kind in _NEED_A_FILE else []
        words += ["--enable-linear-replayssm"] if settings.rollback == "replay" else []
    return words


_WORDS: dict[EngineName, Callable[[PlanSettings, str, str, str], list[str]]] = {
    "redraft": _redraft,
    "llama.cpp": _llama,
    "vllm": _vllm,
    "sglang": _sglang,
}
