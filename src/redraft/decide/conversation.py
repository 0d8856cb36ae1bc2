"""A task as tokens. A turn's prompt is every token of the conversation so far, so that a slot can keep its
state.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from redraft.decide.tasks import Task, Turn
from redraft.errors import RequestError
from redraft.loading import Tokenizer

_ANSWER = "@@ANSWER@@"  # stands for the agent's text while a template is taken apart


class Conversation:
    """Makes prompts of a task, by the model's chat template or, where it has none, by plain lines."""

    def __init__(self, task: Task, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def first(self) -> list[int]:
        """The prompt of the first turn."""
        turn = self._task.turns[0]
        if turn.random_tokens:
            return self._random(turn, 0)
        return self._encoder().encode(self._opening(turn))

    def following(self, index: int, tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
        """The prompt of turn `index`, after `tokens`: the last prompt and the agent's answer."""
        turn = self._task.turns[index]
        so_far = list(tokens[:-1] if tokens[-1] in ends else tokens)  # the template has the end token again
        if turn.random_tokens:
            return so_far + self._random(turn, index)
        return so_far + self._encoder().encode(self._between(turn), start=False)

    def max_tokens(self) -> int:
        """The most tokens the conversation can reach."""
        turns = self._task.turns
        texts = [self._random(turn, i) if turn.random_tokens else None for i, turn in enumerate(turns)]
        lengths = [
            len(text) if text is not None
            else len(self._encoder().encode(self._opening(turn) if i == 0 else self._between(turn)))
            for i, (turn, text) in enumerate(zip(turns, texts, strict=True))
        ]  # fmt: skip
        return sum(lengths) + sum(turn.max_tokens for turn in turns)

    def _encoder(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                f"task '{self._task.name}' is text, but the model has no tokenizer: use random_tokens"
            )
        return self._tokenizer

    def _random(self, turn: Turn, index: int) -> list[int]:
        source = random.Random(f"{self._task.name}/{index}")
        return [source.randrange(self._vocab_size) for _ in range(turn.random_tokens)]

    def _messages(self, turn: Turn) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._task.system}] if self._task.system else []
        return [*system, *self._said(turn)]

    def _said(self, turn: Turn) -> list[dict[str, str]]:
        """A turn's messages; where the template has no tools, the user hands their output over."""
        chat = self._encoder().chat
        roles = {"tool": turn.tool, "user": turn.content}
        if turn.tool and (chat is None or not chat.has_tools):
            roles = {"user": "\n\n".join(text for text in (turn.tool, turn.content) if text)}
        return [{"role": role, "content": text} for role, text in roles.items() if text]

    def _opening(self, turn: Turn) -> str:
        chat = self._encoder().chat
        if chat is None:
            return "\n".join(message["content"] for message in self._messages(turn)) + "\n"
        return chat.render(self._messages(turn))

    def _between(self, turn: Turn) -> str:
        """What stands between the agent's answer and its next one."""
        chat = self._encoder().chat
        if chat is None:
            return "\n" + "".join(f"{message['content']}\n" for message in self._said(turn))
        opening = self._messages(self._task.turns[0])
        answered = [
            *opening,
            {"role": "assistant", "content": _ANSWER},
            *self._said(turn),
        ]
        _, found, rest = chat.render(answered).partition(_ANSWER)
        if not found:
            raise RequestError(
                "the model's chat template does not keep the assistant's text, so turns cannot follow"
            )
        return rest
