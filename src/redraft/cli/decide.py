"""`redraft decide`: run the agent queue with and without speculation, and say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from redraft import __version__
from redraft.cli import options as opt
from redraft.cli.json_file import require_writable
from redraft.cli.report import print_plan, report
from redraft.cli.session import LoadedModels, load_models
from redraft.config import EngineConfig, SamplingParams
from redraft.decide import Arm, ArmPlan, RunResult, builtin_tasks, measure, plan_arms, read_tasks
from redraft.decide.conversation import Conversation
from redraft.decide.measure import Workload
from redraft.decide.tasks import Task
from redraft.engine import Engine
from redraft.errors import ConfigError
from redraft.plan.sizes import parse_size


def decide(
    model: opt.Model = opt.DEFAULT_MODEL,
    draft: opt.Draft = "ngram",
    depth: opt.Depth = opt.ENGINE.depth,
    slots: Annotated[
        int, typer.Option("--slots", "-s", help="Your real concurrency.")
    ] = opt.ENGINE.num_slots,
    tasks: Annotated[
        Path | None, typer.Option("--tasks", help="A JSONL file of tasks. Default: built in.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Use the first N tasks only.")] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Memory for the arms, such as 24GiB. Default: speculation's."),
    ] = None,
    policy: opt.PolicyOption = opt.Policy.replay,
    temperature: opt.Temperature = opt.SAMPLING.temperature,
    seed: opt.Seed = opt.SAMPLING.seed,
    ctx: opt.Context = None,
    kv_type: opt.KVTypeOption = opt.KVType.float32,
    prefill_chunk: opt.PrefillChunk = opt.ENGINE.prefill_chunk,
    threads: opt.Threads = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here ('-': stdout).")
    ] = None,
) -> None:
    """Should speculation be on? The same agent tasks with it, without it, and with its memory spent on more
    slots.

    Each arm runs at concurrency 1 and at --slots; all arms run in turns of half a second on one machine, each
    on its own clock. Exit code 1 if any arm's text differs from that of the arm without speculation.
    """
    console = Console(stderr=str(json_out) == "-", highlight=False)
    queue = (builtin_tasks() if tasks is None else read_tasks(tasks))[:limit]
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1 task, not {limit}")
    if depth < 1 or draft is None:
        raise ConfigError("nothing to decide without speculation: use a --depth of at least 1 and a --draft")
    if json_out is not None:
        require_writable(json_out)
    memory = None if budget is None else parse_size(budget)
    config = EngineConfig(
        num_slots=slots,
        max_context=opt.ENGINE.max_context if ctx is None else ctx,
        depth=depth,
        policy=policy.value,
        kv_type=kv_type.value,
        prefill_chunk=prefill_chunk,
    )
    params = SamplingParams(temperature=temperature, seed=seed)
    loaded = load_models(model, draft, Console(stderr=True), threads)
    config = _with_context(config, queue, loaded, ctx)
    plan = plan_arms(
        loaded.file.spec,
        config,
        weight_bytes=loaded.model.weight_bytes,
        draft_buffers=loaded.drafter(config).buffers(),
        budget=memory,
    )
    setting = _setting(loaded, config, draft, queue)
    print_plan(console, plan, setting)
    workload = Workload(queue, params, loaded.file.tokenizer, loaded.file.spec.vocab_size)
    alone, full, whole = _measure(plan, workload, loaded)
    report(console, plan, alone, full, whole=whole, json_out=json_out, setting=setting)


def _with_context(
    config: EngineConfig, queue: Sequence[Task], loaded: LoadedModels, ctx: int | None
) -> EngineConfig:
    """A context that holds the longest task."""
    spec, tokenizer = loaded.file.spec, loaded.file.tokenizer
    lengths = {task.name: Conversation(task, tokenizer, spec.vocab_size).max_tokens() for task in queue}
    longest = max(lengths, key=lambda name: lengths[name])
    limit = spec.max_context if ctx is None else ctx
    if lengths[longest] > limit:
        raise ConfigError(
            f"task '{longest}' can reach {lengths[longest]} tokens, more than the context of {limit}"
        )
    wanted = math.ceil(lengths[longest] / 64) * 64
    return config if ctx is not None else replace(config, max_context=min(spec.max_context, wanted))


def _setting(
    loaded: LoadedModels, config: EngineConfig, draft: str | None, queue: Sequence[Task]
) -> dict[str, Any]:
    return {
        "redraft": __version__,
        "model": loaded.file.name,
        "draft": draft,
        "num_tasks": len(queue),
        "config": asdict(config),
    }


def _measure(
    plan: ArmPlan, workload: Workload, loaded: LoadedModels
) -> tuple[list[RunResult], list[RunResult], bool]:
    def make(arm: Arm, clock: Callable[[], float]) -> Engine:
        return loaded.engine(arm.config, clock)

    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars = {
            (arm.name, alone): progress.add_task(_bar(arm.name, 1 if alone else arm.config.num_slots),
                                                 total=len(workload.tasks))
            for alone in (True, False)
            for arm in plan.arms
        }  # fmt: skip

        def run(alone: bool) -> tuple[list[RunResult], bool]:
            def show(name: str, done: int) -> None:
                progress.update(bars[name, alone], completed=done)

            return measure(plan.arms, workload, make, alone=alone, on_progress=show)

        first, whole = run(alone=True)
        second, whole = run(alone=False) if whole else ([], False)
    return first, second, whole


def _bar(name: str, concurrency: int) -> str:
    return f"{name}, concurrency {concurrency}"
