"""Answers in the forms of the OpenAI API: whole bodies, chunks of a stream, errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from redraft.engine import FinishReason, Generation
from redraft.loading import Tokenizer
from redraft.serve.worker import Piece
from redraft.speculate import TokenLogprob


@dataclass(frozen=True)
class Form:
    """How the answers to one request look. Times are seconds."""

    chat: bool
    model: str
    tokenizer: Tokenizer
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, pieces: Sequence[Sequence[Piece]], generations: Sequence[Generation]) -> dict[str, Any]:
        """One body with all answers, each given by its pieces."""
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(part.text for part in parts)
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            logprobs = [entry for part in parts for entry in part.logprobs]
            choices.append(
                self._choice(index, content, logprobs, generations[index], parts[-1].finish_reason)
            )
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._body(kind, choices)
        return {**body, "usage": usage(generations), "timings": timings(generations)}

    def openings(self, num_answers: int) -> list[dict[str, Any]]:
        """The chunks that begin the answers of a chat; a completion has none."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(num_answers if self.chat else 0)
        ]

    def chunk(self, index: int, piece: Piece, offset: int, generation: Generation) -> dict[str, Any]:
        """One piece of a stream. `offset`: characters of the answer's listed tokens before it."""
        content = (
            {"delta": {"content": piece.text} if piece.text else {}} if self.chat else {"text": piece.text}
        )
        return self._chunk(
            [self._choice(index, content, piece.logprobs, generation, piece.finish_reason, offset)]
        )

    def closing(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The chunk with the counts, at the end of a stream."""
        return {**self._chunk([]), "usage": usage(generations), "timings": timings(generations)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._body("chat.completion.chunk" if self.chat else "text_completion", choices)

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: Sequence[TokenLogprob],
        generation: Generation,
        reason: FinishReason | None,
        offset: int = 0,
    ) -> dict[str, Any]:
        listed = None
        if generation.request.top_logprobs is not None:
            entries = [entry for entry in logprobs if self.token_text(entry.token)]
            listed = self._chat_logprobs(entries) if self.chat else self._plain_logprobs(entries, offset)
        return {"index": index, **content, "logprobs": listed, "finish_reason": reason and str(reason)}

    def token_text(self, token: int) -> str:
        """A token's own text; end tokens have none, and are not listed."""
        return self.tokenizer.decode([token])

    def _chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            text = self.token_text(token)
            return {
                "token": text,
                "logprob": value,
                "bytes": None if "\ufffd" in text else list(text.encode()),
            }

        return {
            "content": [
                {**entry(e.token, e.logprob), "top_logprobs": [entry(*pair) for pair in e.top]}
                for e in entries
            ]
        }

    def _plain_logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self.token_text(entry.token) for entry in entries]
        *starts, _ = accumulate(map(len, texts), initial=offset)
        tops = []
        for entry in entries:
            top: dict[str, float] = {}
            for token, value in entry.top:
                top.setdefault(self.token_text(token), value)  # of tokens of one text, the likeliest
            tops.append(top)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": starts,
        }


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Tokens; the prompt, which all answers share, counts once. End tokens are counted."""
    prompt, written = generations[0].num_prompt, sum(len(g.output) for g in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": generations[0].num_cached},
    }


def timings(generations: Sequence[Generation]) -> dict[str, Any]:
    """Times and drafts under llama-server's names; milliseconds, of the first answer."""
    first = generations[0]
    written = len(first.output)
    body: dict[str, Any] = {
        "cache_n": first.num_cached,
        "prompt_n": first.num_prompt - first.num_cached,
        "predicted_n": written,
        "draft_n": sum(g.num_drafted for g in generations),
        "draft_n_accepted": sum(g.num_accepted for g in generations),
    }
    if first.first_token_s is not None and first.last_token_s is not None:
        body["prompt_ms"] = 1000 * (first.first_token_s - first.submitted_s)
        body["predicted_ms"] = 1000 * (first.last_token_s - first.first_token_s)
        if written > 1:
            body["predicted_per_token_ms"] = body["predicted_ms"] / (written - 1)
    return body


def error_body(message: str, kind: str) -> dict[str, Any]:
    """An error as the API has it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def models_body(name: str, created: int, max_context: int) -> dict[str, Any]:
    """The list of models: one."""
    entry = {"id": name, "object": "model", "created": created, "owned_by": "redraft"}
    return {"object": "list", "data": [{**entry, "max_model_len": max_context}]}
