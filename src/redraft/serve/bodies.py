"""Request bodies as the OpenAI API has them, with our own fields, checked and made into engine requests.

A field that would change the answer and is not supported is refused by name; nothing is dropped in silence
but what has no effect on an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from redraft.config import MAX_SEED, SamplingParams
from redraft.engine import Request
from redraft.errors import RequestError
from redraft.loading import Tokenizer

MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20
_COMPLETION_TOKENS = 16  # the API's default
_WITHOUT_EFFECT = {  # on an answer
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # other values of these fields are not supported
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(_Strict):
    """What a stream tells beside the text."""

    include_usage: bool = False


class _Body(_Strict):
    """What both endpoints have. `temperature` and `top_p` are 1 where they are not given, as in the API; the
    seed is 0, so that the same request has the same answer.
    """

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    depth: int | None = None

    def params(self, max_tokens: int) -> SamplingParams:
        """Raises `ConfigError` for a value out of range."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(
            max_tokens=max_tokens,
            stop_strings=tuple(stops),
            logit_bias=_biases(self.logit_bias or {}),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


class TextPart(_Strict):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def as_template_input(self) -> dict[str, str]:
        """With the parts of its content put together."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatBody(_Body):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


@dataclass(frozen=True)
class Call:
    """A checked request: one engine request for each answer, and how the answers are to be sent."""

    requests: tuple[Request, ...]
    chat: bool
    stream: bool
    include_usage: bool


def read_completion(text: str, tokenizer: Tokenizer, model: str) -> Call:
    """Raises `RequestError` or `ConfigError`, in one line."""
    body = _parsed(CompletionBody, text, model)
    tokens = _prompt_tokens(body.prompt, tokenizer)
    params = body.params(_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens)
    return _call(body, tokens, params, top_logprobs=body.logprobs, chat=False)


def read_chat(text: str, tokenizer: Tokenizer, model: str, max_context: int) -> Call:
    """The same for a conversation. Without a limit the answer may fill the context."""
    body = _parsed(ChatBody, text, model)
    if tokenizer.chat is None:
        raise RequestError(f"model '{model}' has no chat template: use /v1/completions")
    if not body.messages:
        raise RequestError("messages is empty: it needs at least one")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true")
    rendered = tokenizer.chat.render([message.as_template_input() for message in body.messages])
    tokens = tokenizer.encode(rendered, start=False)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.params(max(1, max_context - len(tokens)) if asked is None else asked)
    return _call(
        body, tokens, params, top_logprobs=(body.top_logprobs or 0) if body.logprobs else None, chat=True
    )


def _call(
    body: _Body, tokens: list[int], params: SamplingParams, *, top_logprobs: int | None, chat: bool
) -> Call:
    requests = tuple(
        Request(
            tokens=tuple(tokens),
            params=replace(params, seed=(params.seed + i) % (MAX_SEED + 1)),
            depth=body.depth,
            top_logprobs=top_logprobs,
        )
        for i in range(body.n or 1)
    )
    options = body.stream_options or StreamOptions()
    return Call(requests, chat, bool(body.stream), options.include_usage)


def _prompt_tokens(prompt: str | list[int] | list[str], tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return tokenizer.encode(prompt[0])
    if any(isinstance(part, str) for part in prompt):
        raise RequestError(f"prompt is a list of {len(prompt)} texts: send one request for each")
    return [int(token) for token in prompt]


_Sent = TypeVar("_Sent", bound=_Body)


def _parsed(kind: type[_Sent], text: str, model: str) -> _Sent:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise RequestError(f"the request body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(f"the request body must be a JSON object, not a {type(fields).__name__}")
    for name, neutral in _NEUTRAL.items():
        if fields.pop(name, None) not in (None, *neutral):
            raise RequestError(f"{name} is not supported: leave it out")
    try:
        body = kind.model_validate({k: v for k, v in fields.items() if k not in _WITHOUT_EFFECT})
    except ValidationError as error:
        raise RequestError(_sentence(error)) from None
    if body.model not in (None, model):
        raise UnknownModelError(f"model '{body.model}' is not served here; this is: {model}")
    return body


class UnknownModelError(RequestError):
    """A request names a model that is not served."""


def _sentence(error: ValidationError) -> str:
    """The complaint that goes deepest, with the field's name and the value."""
    chosen = max(error.errors(), key=lambda e: len(e["loc"]))
    parts = [str(part) for part in chosen["loc"]]
    name = ".".join(part for part in parts if part != "str" and "[" not in part)  # without a union's types
    if chosen["type"] == "extra_forbidden":
        return f"{name} is not a field of this request: leave it out"
    if chosen["type"] == "missing":
        return f"{name} is missing"
    value, complaint = json.dumps(chosen["input"]), chosen["msg"]
    shown = value if len(value) <= 80 else value[:77] + "..."
    return f"{name}: {complaint[0].lower()}{complaint[1:]}, not {shown}"


def _biases(values: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): float(value) for token, value in values.items()}
    except ValueError:
        raise RequestError(f"logit_bias maps token numbers to values, not {sorted(values)[0]!r}") from None
