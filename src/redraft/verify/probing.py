"""All probes of a server, one after another."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from redraft.errors import ConfigError
from redraft.verify import contract_probes, prompts, text_probes
from redraft.verify.answer import Query
from redraft.verify.client import Client, RefusedError
from redraft.verify.probe import FULL, QUICK, TOP_LOGPROBS, ProbeResult, Target

Probe = Callable[[Target], Awaitable[ProbeResult]]

# The counters come last: they are about all requests made before.
PROBES: dict[str, Probe] = {
    "speculation against none": text_probes.speculation_against_none,
    "repeated": text_probes.repeated,
    "alone against neighbours": text_probes.among_neighbours,
    "cold against warm prompt": text_probes.cold_against_warm,
    "generated against rescored": text_probes.rescored,
    "streamed against whole": contract_probes.streamed_against_whole,
    "max_tokens": contract_probes.limits,
    "stop": contract_probes.stops,
    "usage": contract_probes.usage,
    "logprobs": contract_probes.logprobs,
    "seed": contract_probes.seeds,
    "acceptance counters": contract_probes.acceptance_counters,
}


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which server, and how much to ask of it.

    `baseline` is a server of the same model without speculation; `off` are request fields that switch it off
    on the server itself. A server that keeps prompts has to be given another `seed` each time, or nothing is
    cold.
    """

    url: str
    model: str | None = None
    baseline: str | None = None
    off: Mapping[str, Any] | None = None
    api_key: str | None = None
    concurrency: int = 4
    full: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.concurrency <= 256:
            raise ConfigError(f"concurrency must be 2 to 256, not {self.concurrency}")
        if self.baseline is not None and self.off is not None:
            raise ConfigError("--baseline and --off are two ways to the same: give one of them")


async def probe_server(settings: ServerSettings) -> AsyncIterator[ProbeResult]:
    """Run all probes. Raises `ServerError` if there is no server to probe, or it breaks down."""
    async with AsyncExitStack() as stack:
        target = await _connect(settings, stack)
        for name, probe in PROBES.items():
            start = time.perf_counter()
            try:
                result = await probe(target)
            except RefusedError as error:
                result = ProbeResult(name, "", skipped=str(error))
            yield replace(result, name=name, seconds=time.perf_counter() - start)


async def _connect(settings: ServerSettings, stack: AsyncExitStack) -> Target:
    client = await stack.enter_async_context(Client(settings.url, api_key=settings.api_key))
    await client.choose_model(settings.model)
    plain = None
    if settings.baseline is not None or settings.off is not None:
        url = settings.baseline or settings.url
        plain = await stack.enter_async_context(Client(url, api_key=settings.api_key, fields=settings.off))
        await plain.choose_model(None if settings.baseline else settings.model)
    before = await client.counters()
    chat, top_logprobs = await _abilities(client)
    return Target(
        client=client, plain=plain, load=FULL if settings.full else QUICK, concurrency=settings.concurrency,
        chat=chat, top_logprobs=top_logprobs, before=before, seed=settings.seed,
    )  # fmt: skip


async def _abilities(client: Client) -> tuple[bool, int]:
    """Whether the server has chat only, and how many log-probabilities it gives."""
    refusals = []
    for chat in (False, True):
        for count in (TOP_LOGPROBS, 0):
            try:
                answer = await client.ask(
                    Query(prompts.telling(0), max_tokens=2, top_logprobs=count, chat=chat)
                )
                return chat, count if answer.steps else 0
            except RefusedError as error:
                refusals.append(str(error))
    raise ConfigError(f"{client.url} serves neither completions nor chat: {refusals[-1]}")
