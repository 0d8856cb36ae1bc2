"""`redraft generate`: one prompt, or a conversation at the terminal."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from redraft.cli import options as opt
from redraft.cli.session import LoadedModels, load_models
from redraft.cli.tables import bytes_table
from redraft.config import EngineConfig, SamplingParams
from redraft.engine import Engine, FinishReason, Generation, Request
from redraft.errors import ConfigError, RequestError
from redraft.state import bytes_by_category


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt.")] = None,
    model: opt.Model = opt.DEFAULT_MODEL,
    draft: opt.Draft = None,
    depth: opt.Depth = opt.ENGINE.depth,
    policy: opt.PolicyOption = opt.Policy.replay,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt, as an option.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file ('-': stdin).")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Use the chat template; without a prompt, converse at the terminal."),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="At most so many.")
    ] = opt.SAMPLING.max_tokens,
    temperature: opt.Temperature = opt.SAMPLING.temperature,
    top_k: opt.TopK = opt.SAMPLING.top_k,
    top_p: opt.TopP = opt.SAMPLING.top_p,
    min_p: opt.MinP = opt.SAMPLING.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divide the logits of tokens seen before. 1: off.")
    ] = opt.SAMPLING.repetition_penalty,
    presence_penalty: Annotated[
        float, typer.Option(help="Subtract from the logits of tokens written before.")
    ] = opt.SAMPLING.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option(help="Subtract for every time a token was written.")
    ] = opt.SAMPLING.frequency_penalty,
    logit_bias: Annotated[
        list[str] | None, typer.Option(help="TOKEN=VALUE, added to its logit; repeatable.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the text before this string; repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the model's end token.")] = False,
    seed: opt.Seed = opt.SAMPLING.seed,
    ctx: opt.Context = None,
    kv_type: opt.KVTypeOption = opt.KVType.float32,
    prefill_chunk: opt.PrefillChunk = opt.ENGINE.prefill_chunk,
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Continue a prompt. The text goes to stdout as it comes, the figures to stderr."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_biases(logit_bias or []),
        seed=seed,
        max_tokens=max_tokens,
        stop_strings=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    wanted = EngineConfig(
        num_slots=1,
        max_context=opt.ENGINE.max_context if ctx is None else ctx,
        depth=depth if draft else 0,
        policy=policy.value,
        kv_type=kv_type.value,
        prefill_chunk=prefill_chunk,
    )
    text = _prompt(prompt, prompt_option, file)
    if text is None and not (chat and sys.stdin.isatty()):
        raise RequestError("no prompt: give one as an argument, with -p, or from a file with -f")
    console = Console(stderr=True, highlight=False)
    loaded = load_models(model, draft, console, threads)
    tokenizer = loaded.file.require_tokenizer()
    if chat and tokenizer.chat is None:
        raise RequestError(f"model '{loaded.file.name}' has no chat template: leave --chat out")
    if text is None:
        _converse(loaded, _sized(wanted, loaded, ctx, 0), params, console)
        return
    rendered = tokenizer.chat.render([{"role": "user", "content": text}]) if chat and tokenizer.chat else text
    tokens = tokenizer.encode(rendered, start=not chat)
    config = _sized(wanted, loaded, ctx, len(tokens) + max_tokens)
    engine = loaded.engine(config)
    report = _run(engine, Request(tokens=tuple(tokens), params=params), echo=not as_json)
    if as_json:
        typer.echo(json.dumps(report.as_mapping(loaded, engine, draft), ensure_ascii=False))
    else:
        report.print(console, engine)


def _biases(values: list[str]) -> dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise ConfigError(f"logit bias '{value}' must look like 42=-5.0") from None
    return biases


def _prompt(argument: str | None, option: str | None, file: Path | None) -> str | None:
    given = [source for source in (argument, option, file) if source is not None]
    if len(given) > 1:
        raise RequestError("the prompt is given twice: use one of the argument, -p and -f")
    if file is None:
        return argument if argument is not None else option
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file {file} cannot be read: {error}") from None


def _sized(config: EngineConfig, loaded: LoadedModels, ctx: int | None, needed: int) -> EngineConfig:
    """The context asked for; else the default, or what the request needs, within the model's own limit."""
    if ctx is not None:
        return config
    return replace(config, max_context=min(loaded.file.spec.max_context, max(config.max_context, needed)))


@dataclass(frozen=True)
class _Report:
    generation: Generation
    seconds: float

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first."""
        g = self.generation
        if g.first_token_s is None or g.last_token_s is None or len(g.output) < 2:
            return None
        return (len(g.output) - 1) / (g.last_token_s - g.first_token_s)

    def as_mapping(self, loaded: LoadedModels, engine: Engine, draft: str | None) -> dict[str, Any]:
        """For JSON."""
        g = self.generation
        return {
            "model": loaded.file.name,
            "draft": draft,
            "depth": engine.config.depth,
            "policy": engine.config.policy,
            "text": g.text,
            "tokens": g.output,
            "finish_reason": str(g.finish_reason),
            "prompt_tokens": g.num_prompt,
            "seconds": self.seconds,
            "ttft_s": g.first_token_s - g.submitted_s if g.first_token_s is not None else None,
            "tokens_per_s": self.decode_rate,
            "steps": g.num_steps,
            "drafted": g.num_drafted,
            "accepted": g.num_accepted,
            "bytes": bytes_by_category(engine.buffers()),
        }

    def print(self, console: Console, engine: Engine) -> None:
        """For people."""
        g = self.generation
        rate = f"{self.decode_rate:.1f} tokens/s" if self.decode_rate else "one token"
        parts = [f"{g.num_prompt} + {len(g.output)} tokens", rate, f"ended by {g.finish_reason}"]
        if engine.config.depth:
            share = f" ({g.num_accepted / g.num_drafted:.0%})" if g.num_drafted else ""
            parts.append(f"{g.num_drafted} drafted, {g.num_accepted} accepted{share} in {g.num_steps} steps")
        console.print(" · ".join(parts), style="dim", soft_wrap=True)
        console.print(bytes_table("", {"bytes": bytes_by_category(engine.buffers())}), style="dim")


def _run(engine: Engine, request: Request, *, echo: bool) -> _Report:
    start = time.perf_counter()
    generation = engine.submit(request)
    try:
        while engine.has_work:
            for event in engine.step():
                if echo:
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        engine.cancel(generation)
    if echo:
        sys.stdout.write("\n")
    if generation.finish_reason is FinishReason.ERROR:
        raise RequestError(f"the generation failed: {generation.error}")
    return _Report(generation, time.perf_counter() - start)


def _converse(loaded: LoadedModels, config: EngineConfig, params: SamplingParams, console: Console) -> None:
    """Read lines, answer each. The slot keeps its state, so that a turn evaluates only what is new."""
    tokenizer = loaded.file.require_tokenizer()
    assert tokenizer.chat is not None, "checked by the caller"
    engine = loaded.engine(config)
    messages: list[dict[str, str]] = []
    console.print("Ctrl-D ends the conversation.", style="dim")
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        messages.append({"role": "user", "content": line})
        tokens = tokenizer.encode(tokenizer.chat.render(messages), start=False)
        report = _run(engine, Request(tokens=tuple(tokens), params=params, session="chat"), echo=True)
        messages.append({"role": "assistant", "content": report.generation.text})
        report.print(console, engine)
