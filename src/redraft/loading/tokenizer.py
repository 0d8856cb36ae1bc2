"""Text to tokens and back: byte-level BPE, from a GGUF file's metadata or a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BaseTokenizer

from redraft.errors import ModelFileError
from redraft.loading.chat import ChatTemplate
from redraft.loading.safetensors import read_json

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF files
_INCOMPLETE = "\ufffd"  # what an unfinished UTF-8 sequence decodes to
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
# How a text is cut before merging, by the `tokenizer.ggml.pre` of the file.
_SPLITS = {
    "llama-bpe": rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER}|{_SPACES}",
    "qwen2": rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_OTHER}|{_SPACES}",
    "kimi-k2": rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENGLISH}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENGLISH}?|\p{{N}}{{1,3}}|{_OTHER}|{_SPACES}",
}
_SPLITS["llama3"] = _SPLITS["llama-bpe"]


class Tokenizer:
    """A tokenizer with what a conversation needs: end tokens and a chat template."""

    def __init__(
        self,
        base: Any,
        *,
        bos_token: int | None,
        eos_tokens: tuple[int, ...],
        add_bos: bool,
        chat_template: str | None,
    ) -> None:
        self._base = base
        self.bos_token = bos_token
        self.eos_tokens = eos_tokens
        self._add_bos = add_bos
        special = {
            "bos_token": self._text_of(bos_token),
            "eos_token": self._text_of(next(iter(eos_tokens), None)),
        }
        self.chat = ChatTemplate(chat_template, special) if chat_template else None

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._base.id_to_token(token) or ""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._base.get_vocab_size())

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and number."""
        return dict(self._base.get_vocab())

    def encode(self, text: str, *, start: bool = True) -> list[int]:
        """Tokens of a text; with `start`, after the token that begins a sequence if the model has one."""
        tokens = [int(t) for t in self._base.encode(text, add_special_tokens=False).ids]
        if start and self._add_bos and self.bos_token is not None and tokens[:1] != [self.bos_token]:
            return [self.bos_token, *tokens]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens have none."""
        return str(self._base.decode(list(tokens), skip_special_tokens=True))


class TextStream:
    """Text of a growing token list, in pieces that are whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._first = 0  # decoding restarts here: far enough back to be in step with the whole text
        self._done = 0  # tokens whose text was handed out

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._first : self._done])
        text = self._tokenizer.decode(self._tokens[self._first :])
        if text.endswith(_INCOMPLETE) and len(self._tokens) - self._done < 8:  # no character has more tokens
            return ""
        self._first, self._done = self._done, len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left when no more tokens come."""
        before = self._tokenizer.decode(self._tokens[self._first : self._done])
        text = self._tokenizer.decode(self._tokens[self._first :])
        self._done = len(self._tokens)
        return text[len(before) :]


def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE (`tokenizer.ggml.model` gpt2) as a GGUF file describes it."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind != "gpt2":
        raise ModelFileError(f"tokenizer kind '{kind}' is not supported; byte-level BPE ('gpt2') is")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    base = BaseTokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    base.pre_tokenizer = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "gpt-2")))
    base.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            base.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            base.add_tokens([AddedToken(token, normalized=False)])
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        base,
        bos_token=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_tokens=tuple(dict.fromkeys(int(token) for token in ends if token is not None)),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _pre_tokenizer(pre: str) -> Any:
    if pre in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre not in _SPLITS:
        supported = ", ".join(["gpt-2", "smollm", *_SPLITS])
        raise ModelFileError(f"tokenizer pre-processing '{pre}' is not supported; these are: {supported}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def from_directory(directory: Path) -> Tokenizer:
    """A Hugging Face directory's tokenizer.json with its configuration files."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file; other kinds of tokenizer are not supported")
    try:
        base = BaseTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise ModelFileError(f"{path}: not a readable tokenizer ({error})") from None
    config = _optional_json(directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    model = _optional_json(directory / "config.json")
    ends = generation.get("eos_token_id", model.get("eos_token_id"))
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    named = _content(config.get("eos_token"))
    if named and (token := base.token_to_id(named)) is not None:
        ends.append(token)
    start = _content(config.get("bos_token"))
    return Tokenizer(
        base,
        bos_token=base.token_to_id(start) if start else None,
        eos_tokens=tuple(dict.fromkeys(int(token) for token in ends)),
        add_bos=bool(config.get("add_bos_token", False)),
        chat_template=_template(directory, config),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template
