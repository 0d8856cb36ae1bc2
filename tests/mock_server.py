"""A small OpenAI-compatible server with a toy language model, sound or with one planted fault.

The toy model is a hash of all tokens so far: any other history gives other text. Words are tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "with", "as", "his",
    "they", "be", "at", "one", "have", "this", "from", "or", "had", "by", "hot", "but", "some", "what",
    "there", "we", "can", "out", "other", "were", "all", "your", "when", "up", "use", "how", "said", "an",
    "each", "she", "which", "do", "their", "if",
)  # fmt: skip
VOCABULARY = tuple(f" {word}" for word in WORDS)
DEPTH = 4
FAULTS = (
    "drops a token after a rejection", "mixes requests under load", "continues from the wrong cached state",
    "ignores the seed", "miscounts usage", "counts chunks as tokens", "log-probability 0 everywhere",
    "ignores stop", "accepts more than it drafted", "overruns max_tokens", "counts a prompt differently",
)  # fmt: skip


@dataclass(frozen=True)
class Behaviour:
    """`near_ties`: some tokens nearly tie; which one wins depends on load and cache, as rounding does."""

    speculative: bool = False
    near_ties: bool = False
    logprobs: bool = True
    chat_only: bool = False
    llamacpp: bool = False
    fault: str = ""
    api_key: str | None = None


@dataclass(frozen=True)
class State:
    """A history: its hash, its words, its length."""

    hash: int = 1
    words: frozenset[str] = frozenset()
    length: int = 0

    def after(self, token: str) -> State:
        return State(zlib.crc32(token.encode(), self.hash), self.words | {token}, self.length + 1)


def tokenize(text: str) -> list[str]:
    return re.findall(r" ?[^ ]+| +", text)


def logits(state: State, *, near_ties: bool, rounding: float) -> dict[str, float]:
    """Candidates are a fixed vocabulary and the words of the history, which are likelier."""
    scores = {
        token: zlib.crc32(token.encode(), state.hash) % 10_000 / 1000 + 4 * (token in state.words)
        for token in (*VOCABULARY, *(word for word in state.words if word.startswith(" ")))
    }
    first, second, *_ = sorted(scores, key=lambda token: -scores[token])
    scores[first] = scores[second] + 1.5 + state.hash % 100 / 50
    if near_ties and state.hash % 16 == 0:
        scores[first] = scores[second] + 0.02
    scores[first] -= rounding
    return scores


def log_softmax(scores: Mapping[str, float]) -> dict[str, float]:
    top = max(scores.values())
    total = top + math.log(sum(math.exp(value - top) for value in scores.values()))
    return {token: value - total for token, value in scores.items()}


def uniform(*key: object) -> float:
    return (zlib.crc32(repr(key).encode()) + 0.5) / 2**32


@dataclass
class Written:
    """What the model has written for one request: tokens in groups, one group a step."""

    groups: list[list[tuple[str, float, dict[str, float]]]] = field(default_factory=list)
    finish_reason: str = "length"
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    text_limit: int | None = None


class MockServer:
    """Serves from a thread of its own while the context is open."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.url = ""
        self._cache: dict[tuple[str, ...], State] = {}
        self._active: dict[int, State] = {}
        self._num_requests = 0
        self._drafted = self._accepted = self._drafts = 0

    def __enter__(self) -> Self:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(started,))
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._complete)
        if not self.behaviour.chat_only:
            app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        if (
            self.behaviour.api_key
            and request.headers.get("Authorization") != f"Bearer {self.behaviour.api_key}"
        ):
            return web.json_response({"error": {"message": "invalid key"}}, status=401)
        owner = "llamacpp" if self.behaviour.llamacpp else "vllm"
        return web.json_response({"data": [{"id": "toy", "owned_by": owner}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.behaviour.speculative or self.behaviour.llamacpp:
            return web.Response(status=404)
        lines = [
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self._drafts}.0',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {self._drafted}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self._accepted}.0',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = request.path.endswith("chat/completions")
        if (body.get("logprobs") or body.get("top_logprobs")) and not self.behaviour.logprobs:
            return web.json_response({"error": {"message": "logprobs are not supported"}}, status=400)
        prompt = f"user: {body['messages'][0]['content']}" if chat else body["prompt"]
        number = self._num_requests = self._num_requests + 1
        written = await self._write(number, tokenize(prompt), body)
        answer = Rendering(
            self.behaviour, body, chat, len(tokenize(prompt)) + self._miscount(number), written
        )
        if not body.get("stream"):
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in answer.chunks():
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _miscount(self, number: int) -> int:
        return number % 2 if self.behaviour.fault == "counts a prompt differently" else 0

    async def _write(self, number: int, prompt: list[str], body: Mapping[str, Any]) -> Written:
        written = Written()
        state = self._prefill(prompt, written)
        self._active[number] = state
        skip = False
        try:
            while sum(map(len, written.groups)) < body["max_tokens"] and written.finish_reason == "length":
                accepted = (
                    zlib.crc32(b"accept", state.hash) % (DEPTH + 1) if self.behaviour.speculative else 0
                )
                group = []
                for _ in range(accepted + 1):
                    token, logprob, top = self._next(state, body, written, number)
                    state = state.after(token)
                    if not skip:
                        group.append((token, logprob, top))
                    skip = False
                self._account(written, accepted)
                skip = self.behaviour.fault == FAULTS[0] and 0 < accepted < DEPTH and bool(group)
                self._finish_group(written, group, body)
                self._active[number] = state
                await asyncio.sleep(0 if len(written.groups) > 1 else 0.002)  # let others begin
                state = self._mixed(number, state, len(written.groups))
        finally:
            del self._active[number]
        return written

    def _prefill(self, prompt: list[str], written: Written) -> State:
        known = max((n for n in range(len(prompt) + 1) if tuple(prompt[:n]) in self._cache), default=0)
        written.cached = known
        state = self._cache.get(tuple(prompt[:known]), State())
        if known and self.behaviour.fault == "continues from the wrong cached state":
            state = self._cache.get((*prompt[: known - 1], "before"), state)
        for n, token in enumerate(prompt[known:], start=known):
            if n == len(prompt) - 1:
                self._cache[(*prompt[:n], "before")] = state
            state = state.after(token)
        self._cache[tuple(prompt)] = state
        return state

    def _next(
        self, state: State, body: Mapping[str, Any], written: Written, number: int
    ) -> tuple[str, float, dict[str, float]]:
        uneven = len(self._active) > 1 or written.cached or self.behaviour.speculative
        rounding = 0.05 if self.behaviour.near_ties and uneven else 0.0
        values = log_softmax(logits(state, near_ties=self.behaviour.near_ties, rounding=rounding))
        temperature = body.get("temperature", 0)
        chosen = max(values, key=lambda token: values[token])
        if temperature:
            seed = number if self.behaviour.fault == "ignores the seed" else body.get("seed", 0)
            noisy = {
                t: v / temperature - math.log(-math.log(uniform(seed, state.length, t)))
                for t, v in values.items()
            }
            chosen = max(noisy, key=lambda token: noisy[token])
        top = dict(sorted(values.items(), key=lambda item: -item[1])[: int(body.get("top_logprobs") or 5)])
        return chosen, values[chosen], top

    def _account(self, written: Written, accepted: int) -> None:
        if not self.behaviour.speculative:
            return
        overcounts = self.behaviour.fault == "accepts more than it drafted"
        drafted = max(0, accepted - 1) if overcounts else DEPTH
        written.drafted += drafted
        written.accepted += accepted
        self._drafts += 1
        self._drafted += drafted
        self._accepted += accepted

    def _finish_group(self, written: Written, group: list[Any], body: Mapping[str, Any]) -> None:
        room = body["max_tokens"] - sum(map(len, written.groups))
        written.groups.append(group if self.behaviour.fault == "overruns max_tokens" else group[:room])
        if self.behaviour.fault == "ignores stop":
            return
        text = "".join(token for group in written.groups for token, _, _ in group)
        ends = [at for stop in body.get("stop") or [] if (at := text.find(stop)) >= 0]
        if ends:
            written.text_limit, written.finish_reason = min(ends), "stop"

    def _mixed(self, number: int, state: State, num_groups: int) -> State:
        others = [other for key, other in self._active.items() if key != number]
        if self.behaviour.fault == "mixes requests under load" and others and num_groups == 2:
            return others[0]
        return state


class Rendering:
    """An answer in the API's form."""

    def __init__(
        self, behaviour: Behaviour, body: Mapping[str, Any], chat: bool, num_prompt: int, written: Written
    ) -> None:
        self._behaviour = behaviour
        self._body = body
        self._chat = chat
        self._num_prompt = num_prompt
        self._written = written

    def whole(self) -> dict[str, Any]:
        tokens = [token for group in self._written.groups for token in group]
        text = "".join(token for token, _, _ in tokens)[: self._written.text_limit]
        choice: dict[str, Any] = {"finish_reason": self._written.finish_reason, "index": 0}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice["logprobs"] = self._logprobs(tokens, 0)
        return {"choices": [choice], "usage": self._usage(len(tokens)), **self._timings()}

    def chunks(self) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        shown = at = 0
        limit = self._written.text_limit
        for group in self._written.groups:
            text = "".join(token for token, _, _ in group)
            visible = text if limit is None else text[: max(0, limit - shown)]
            shown += len(text)
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": visible}} if self._chat else {"text": visible}
            choice["logprobs"] = self._logprobs(group, at)
            made.append({"choices": [choice]})
            at += len(group)
        made[-1]["choices"][0]["finish_reason"] = self._written.finish_reason
        count = len(made) if self._behaviour.fault == "counts chunks as tokens" else at
        return [*made, {"choices": [], "usage": self._usage(count), **self._timings()}]

    def _logprobs(self, tokens: list[tuple[str, float, dict[str, float]]], at: int) -> dict[str, Any] | None:
        if not (self._body.get("logprobs") or self._body.get("top_logprobs")):
            return None
        if self._behaviour.fault == "log-probability 0 everywhere":
            tokens = [(t, v if at + i == 0 else 0.0, top) for i, (t, v, top) in enumerate(tokens)]
        if self._chat or self._behaviour.llamacpp:
            return {
                "content": [
                    {"token": t, "logprob": v,
                     "top_logprobs": [{"token": name, "logprob": value} for name, value in top.items()]}
                    for t, v, top in tokens
                ]
            }  # fmt: skip
        return {
            "tokens": [t for t, _, _ in tokens],
            "token_logprobs": [v for _, v, _ in tokens],
            "top_logprobs": [top for _, _, top in tokens],
        }

    def _usage(self, count: int) -> dict[str, Any]:
        count += self._behaviour.fault == "miscounts usage"
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": count,
            "total_tokens": self._num_prompt + count,
            "prompt_tokens_details": {"cached_tokens": self._written.cached},
        }

    def _timings(self) -> dict[str, Any]:
        if not (self._behaviour.speculative and self._behaviour.llamacpp):
            return {}
        return {"timings": {"draft_n": self._written.drafted, "draft_n_accepted": self._written.accepted}}
