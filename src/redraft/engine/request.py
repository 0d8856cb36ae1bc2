"""A request and what becomes of it: a list of tokens that only grows, and the text they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from redraft.config import SamplingParams
from redraft.speculate import TokenLogprob


class Status(StrEnum):
    """Where a generation stands."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks for.

    `depth` limits the draft below the engine's own limit (None: no further limit). Requests of one `session`
    follow each other: the slot keeps its state between them, and a prompt that begins with what the slot
    holds goes on from there. `top_logprobs` asks for the log-probability of every token written, and of so
    many of the likeliest at its place (None: for none).
    """

    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    depth: int | None = None
    session: str | None = None
    top_logprobs: int | None = None


class Decoder(Protocol):
    """Turns tokens into text, piece by piece."""

    def push(self, token: int) -> str:
        """The text this token completes."""

    def finish(self) -> str:
        """The text left over at the end."""


class StopText:
    """Text up to the first stop string. A tail that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.text = ""  # handed out
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Add text → what may be shown of it, and whether a stop string ended it."""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return self._release(min(found)), True
        return self._release(len(self._held) - self._overlap()), False

    def finish(self) -> str:
        """The rest, when no more text comes."""
        return self._release(len(self._held))

    def _overlap(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _release(self, length: int) -> str:
        shown, self._held = self._held[:length], self._held[length:]
        self.text += shown
        return shown


class Generation:
    """The progress of one request. Only the engine changes it."""

    def __init__(
        self, number: int, request: Request, decoder: Decoder | None, ends: frozenset[int], now: float
    ) -> None:
        self.number = number
        self.request = request
        self.tokens = list(request.tokens)
        self.num_prompt = len(request.tokens)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.slot: int | None = None
        self.num_cached = 0  # prompt tokens that the slot already held
        self.num_prefilled = 0  # of the tokens that prefill has to consume, how many it has
        self.prefill_end = len(request.tokens)
        self.num_steps = 0  # windows verified
        self.num_drafted = 0
        self.num_accepted = 0
        self.logprobs: list[TokenLogprob] = []  # of the tokens written since this engine took it
        self.submitted_s = now
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._decoder = decoder
        self._ends = ends
        self._text = StopText(request.params.stop_strings)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def text(self) -> str:
        """The text generated so far; without stop tokens and stop strings."""
        return self._text.text

    @property
    def num_left(self) -> int:
        """How many more tokens the request allows."""
        return self.request.params.max_tokens - (len(self.tokens) - self.num_prompt)

    def append(self, token: int, now: float, max_context: int) -> str:
        """Add a token, and finish if it is the last → the text to show. A stop takes precedence over a
        length.
        """
        self.tokens.append(token)
        self.first_token_s = now if self.first_token_s is None else self.first_token_s
        self.last_token_s = now
        if token in self._ends:
            return self.finish(FinishReason.STOP)
        shown, stopped = self._text.push(self._decoder.push(token)) if self._decoder else ("", False)
        if stopped:
            self._decoder = None  # what follows a stop string is not text of this request
            self._text = _ended(self._text)
            self.finish(FinishReason.STOP)
        elif self.num_left == 0 or len(self.tokens) >= max_context:
            shown += self.finish(FinishReason.LENGTH)
        return shown

    def take_over(self, output: Sequence[int], max_context: int) -> None:
        """Continue from tokens that were generated and shown before. Times count from here."""
        for token in output:
            self.append(token, self.submitted_s, max_context)
        self.first_token_s = self.last_token_s = None

    def start(self, num_cached: int) -> None:
        """Begin to prefill, or to go on, with a state that holds the first `num_cached` tokens."""
        self.status = Status.PREFILLING
        self.num_prefilled = num_cached
        if len(self.tokens) == self.num_prompt:
            self.num_cached = num_cached
        self.prefill_end = len(self.tokens)

    def finish(self, reason: FinishReason, error: str = "") -> str:
        """End the generation → the text that was held back."""
        self.status, self.finish_reason, self.error = Status.FINISHED, reason, error
        if self._decoder is None:
            return ""
        shown, stopped = self._text.push(self._decoder.finish())
        return shown if stopped else shown + self._text.finish()


def _ended(text: StopText) -> StopText:
    closed = StopText(())
    closed.text = text.text
    return closed


class Event(NamedTuple):
    """News of one generation after a step: new tokens, new text, and whether it is over."""

    generation: Generation
    tokens: list[int]
    text: str
    finish_reason: FinishReason | None
