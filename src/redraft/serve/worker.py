"""The engine on a thread of its own: it steps while there is work, and takes commands between steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from redraft.engine import Engine, FinishReason, Generation, Request, Status
from redraft.errors import ServerError
from redraft.serve.totals import Totals
from redraft.speculate import TokenLogprob

T = TypeVar("T")
_SHUTTING_DOWN = "the server is shutting down"


class Piece(NamedTuple):
    """What a step brought one request: text, tokens' log-probabilities if asked for, and whether it ended."""

    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None
    error: str = ""


@dataclass(eq=False)
class Stream:
    """A request on its way: who takes its pieces, on the event loop and in order; whether it was accepted
    (`RequestError` if it can never be served); and from then on its generation, which the engine's thread
    changes.
    """

    take: Callable[[Piece], None]
    accepted: asyncio.Future[None] = field(init=False)
    generation: Generation = field(init=False)


class EngineWorker:
    """Runs an engine. `submit`, `cancel` and `totals` are called on the event loop that called `start`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}  # by number of the generation; the engine's thread alone
        self._totals = Totals()
        self._closed = False  # to commands
        self._stopping = False  # seen by the engine's thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve this event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Cancel what runs, and end the thread after the step at hand. Later commands are refused."""

        def stop() -> None:
            self._stopping = True
            self._give_up(FinishReason.CANCELLED, _SHUTTING_DOWN)

        self._closed = True
        self._commands.put(stop)
        await asyncio.to_thread(self._thread.join)

    def submit(self, request: Request, take: Callable[[Piece], None]) -> Stream:
        """Queue a request. Raises `ServerError` at the end. Whoever gives up waiting has to `cancel`."""
        stream = Stream(take)

        def submit() -> None:
            stream.generation = self._engine.submit(request)
            self._streams[stream.generation.number] = stream

        stream.accepted = self._ask(submit)
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a request if it has not ended; its slot is free after the step at hand."""

        def cancel() -> None:  # after its submission, so that what was accepted is known
            if stream in self._streams.values():
                del self._streams[stream.generation.number]
                self._engine.cancel(stream.generation)
                self._totals.count(stream.generation)

        self._commands.put(cancel)

    async def totals(self) -> Totals:
        """What was done since the start, requests at hand included."""

        def totals() -> Totals:
            running = [stream.generation for stream in self._streams.values()]
            return self._totals.with_running(running, self._engine.prefix_stats)

        return await self._ask(totals)

    def _ask(self, command: Callable[[], T]) -> asyncio.Future[T]:
        """A command's result, once the engine's thread has carried it out."""
        if self._closed:
            raise ServerError(_SHUTTING_DOWN)
        assert self._loop is not None, "started before it is used"
        loop, answer = self._loop, self._loop.create_future()

        def settle(set_value: Callable[[Any], None], value: Any) -> None:
            if not answer.cancelled():
                set_value(value)

        def carry_out() -> None:
            try:
                result = command()
            except Exception as error:  # belongs to the asker
                loop.call_soon_threadsafe(settle, answer.set_exception, error)
            else:
                loop.call_soon_threadsafe(settle, answer.set_result, result)

        self._commands.put(carry_out)
        return answer

    def _run(self) -> None:
        while not self._stopping:
            while not self._engine.has_work or not self._commands.empty():
                self._commands.get()()
                if self._stopping:
                    return
            self._step()

    def _step(self) -> None:
        """One step, and its news to those who wait for it.

        If it fails, the requests at hand are given up, because tokens may be lost and a wrong text is worse
        than none. Later requests find slots that are reset.
        """
        try:
            events = self._engine.step()
        except Exception as error:
            self._give_up(FinishReason.ERROR, f"the engine failed: {error or type(error).__name__}")
            return
        news = []
        for event in events:
            generation = event.generation
            stream = self._streams[generation.number]
            logprobs = generation.logprobs[-len(event.tokens) :] if event.tokens else []
            news.append((stream, Piece(event.text, logprobs, event.finish_reason, generation.error)))
            if event.finish_reason is not None:
                del self._streams[generation.number]
                self._totals.count(generation)
        self._deliver(news)

    def _give_up(self, reason: FinishReason, error: str) -> None:
        """End all requests at hand."""
        news = []
        for stream in self._streams.values():
            if stream.generation.status is not Status.FINISHED:
                self._engine.cancel(stream.generation)
            self._totals.count(stream.generation, reason)
            news.append((stream, Piece("", [], reason, error)))
        self._streams.clear()
        self._deliver(news)

    def _deliver(self, news: list[tuple[Stream, Piece]]) -> None:
        def put() -> None:
            for stream, piece in news:
                stream.take(piece)

        assert self._loop is not None, "started before it is used"
        if news:
            self._loop.call_soon_threadsafe(put)
