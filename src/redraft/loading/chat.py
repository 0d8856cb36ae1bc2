"""Chat templates: a conversation as the text its model was trained on. Jinja, in its sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redraft.errors import RequestError

Message = Mapping[str, str]


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

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """The conversation's text; with `generate`, up to where the assistant's answer begins."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=generate, **self._special)
        except TemplateError as error:
            raise RequestError(f"the model's chat template refuses this conversation: {error}") from None


def _raise(message: str) -> None:
    raise TemplateError(message)
