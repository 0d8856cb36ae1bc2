"""The HTTP side: routes, streams, refusals."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from redraft.engine import FinishReason
from redraft.errors import RedraftError, RequestError, ServerError
from redraft.loading import Tokenizer
from redraft.serve.answers import Form, error_body, models_body
from redraft.serve.bodies import Call, UnknownModelError, read_chat, read_completion
from redraft.serve.worker import EngineWorker, Piece, Stream

MAX_BODY_BYTES = 32 * 2**20
Log = Callable[[str], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reader = Callable[[str], Call]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server tells and allows: its model's name, the context of a slot in tokens, the key that clients
    must send (None: none), and how many requests may be under way at once before more are refused.
    """

    model: str
    max_context: int
    api_key: str | None = None
    max_requests: int = 256


def create_app(
    worker: EngineWorker, tokenizer: Tokenizer, settings: ServerSettings, log: Log = lambda _: None
) -> web.Application:
    """An application that starts and stops the worker with itself. `log` gets a line for each answer."""
    server = _Server(worker, tokenizer, settings, log)
    app = web.Application(middlewares=[server.guard], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/metrics", server.metrics),
            web.get("/v1/models", server.models),
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.chat),
        ]
    )
    app.cleanup_ctx.append(server.run_worker)
    return app


class FailedError(Exception):
    """An answer broke off."""


class _Arrivals:
    """The pieces of one call's answers as they come, each with the number of its answer."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

    def taker(self, index: int) -> Callable[[Piece], None]:
        """Takes the pieces of one answer."""
        return lambda piece: self._queue.put_nowait((index, piece))

    async def until_ended(self, num_answers: int) -> AsyncIterator[tuple[int, Piece]]:
        """Until so many answers have ended. Raises `FailedError` if one broke off, `ServerError` at the
        server's end.
        """
        while num_answers:
            index, piece = await self._queue.get()
            if piece.finish_reason is FinishReason.ERROR:
                raise FailedError(piece.error)
            if piece.finish_reason is FinishReason.CANCELLED:
                raise ServerError(piece.error)
            num_answers -= piece.finish_reason is not None
            yield index, piece


class _Server:
    def __init__(
        self, worker: EngineWorker, tokenizer: Tokenizer, settings: ServerSettings, log: Log
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._settings = settings
        self._log = log
        self._created = int(time.time())
        self._num_requests = 0

    async def run_worker(self, _: web.Application) -> AsyncIterator[None]:
        """Start and stop the worker with the application."""
        self._worker.start()
        yield
        await self._worker.stop()

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Ask for the key; turn errors into the API's form."""
        try:
            self._require_key(request)
            return await handler(request)
        except UnknownModelError as error:
            return _refusal(404, str(error), "not_found_error")
        except ServerError as error:
            return _refusal(503, str(error), "unavailable_error")
        except RedraftError as error:
            return _refusal(400, str(error), "invalid_request_error")
        except FailedError as error:
            return _refusal(500, str(error), "server_error")
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _refusal(error.status, _explained(request, error), "invalid_request_error")

    def _require_key(self, request: web.Request) -> None:
        key = self._settings.api_key
        if key is None or request.path == "/health":
            return
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(sent.encode(), key.encode()):
            raise web.HTTPUnauthorized(reason="the request has no valid key: send it as a bearer token")

    async def health(self, _: web.Request) -> web.Response:
        """For whoever waits for the server."""
        return web.json_response({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        """For Prometheus."""
        totals = await self._worker.totals()
        return web.Response(text=totals.page(), content_type="text/plain", charset="utf-8")

    async def models(self, _: web.Request) -> web.Response:
        """The one model."""
        settings = self._settings
        return web.json_response(models_body(settings.model, self._created, settings.max_context))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Continue a text."""
        return await self._answer(
            request, lambda text: read_completion(text, self._tokenizer, self._settings.model)
        )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        settings = self._settings
        return await self._answer(
            request, lambda text: read_chat(text, self._tokenizer, settings.model, settings.max_context)
        )

    async def _answer(self, request: web.Request, read: Reader) -> web.StreamResponse:
        settings = self._settings
        call = read(await _text(request))
        if self._num_requests + len(call.requests) > settings.max_requests:
            raise web.HTTPTooManyRequests(
                reason=f"{self._num_requests} requests are under way, of at most {settings.max_requests}: "
                "try again later"
            )
        self._num_requests += len(call.requests)
        streams: list[Stream] = []
        arrivals = _Arrivals()
        try:
            for index, wanted in enumerate(call.requests):
                streams.append(self._worker.submit(wanted, arrivals.taker(index)))
            await asyncio.gather(*(stream.accepted for stream in streams))
            form = Form(call.chat, settings.model, self._tokenizer)
            if call.stream:
                return await self._stream(request, call, form, streams, arrivals)
            return await self._whole(form, streams, arrivals)
        finally:  # also when the client has gone
            for stream in streams:
                self._worker.cancel(stream)
            self._num_requests -= len(call.requests)

    async def _whole(self, form: Form, streams: Sequence[Stream], arrivals: _Arrivals) -> web.Response:
        pieces: list[list[Piece]] = [[] for _ in streams]
        async for index, piece in arrivals.until_ended(len(streams)):
            pieces[index].append(piece)
        generations = [stream.generation for stream in streams]
        self._tell(streams)
        return web.json_response(form.whole(pieces, generations))

    async def _stream(
        self, request: web.Request, call: Call, form: Form, streams: Sequence[Stream], arrivals: _Arrivals
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)

        async def send(body: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode())

        for opening in form.openings(len(streams)):
            await send(opening)
        offsets = [0] * len(streams)
        try:
            async for index, piece in arrivals.until_ended(len(streams)):
                if piece.text or piece.logprobs or piece.finish_reason:
                    await send(form.chunk(index, piece, offsets[index], streams[index].generation))
                    offsets[index] += sum(len(form.token_text(entry.token)) for entry in piece.logprobs)
        except (FailedError, ServerError) as error:  # too late for a status
            await send(error_body(str(error), "server_error"))
        else:
            if call.include_usage:
                await send(form.closing([stream.generation for stream in streams]))
            await response.write(b"data: [DONE]\n\n")
            self._tell(streams)
        await response.write_eof()
        return response

    def _tell(self, streams: Sequence[Stream]) -> None:
        for generation in (stream.generation for stream in streams):
            parts = [f"{generation.num_prompt} + {len(generation.output)} tokens"]
            if generation.num_cached:
                parts[0] += f" ({generation.num_cached} cached)"
            first, last = generation.first_token_s, generation.last_token_s
            if first is not None and last is not None and last > first:
                parts.append(f"{(len(generation.output) - 1) / (last - first):.0f} tokens/s")
            if generation.num_drafted:
                parts.append(f"{generation.num_accepted / generation.num_drafted:.0%} of drafts accepted")
            self._log(" · ".join([*parts, str(generation.finish_reason)]))


async def _text(request: web.Request) -> str:
    try:
        return await request.text()
    except (UnicodeDecodeError, LookupError):
        raise RequestError("the request body is not text in UTF-8") from None


def _refusal(status: int, message: str, kind: str) -> web.Response:
    return web.json_response(error_body(message, kind), status=status)


def _explained(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 404:
        routes = ", ".join(resource.canonical for resource in request.app.router.resources())
        return f"there is no {request.path} here; these are: {routes}"
    if error.status == 405:
        return f"{request.path} does not take {request.method}"
    if error.status == 413:
        return f"the request body exceeds {MAX_BODY_BYTES} bytes"
    return error.reason
