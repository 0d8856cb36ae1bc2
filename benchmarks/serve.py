"""What HTTP costs: the same requests through `redraft serve` and through an engine in this process.

    python benchmarks/serve.py [--model mini-k3] [--rounds 7]

Each round is `--requests` greedy streams of `--tokens` tokens, at concurrency 1 and at 4, on both in turns;
all texts must be equal, or no figure is printed. The ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time

import aiohttp

from redraft import ops
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, Request
from redraft.loading import open_model

SLOTS = 4
PROMPTS = [f"def {name}(" for name in ("read", "write", "split", "join", "parse", "render", "copy", "merge")]


def directly(engine: Engine, tokens: list[list[int]], params: SamplingParams, width: int) -> list[str]:
    """All requests, at most `width` at once."""
    waiting = [Request(tokens=tuple(prompt), params=params) for prompt in reversed(tokens)]
    running = [engine.submit(waiting.pop()) for _ in range(min(width, len(waiting)))]
    while engine.has_work:
        ended = [event for event in engine.step() if event.finish_reason]
        running += [engine.submit(waiting.pop()) for _ in ended if waiting]
    return [generation.text for generation in running]


async def over_http(url: str, params: SamplingParams, width: int, num_requests: int) -> list[str]:
    places = asyncio.Semaphore(width)
    async with aiohttp.ClientSession() as session:

        async def ask(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": params.max_tokens, "temperature": 0, "ignore_eos": True}
            text = ""
            async with places, session.post(f"{url}/completions", json={**body, "stream": True}) as response:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            return text

        return await asyncio.gather(*(ask(prompt) for prompt in prompts(num_requests)))


def prompts(count: int) -> list[str]:
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mini-k3")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    table = ops.choose()
    file = open_model(arguments.model)
    tokenizer = file.require_tokenizer()
    context = 64 + arguments.tokens
    engine = Engine(
        file.load(table),
        EngineConfig(num_slots=SLOTS, max_context=context, depth=0),
        table,
        tokenizer=tokenizer,
    )
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    tokens = [tokenizer.encode(prompt) for prompt in prompts(arguments.requests)]
    command = [sys.executable, "-m", "redraft", "serve", "--model", arguments.model, "--port", "0"]
    command += ["--slots", str(SLOTS), "--ctx", str(context), "--prefix-mib", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
        try:
            figures = [compare(engine, tokens, params, url, width, arguments) for width in (1, SLOTS)]
        finally:
            server.terminate()
            server.stderr.read()
    print(json.dumps({"model": file.name, "figures": figures}))


def compare(
    engine: Engine,
    tokens: list[list[int]],
    params: SamplingParams,
    url: str,
    width: int,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    ratios, rates = [], []
    for number in range(arguments.rounds + 1):
        start = time.perf_counter()
        expected = directly(engine, tokens, params, width)
        middle = time.perf_counter()
        found = asyncio.run(over_http(url, params, width, arguments.requests))
        end = time.perf_counter()
        assert found == expected, "texts over HTTP differ from the engine's"
        if number:  # the first round warms up
            ratios.append((end - middle) / (middle - start))
            rates.append(arguments.requests * arguments.tokens / (middle - start))
    figure = {
        "concurrency": width,
        "engine_tokens_per_s": statistics.median(rates),
        "time_ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }
    print(
        f"concurrency {width}: engine {figure['engine_tokens_per_s']:.0f} tokens/s; over HTTP "
        f"×{figure['time_ratio']:.2f} the time [{figure['lowest']:.2f}, {figure['highest']:.2f}]",
        flush=True,
    )
    return figure


if __name__ == "__main__":
    main()
