"""The command that starts a server as planned, for each engine. Flags as of October 2026."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from redraft.plan.llamacpp import num_cells
from redraft.plan.settings import EngineName, PlanSettings
from redraft.plan.sglang import pool_size
from redraft.plan.term import Plan

_LLAMA_TYPES = {"model": "draft-simple", "ngram": "ngram-simple"}
_SGLANG_ALGORITHMS = {"mtp": "NEXTN", "eagle3": "EAGLE3", "model": "STANDALONE", "ngram": "NGRAM"}
_VLLM_KV = {"f16": "auto", "bf16": "auto"}


def launch_line(plan: Plan, model: str, draft: str | None = None) -> str:
    """A shell command; `model` and `draft` as the server is to find them."""
    words = _WORDS[plan.settings.engine](plan.settings, model, draft or "DRAFT_MODEL")
    return " ".join(shlex.quote(word) for word in words)


def _redraft(settings: PlanSettings, model: str, draft: str) -> list[str]:
    words = [
        "redraft",
        "serve",
        "--model",
        model,
        "--slots",
        str(settings.slots),
        "--ctx",
        str(settings.context),
    ]
    words += ["--kv-type", settings.kv, "--depth", str(settings.depth)]
    if settings.depth:
        words += ["--policy", settings.rollback, "--draft", draft if settings.drafter == "model" else "ngram"]
    return words


def _llama(settings: PlanSettings, model: str, draft: str) -> list[str]:
    words = ["llama-server", "-m", model, "-c", str(num_cells(settings)), "-np", str(settings.slots)]
    words += ["-ctk", settings.kv, "-ctv", settings.kv]
    if settings.depth:
        kind = settings.drafter or "mtp"
        words += [
            "--spec-type",
            _LLAMA_TYPES.get(kind, f"draft-{kind}"),
            "--spec-draft-n-max",
            str(settings.depth),
        ]
        words += ["-md", draft] if kind == "model" else []
    return words


def _vllm(settings: PlanSettings, model: str, draft: str) -> list[str]:
    words = ["vllm", "serve", model, "--max-num-seqs", str(settings.slots)]
    words += [
        "--max-model-len",
        str(settings.context),
        "--kv-cache-dtype",
        _VLLM_KV.get(settings.kv, settings.kv),
    ]
    words += ["--tensor-parallel-size", str(settings.tp)] if settings.tp > 1 else []
    if settings.depth:
        kind = settings.drafter or "mtp"
        speculation = {"method": "draft_model", "model": draft} if kind == "model" else {"method": kind}
        words += [
            "--speculative-config",
            json.dumps(speculation | {"num_speculative_tokens": settings.depth}),
        ]
    return words


def _sglang(settings: PlanSettings, model: str, draft: str) -> list[str]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--max-running-requests", str(settings.slots), "--context-length", str(settings.context)]
    words += ["--max-mamba-cache-size", str(pool_size(settings))]
    words += ["--tp-size", str(settings.tp)] if settings.tp > 1 else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if settings.kv == "fp8" else []
    if settings.depth:
        kind = settings.drafter or "mtp"
        words += ["--speculative-algorithm", _SGLANG_ALGORITHMS.get(kind, kind.upper())]
        words += ["--speculative-num-steps", str(settings.depth), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(settings.depth + 1)]
        words += ["--speculative-draft-model-path", draft] if kind == "model" else []
        words += ["--enable-linear-replayssm"] if settings.rollback == "replay" else []
    return words


_WORDS: dict[EngineName, Callable[[PlanSettings, str, str], list[str]]] = {
    "redraft": _redraft,
    "llama.cpp": _llama,
    "vllm": _vllm,
    "sglang": _sglang,
}
