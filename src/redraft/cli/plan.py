"""`redraft plan`: what a model costs on an engine, term by term, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from redraft.errors import ConfigError, ModelFileError
from redraft.plan import Plan, PlanSettings, compare_depths, compare_engines, frontier, open_spec, trade
from redraft.plan import plan as make_plan
from redraft.plan.launch import launch_line
from redraft.plan.settings import DEFAULTS, DRAFTERS, ENGINES, EngineName
from redraft.plan.sizes import human, mib, parse_size
from redraft.plan.solve import MARGIN_PERCENT, Frontier, Trade, most_slots, trade_sentence
from redraft.plan.spec import PlanSpec
from redraft.plan.table import bars, frontier_table, label, print_plan


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
    trades = [trade(item.spec, item.settings) for item in _speculating(plans, chosen)]
    found = None if budget is None else frontier(spec, settings, parse_size(budget), margin)
    if plot is not None:
        from redraft.plan.plot import plot as write_plot  # noqa: PLC0415  (matplotlib is optional)

        write_plot(plans, labels, plot, _title(settings, spec, compare))
    if json_out:
        typer.echo(json.dumps(_json(chosen, plans, trades, found), indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    print_plan(console, chosen)
    _print_comparison(console, plans, labels, remarks)
    if trades:
        console.print(trade_sentence(trades), soft_wrap=True)
    if found is not None:
        _print_fit(console, chosen, found, solve=solve)
    shown = [chosen, *(item for item in plans if item.settings.engine != chosen.settings.engine)]
    if found is not None and solve:
        shown = _fitted(console, shown, found.usable_bytes)
    _print_launch_lines(console, shown, model, draft)
    if check:
        _print_check(console, chosen, model)


def _request(
    model: str, draft: str | None, weights: str | None, **wanted: Any
) -> tuple[PlanSpec, PlanSettings]:
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


def _title(settings: PlanSettings, spec: PlanSpec, compare: str) -> str:
    shared = f"{spec.name}: {settings.slots} slots × {settings.context} tokens"
    return f"{shared}, depth {settings.depth}" if compare == "engines" else f"{shared} on {settings.engine}"


def _comparison(spec: PlanSpec, settings: PlanSettings, what: str) -> tuple[list[Plan], list[str], list[str]]:
    if what == "engines":
        plans, remarks = compare_engines(spec, settings)
        return plans, [f"{item.settings.engine}, KV {item.settings.kv}" for item in plans], remarks
    if what == "depths":
        plans = compare_depths(spec, settings)
        return plans, [f"depth {item.settings.depth}" for item in plans], []
    raise ConfigError(f"--compare takes engines or depths, not '{what}'")


def _speculating(plans: list[Plan], chosen: Plan) -> list[Plan]:
    """The plans whose rollback is worth a sentence: of engines, each once."""
    if not chosen.settings.depth or not chosen.spec.recurrent:
        return []
    engines: dict[EngineName, Plan] = {item.settings.engine: item for item in plans}
    return list(engines.values())


def _json(chosen: Plan, plans: list[Plan], trades: list[Trade], found: Frontier | None) -> dict[str, Any]:
    result = chosen.to_json()
    result["comparison"] = [
        {
            "engine": item.settings.engine,
            "depth": item.settings.depth,
            "total_MiB": mib(item.total_bytes),
            "groups": item.group_bytes(),
        }
        for item in plans
    ]
    if trades:
        result["trade"] = {
            "sentence": trade_sentence(trades),
            "engines": {
                item.engine: {"cost_bytes": item.cost_bytes, "more_slots": item.more_slots} for item in trades
            },
        }
    if found is not None:
        result["frontier"] = {
            "budget_bytes": found.budget_bytes,
            "margin_percent": found.margin_percent,
            "usable_bytes": found.usable_bytes,
            "points": [vars(point) for point in found.points],
        }
    return result


def _print_comparison(console: Console, plans: list[Plan], labels: list[str], remarks: list[str]) -> None:
    console.print()
    for line in bars(plans, labels, min(console.width, 110)):
        console.print(line, soft_wrap=True)
    for remark in remarks:
        console.print(f"note: {remark}", soft_wrap=True)
    console.print()


def _print_fit(console: Console, chosen: Plan, found: Frontier, *, solve: bool) -> None:
    fits = chosen.total_bytes <= found.usable_bytes
    console.print(
        f"budget {human(found.budget_bytes)}, usable {human(found.usable_bytes)} after a safety margin of "
        f"{found.margin_percent:g} %: this plan's {human(chosen.total_bytes)} {'fit' if fits else 'do not'}",
        soft_wrap=True,
    )
    if not solve:
        return
    if not found.points:
        console.print("nothing fits beside the weights, not even one slot", soft_wrap=True)
        return
    console.print(f"what fits on {chosen.settings.engine} (the most slots of each context and depth):")
    console.print(frontier_table(found))


def _fitted(console: Console, plans: list[Plan], usable_bytes: int) -> list[Plan]:
    """Each engine's plan with the most slots that fit at the depth and context asked for."""
    fitted = []
    for item in plans:
        slots = most_slots(item.spec, item.settings, usable_bytes)
        if slots:
            fitted.append(make_plan(item.spec, replace(item.settings, slots=slots)))
        else:
            console.print(f"{item.settings.engine}: not one slot fits at this depth and context")
    return fitted


def _print_launch_lines(console: Console, plans: list[Plan], model: str, draft: str | None) -> None:
    console.print()
    for item in plans:
        line = launch_line(item, model, draft)
        console.print(f"{item.settings.engine}: {line}", soft_wrap=True, markup=False)


def _print_check(console: Console, chosen: Plan, model: str) -> None:
    from redraft.plan.check import check  # noqa: PLC0415  (loads the model)

    if chosen.settings.engine != "redraft":
        raise ConfigError(f"--check loads the model here; it cannot check {chosen.settings.engine}")
    if not Path(chosen.spec.source).exists():
        raise ModelFileError(f"--check needs a model's files; '{model}' is only a description")
    found = check(model, chosen.settings, chosen.spec.weight_bytes(mtp=False))
    planned = sum(found.state_planned.values())
    console.print(f"\nchecked by loading {chosen.spec.name} ({label(chosen.settings)})", soft_wrap=True)
    console.print(
        f"  weights   in the file {mib(found.weights_in_file)} MiB, loaded {mib(found.weights_loaded)} MiB"
    )
    console.print(
        f"  state     planned {mib(planned)} MiB, allocated {mib(found.state_allocated)} MiB "
        f"({found.state_allocated - planned} bytes of cursors more)"
    )
    console.print(
        f"  resident  grew by {mib(found.resident_growth)} MiB for {mib(found.weights_loaded + planned)} MiB "
        f"loaded and planned, from {mib(found.resident_before)} MiB before"
    )
    if not found.is_exact:
        console.print("plan and allocation differ", style="red")
        raise typer.Exit(1)
