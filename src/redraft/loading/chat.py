"""Chat templates: a conversation as the text its model was trained on. Jinja, in its sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redraft.errors import RequestError

Message = Mapping[str, str]
_PROBE = "@@TOOL@@"


class ChatTemplate:
    """Renders messages, each with a `role` and a `content`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RequestError(f"the model's chat template cannot be read: {error}") from None

    @cached_property
    def has_tools(self) -> bool:
        """Whether a tool's output can be a message of its own, right after an answer."""
        turns = [("user", "a"), ("assistant", "b"), ("tool", _PROBE), ("user", "c")]
        try:
            return _PROBE in self.render([{"role": role, "content": text} for role, text in turns])
        except RequestError:
            return False

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """The conversation's text; with `generate`, up to where the assistant's answer begins."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=generate, **self._special)
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from None


def _raise(message: str) -> None:
    raise TemplateError(message)
