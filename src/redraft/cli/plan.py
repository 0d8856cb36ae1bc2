"""`redraft plan`: what a model costs on an engine, term by term, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from redraft.cli.plan_report import Answer, as_mapping, print_answer
from redraft.errors import ConfigError, ModelFileError
from redraft.plan import (
    Plan,
    PlanSettings,
    PlanSpec,
    Trade,
    compare_depths,
    compare_engines,
    frontier,
    open_spec,
    trade,
)
from redraft.plan import plan as make_plan
from redraft.plan.settings import DEFAULTS, DRAFTERS, ENGINES
from redraft.plan.sizes import parse_size
from redraft.plan.solve import MARGIN_PERCENT

if TYPE_CHECKING:
    from redraft.plan.check import Checked


def plan(
    model: Annotated[
        str, typer.Argument(help="A .gguf file, a local directory, or a built-in name such as kimi-k3.")
    ],
    engine: Annotated[str, typer.Option("--engine", help=f"One of {', '.join(ENGINES)}.")] = "redraft",
    slots: Annotated[int, typer.Option("--slots", help="Requests served at once.")] = DEFAULTS.num_slots,
    ctx: Annotated[int, typer.Option("--ctx", help="Tokens that a slot can hold.")] = DEFAULTS.max_context,
    depth: Annotated[int, typer.Option("--depth", help="Draft tokens a step, at most.")] = DEFAULTS.depth,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="How rejected drafts are undone: replay, snapshot, checkpoint."),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option("--draft", help="mtp, ngram, eagle3, dflash, dspark, or a draft model as for MODEL."),
    ] = None,
    kv_type: Annotated[str | None, typer.Option("--kv-type", help="Type of attention rows.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="Size or type of the weights: 17.5GiB, q4_k, fp8, …")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", help="Devices that share the model (vllm, sglang).")] = 1,
    budget: Annotated[str | None, typer.Option("--budget", help="Memory of one device: 24GiB.")] = None,
    margin: Annotated[
        float, typer.Option("--margin", help="Per cent of the budget that is kept free.")
    ] = MARGIN_PERCENT,
    solve: Annotated[
        bool, typer.Option("--solve", help="What fits the budget: slots × context × depth.")
    ] = False,
    compare: Annotated[
        str, typer.Option("--compare", help="What the bars compare: engines or depths.")
    ] = "engines",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write the bars to this .svg or .png file.")
    ] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Load the model and compare planned with allocated and resident.")
    ] = False,
) -> None:
    """What do weights, KV, recurrent state, rollback and drafter cost, here and on other engines?

    Only headers and config.json are read. Each term is exact, or an estimate that says what it rests on.
    """
    if solve and budget is None:
        raise ConfigError("--solve needs a --budget, such as --budget 24GiB")
    spec, settings = _request(
        model, draft, weights,
        engine=engine, slots=slots, context=ctx, depth=depth, policy=policy, kv_type=kv_type, tp=tp,
    )  # fmt: skip
    chosen = make_plan(spec, settings)
    plans, labels, remarks = _comparison(spec, settings, compare)
    answer = Answer(
        model=model,
        draft=draft,
        chosen=chosen,
        plans=plans,
        labels=labels,
        remarks=remarks,
        trades=_trades(plans, chosen),
        frontier=None if budget is None else frontier(spec, settings, parse_size(budget), margin),
        solve=solve,
        checked=_check(chosen, model) if check else None,
    )
    if plot is not None:
        _plot(answer, compare, plot)
    if json_out:
        typer.echo(json.dumps(as_mapping(answer), indent=2, ensure_ascii=False))
    else:
        print_answer(Console(highlight=False), answer)
    if answer.checked is not None and not answer.checked.is_exact:
        typer.echo("error: plan and allocation differ", err=True)
        raise typer.Exit(1)


def _request(
    model: str, draft: str | None, weights: str | None, **wanted: Any
) -> tuple[PlanSpec, PlanSettings]:
    """The model, and the settings with a draft model read where one is named."""
    spec = open_spec(model, weights)
    known = draft is None or draft in DRAFTERS
    if draft == "model":
        raise ConfigError("--draft takes mtp, ngram, eagle3, dflash, dspark, or a model's name or path")
    drafter = draft if known else "model"
    settings = PlanSettings(drafter=drafter, draft_spec=None if known else open_spec(str(draft)), **wanted)
    if settings.context > spec.max_context:
        raise ConfigError(
            f"context {settings.context} is more than the {spec.max_context} tokens that '{spec.name}' allows"
        )
    return spec, settings.at_depth(settings.depth)


def _comparison(spec: PlanSpec, settings: PlanSettings, what: str) -> tuple[list[Plan], list[str], list[str]]:
    """Plans, their labels, and remarks on what could not be compared."""
    if what == "engines":
        plans, remarks = compare_engines(spec, settings)
        return plans, [f"{item.settings.engine}, KV {item.settings.kv}" for item in plans], remarks
    if what == "depths":
        plans = compare_depths(spec, settings)
        return plans, [f"depth {item.settings.depth}" for item in plans], []
    raise ConfigError(f"--compare takes engines or depths, not '{what}'")


def _trades(plans: list[Plan], chosen: Plan) -> list[Trade]:
    """What speculation costs on each engine, where there is a state to roll back."""
    if not chosen.settings.depth or not chosen.spec.recurrent:
        return []
    engines = {item.settings.engine: item for item in plans}  # of several depths, the largest comes last
    return [trade(item.spec, item.settings) for item in engines.values()]


def _plot(answer: Answer, compare: str, path: Path) -> None:
    from redraft.plan.plot import plot  # noqa: PLC0415  (matplotlib is optional)

    settings, name = answer.chosen.settings, answer.chosen.spec.name
    title = f"{name}: {settings.slots} slots × {settings.context} tokens"
    title += f", depth {settings.depth}" if compare == "engines" else f" on {settings.engine}"
    plot(answer.plans, answer.labels, path, title)


def _check(chosen: Plan, model: str) -> Checked:
    from redraft.plan.check import check  # noqa: PLC0415  (loads the model)

    if chosen.settings.engine != "redraft":
        raise ConfigError(f"--check loads the model here; it cannot check {chosen.settings.engine}")
    if not Path(chosen.spec.source).exists():
        raise ModelFileError(f"--check needs a model's files; '{model}' is only a description")
    return check(model, chosen.settings, chosen.spec.weight_bytes(mtp=False))
