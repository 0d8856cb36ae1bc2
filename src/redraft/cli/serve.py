"""`redraft serve`: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Annotated

import typer
from aiohttp import web
from rich.console import Console

from redraft.cli import options as opt
from redraft.cli.session import LoadedModels, load_models
from redraft.cli.tables import bytes_table
from redraft.config import EngineConfig
from redraft.errors import ConfigError
from redraft.serve import EngineWorker, ServerSettings, create_app
from redraft.state import bytes_by_category

DEFAULT_CONTEXT = 4096
GRACE_S = 5.0


def serve(
    model: opt.Model = opt.DEFAULT_MODEL,
    draft: opt.Draft = None,
    depth: opt.Depth = opt.ENGINE.depth,
    policy: opt.PolicyOption = opt.Policy.replay,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="0: any that is free.")] = 8080,
    slots: Annotated[int, typer.Option("--slots", "-s", help="Requests that run at once.")] = (
        opt.ENGINE.num_slots
    ),
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx", help=f"Tokens that a slot can hold. Default: {DEFAULT_CONTEXT}, or the model's."
        ),
    ] = None,
    prefix_mib: Annotated[
        int, typer.Option("--prefix-mib", help="Memory to keep states of prompts for later ones. 0: none.")
    ] = 256,
    kv_type: opt.KVTypeOption = opt.KVType.float32,
    prefill_chunk: opt.PrefillChunk = opt.ENGINE.prefill_chunk,
    threads: opt.Threads = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model. Default: its own name.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="REDRAFT_API_KEY", help="Refuse whoever does not send this key."),
    ] = None,
    max_requests: Annotated[
        int, typer.Option("--max-requests", help="Refuse more than so many at once, waiting ones included.")
    ] = 256,
) -> None:
    """Serve completions and chat over HTTP, as the OpenAI API has them. Ctrl-C ends it.

    The same request gets the same answer, whatever else is being served: without a seed its seed is 0.
    """
    if max_requests < 1:
        raise ConfigError(f"max requests must be 1 or more, not {max_requests}")
    if api_key == "":
        raise ConfigError("the API key is empty: give one, or leave --api-key out")
    console = Console(stderr=True, highlight=False)
    listener = _listen(host, port)
    try:
        loaded = load_models(model, draft, console, threads)
        config = EngineConfig(
            num_slots=slots,
            max_context=min(DEFAULT_CONTEXT, loaded.file.spec.max_context) if ctx is None else ctx,
            depth=depth if draft else 0,
            policy=policy.value,
            kv_type=kv_type.value,
            prefill_chunk=prefill_chunk,
            prefix_bytes=prefix_mib * 2**20,
        )
        settings = ServerSettings(
            model=name or loaded.file.name,
            max_context=config.max_context,
            api_key=api_key,
            max_requests=max_requests,
        )
        _serve(console, loaded, config, settings, listener)
    finally:
        listener.close()


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything is loaded."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port must be 0 to 65535, not {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; choose with --host and --port"
        ) from None
    return listener


def _serve(
    console: Console,
    loaded: LoadedModels,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
) -> None:
    tokenizer = loaded.file.require_tokenizer()
    engine = loaded.engine(config)
    speculation = f"{loaded.draft_name} drafts up to {config.depth}" if config.depth else "no speculation"
    console.print(
        f"{settings.model} · {config.num_slots} slots of {config.max_context} tokens · {speculation}",
        soft_wrap=True,
    )
    console.print(bytes_table("", {"bytes": bytes_by_category(engine.buffers())}), style="dim")
    app = create_app(
        EngineWorker(engine),
        tokenizer,
        settings,
        log=lambda line: console.print(line, style="dim", soft_wrap=True),
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    asyncio.run(_until_signal(app, listener, lambda: console.print(f"http://{shown}:{port}/v1")))


async def _until_signal(app: web.Application, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until the first signal, then let answers end for `GRACE_S`; the next signal ends the process."""
    loop, stop, numbers = asyncio.get_running_loop(), asyncio.Event(), (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, end)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=GRACE_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        ready()
        await stop.wait()
    finally:
        await runner.cleanup()
