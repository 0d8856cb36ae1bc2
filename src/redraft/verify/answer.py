"""What a server said: one record for completions and chat, whole or streamed, whatever the dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Query:
    """One request. `top_logprobs` 0 asks for none. Greedy unless a temperature is given."""

    prompt: str
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    stream: bool = False
    chat: bool = False

    @property
    def path(self) -> str:
        """The endpoint, below /v1."""
        return "chat/completions" if self.chat else "completions"

    def body(self) -> dict[str, Any]:
        """The request's JSON, without the model's name."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            body["prompt"] = self.prompt
        if self.seed is not None:
            body["seed"] = self.seed
        if self.stop:
            body["stop"] = list(self.stop)
        if self.top_logprobs:
            body |= (
                {"logprobs": True, "top_logprobs": self.top_logprobs}
                if self.chat
                else {"logprobs": self.top_logprobs}
            )
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True)
class Step:
    """One token as the server reports it: text, log-probability in nats, and the likeliest tokens there."""

    token: str
    logprob: float
    top: Mapping[str, float]


@dataclass(frozen=True)
class Usage:
    """Token counts as the server reports them; `cached` is None where it says nothing of its prefix cache."""

    prompt: int
    completion: int
    total: int
    cached: int | None = None


@dataclass(frozen=True)
class Answer:
    """A server's answer. `num_chunks` counts pieces of a stream that carried text; they are not tokens."""

    text: str
    finish_reason: str | None
    usage: Usage | None
    steps: tuple[Step, ...] = ()
    num_chunks: int = 0
    drafted: int | None = None
    accepted: int | None = None

    @property
    def has_margins(self) -> bool:
        """Whether its log-probabilities are such that a margin can be read from them."""
        return bool(self.steps) and all(len(s.top) > 1 for s in self.steps) and not self.logprobs_are_void

    @property
    def logprobs_are_void(self) -> bool:
        """Nearly every token after the first is reported with log-probability 0: certainty is not meant."""
        later = self.steps[1:]
        return len(later) >= 3 and sum(s.logprob == 0.0 for s in later) >= 0.9 * len(later)


@dataclass
class Assembly:
    """Puts an answer together from a body, or from the chunks of a stream.

    Raises `KeyError`, `TypeError` or `ValueError` for what is not of the API's form.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    steps: list[Step] = field(default_factory=list)
    num_chunks: int = 0
    drafted: int | None = None
    accepted: int | None = None

    def add(self, body: Mapping[str, Any]) -> None:
        """Take in a body or a chunk."""
        for choice in body["choices"]:
            piece = _text_of(choice)
            self.num_chunks += bool(piece)
            self.text += piece
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.steps += _steps_of(choice.get("logprobs"))
        if body.get("usage"):
            self.usage = _usage_of(body["usage"])
        drafted, accepted = _draft_counts(body)
        if drafted is not None:
            self.drafted, self.accepted = drafted, accepted

    def answer(self) -> Answer:
        """What has been said."""
        return Answer(
            self.text, self.finish_reason, self.usage, tuple(self.steps), self.num_chunks,
            self.drafted, self.accepted,
        )  # fmt: skip


def _text_of(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return choice["text"] or ""
    message = choice.get("message") or choice.get("delta") or {}
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return str(thought) + str(message.get("content") or "")


def _steps_of(logprobs: Mapping[str, Any] | None) -> list[Step]:
    """Both forms: lists of tokens and log-probabilities, or a list of entries under `content`."""
    if not logprobs:
        return []
    if logprobs.get("content") is not None:
        return [
            Step(e["token"], float(e["logprob"]), _top_of(e.get("top_logprobs"))) for e in logprobs["content"]
        ]
    tokens: Sequence[str] = logprobs.get("tokens") or []
    values = logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return [
        Step(token, float(value), _top_of(top))
        for token, value, top in zip(tokens, values, tops, strict=True)
    ]


def _top_of(top: Any) -> dict[str, float]:
    if isinstance(top, Mapping):
        return {token: float(value) for token, value in top.items()}
    return {entry["token"]: float(entry["logprob"]) for entry in top or []}


def _usage_of(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    prompt, completion = int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
    return Usage(prompt, completion, int(usage["total_tokens"]), details.get("cached_tokens"))


def _draft_counts(body: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Tokens drafted and accepted in this request, by the names of llama.cpp, vLLM and SGLang."""
    timings = body.get("timings") or {}
    if "draft_n" in timings:
        return int(timings["draft_n"]), int(timings["draft_n_accepted"])
    vllm = (body.get("metrics") or {}).get("speculative_decoding") or {}
    if "num_draft_tokens" in vllm:
        return int(vllm["num_draft_tokens"]), int(vllm["num_accepted_draft_tokens"])
    sglang = (body.get("sglext") or {}).get("spec_tokens_details") or {}
    if "spec_num_proposed_drafts" in sglang:
        return int(sglang["spec_num_proposed_drafts"]), int(sglang["spec_num_correct_drafts"])
    return None, None
