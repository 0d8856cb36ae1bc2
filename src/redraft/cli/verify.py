"""`redraft verify`: is the state after a rejected draft the state before it?"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from redraft import __version__, ops
from redraft.cli import options as opt
from redraft.cli.json_file import require_writable, write_json
from redraft.cli.session import LoadedModels, load_models
from redraft.cli.verify_report import print_checks, print_probes, print_setting
from redraft.config import POLICIES, PolicyName
from redraft.errors import ConfigError, RedraftError
from redraft.verify import (
    CHECKS,
    PROBES,
    CheckResult,
    ProbeResult,
    ServerSettings,
    Subject,
    full,
    probe_server,
    quick,
    run_check,
)


def verify(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help=f"A model as for generate (default: {opt.DEFAULT_MODEL}); with --server, its name there.",
        ),
    ] = None,
    draft: opt.Draft = None,
    depth: opt.Depth = opt.ENGINE.depth,
    slots: Annotated[int, typer.Option("--slots", "-s", help="Sequences at once.")] = opt.ENGINE.num_slots,
    policy: Annotated[str, typer.Option("--policy", help=f"all, or one of {', '.join(POLICIES)}.")] = "all",
    server: Annotated[
        str | None, typer.Option("--server", help="Probe this OpenAI-compatible server instead.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", help="A server of the same model without speculation.")
    ] = None,
    off: Annotated[
        str | None,
        typer.Option("--off", help="JSON fields that switch speculation off for one request of --server."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="REDRAFT_API_KEY", help="Sent as bearer token.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of prompts that a server must not know yet. Default: random."),
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at once to a server.")] = 4,
    threads: opt.Threads = None,
    effort: Annotated[
        bool, typer.Option("--full/--quick", help="More counts, depths, lengths and texts.")
    ] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write all results here ('-': stdout).")
    ] = None,
) -> None:
    """Is the state after a rejected draft the state before it? For a model here, bit by bit; for a server,
    through its API.

    Exit code 1 if anything is found, 2 if nothing could be verified.
    """
    console = Console(stderr=str(json_out) == "-", highlight=False)
    if json_out is not None:
        require_writable(json_out)
    if server is not None:
        settings = ServerSettings(
            url=server, model=model, baseline=baseline, off=_fields(off), api_key=api_key,
            concurrency=concurrency, full=effort,
            seed=random.randrange(10**6) if seed is None else seed,
        )  # fmt: skip
        outcome = _verify_server(console, settings)
    elif baseline is not None or off is not None:
        raise ConfigError("--baseline and --off are about a server: name it with --server")
    else:
        policies = _policies(policy)
        loaded = load_models(model or opt.DEFAULT_MODEL, draft, Console(stderr=True), threads)
        outcome = _verify_model(console, loaded, policies, depth=depth, slots=slots, complete=effort)
    if json_out is not None:
        write_json(json_out, outcome.as_mapping())
    outcome.conclude(console)


@dataclass(frozen=True)
class _Outcome:
    """What was verified. `whole`: not interrupted. `error`: a server broke down on the way."""

    setting: Mapping[str, Any]
    results: Sequence[CheckResult | ProbeResult]
    found: bool
    whole: bool
    error: RedraftError | None = None

    def as_mapping(self) -> dict[str, Any]:
        """For JSON."""
        results = [asdict(result) for result in self.results]
        return {"redraft": __version__, **self.setting, "whole": self.whole, "results": results}

    def conclude(self, console: Console) -> None:
        """Say how it ended, by the exit code."""
        if self.error is not None:
            raise self.error
        if not self.whole:
            console.print("[yellow]interrupted:[/] the rest was not verified")
            raise typer.Exit(130)
        if self.found:
            raise typer.Exit(1)


def _policies(name: str) -> tuple[PolicyName, ...]:
    if name == "all":
        return POLICIES
    if name not in POLICIES:
        raise ConfigError(f"policy must be all or one of {', '.join(POLICIES)}, not '{name}'")
    return (name,)


def _fields(text: str | None) -> Mapping[str, Any] | None:
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"--off takes a JSON object such as '{{\"depth\": 0}}', not '{text}'")
    return fields


def _verify_model(
    console: Console,
    loaded: LoadedModels,
    policies: tuple[PolicyName, ...],
    *,
    depth: int,
    slots: int,
    complete: bool,
) -> _Outcome:
    if not loaded.model.spec.num_recurrent_layers:
        policies = policies[:1]  # they differ in recurrent layers only
    subject = Subject(
        loaded.model, loaded.table,
        depth=depth, num_slots=slots, policies=policies, draft_model=loaded.draft_model,
    )  # fmt: skip
    setting = {
        "model": loaded.file.name,
        "draft": loaded.draft_name,
        "depth": depth,
        "slots": slots,
        "policies": policies,
        "recurrent_layers": loaded.model.spec.num_recurrent_layers,
        "operations": ops.description(),
    }
    print_setting(console, setting)
    effort = (full if complete else quick)(depth)
    results: list[CheckResult] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(CHECKS))
        try:
            for name in CHECKS:
                progress.update(task, description=name)
                results.append(run_check(name, subject, effort))
                progress.advance(task)
        except KeyboardInterrupt:
            pass  # what there is is reported, and that it is not all
    print_checks(console, results)
    found = not all(result.passed for result in results)
    return _Outcome(setting, results, found, whole=len(results) == len(CHECKS))


def _verify_server(console: Console, settings: ServerSettings) -> _Outcome:
    results: list[ProbeResult] = []
    error = None
    with _progress() as progress:
        names = [*PROBES, ""]
        task = progress.add_task(names[0], total=len(PROBES))

        async def run() -> None:
            async for result in probe_server(settings):
                results.append(result)
                progress.update(task, advance=1, description=names[len(results)])

        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            pass  # as for a model
        except RedraftError as raised:
            error = raised
    if results:
        print_probes(console, results)
    setting = {
        "server": settings.url,
        "baseline": settings.baseline,
        "off": settings.off,
        "seed": settings.seed,
    }
    found = any(result.findings for result in results)
    return _Outcome(setting, results, found, whole=len(results) == len(PROBES), error=error)


def _progress() -> Progress:
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
