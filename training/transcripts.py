"""Conversations in the world of the built-in agent queue, made of functions of the corpus: write, fix,
rewrite, quote, answer.

Each is a list of messages with a role and a content. The wording is the one that decide/queue.jsonl uses.
"""

from __future__ import annotations

import ast
import io
import keyword
import random
import re
import tokenize
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from corpus import Function

Messages = list[dict[str, str]]

SYSTEMS = {
    "coding": "You are a coding agent. Answer with code only.",
    "rewriting": "You are an editing agent. Print only the edited text.",
    "knowledge": "You are a research agent. Answer in one short sentence.",
}
_NEW_NAMES = """
    item value entry result total count index left right source target parts rows line word name key buffer
    limit size start end first last current other path text data node found number state step queue basket
    table record field
""".split()  # noqa: SIM905 (fifty quoted names would take fifty lines)


class UnsuitableError(Exception):
    """This function cannot be used in this way."""


def conversation(source: random.Random, function: Function, others: list[Function]) -> Messages:
    """One to three turns about one function; `others` are further functions to be shown beside it."""
    kind = source.choices(["coding", "rewriting", "knowledge"], [4, 5, 3])[0]
    openings = {
        "coding": [_write, _complete, _fix, _document],
        "rewriting": [_rename, _rename, _replace, _shorten, _repeat, _quote],
        "knowledge": [_arguments, _purpose, _raises, _which],
    }[kind]
    messages: Messages = []
    if source.random() < 0.9:
        messages.append({"role": "system", "content": SYSTEMS[kind]})
    text = function.source
    for turn in range(source.choice([1, 2, 2, 3])):
        makers = list(openings) if turn == 0 else [_rename, _replace, _quote, _arguments, _raises, _repeat]
        source.shuffle(makers)
        made = _first_suitable(makers, Scene(source, function, text, others, turn))
        if made is None:
            break
        request, answer, text = made
        if turn and source.random() < 0.6:
            messages.append({"role": "tool", "content": _tool_output(source, function)})
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": answer})
    return messages if messages and messages[-1]["role"] == "assistant" else []


@dataclass(frozen=True)
class Scene:
    """What a turn is made of."""

    source: random.Random
    function: Function
    text: str  # the snippet as it stands
    others: list[Function]
    turn: int  # from 0


Made = tuple[str, str, str]  # request, answer, the snippet from now on
Maker = Callable[[Scene], Made]


def _first_suitable(makers: list[Maker], scene: Scene) -> Made | None:
    for make in makers:
        with suppress(UnsuitableError):
            return make(scene)
    return None


def _tool_output(source: random.Random, function: Function) -> str:
    name = function.name.strip("_")
    passed, time = source.randint(1, 24), f"0.{source.randint(1, 40):02d}"
    return source.choice(
        [
            f"$ python -m pytest -q test_{name}.py\n{'.' * passed}\n{passed} passed in {time}s",
            f"$ python -m unittest -q\nRan {passed} tests in {time}s\n\nOK",
            "$ python -m pyflakes snippet.py",
            f"$ grep -c {function.name} snippet.py\n1",
        ]
    )


def _shown(request: str, text: str, turn: int) -> str:
    """The request with the snippet, which later turns have seen already."""
    if turn == 0:
        return f"{request}\n\n{text}"
    return (
        "Now " + request[0].lower() + request[1:].replace("this snippet", "it").replace("this function", "it")
    )


def _signature(text: str) -> str:
    match = re.match(r"def (.*?)(?: ->.*)?:\n", text)
    if match is None:
        raise UnsuitableError
    return match[1]


def _need(condition: object) -> None:
    if not condition:
        raise UnsuitableError


def _write(scene: Scene) -> Made:
    _need(scene.function.doc and len(scene.text) < 900)
    return f"Write the function {_signature(scene.text)}. {scene.function.doc}", scene.text, scene.text


def _complete(scene: Scene) -> Made:
    lines = scene.text.split("\n")
    _need(len(lines) >= 4)
    shown = "\n".join(lines[: scene.source.randint(1, max(1, len(lines) // 2))])
    return f"Complete this function.\n\n{shown}", scene.text, scene.text


def _fix(scene: Scene) -> Made:
    broken, error = scene.source.choice([_drop_colon, _misspell])(scene.source, scene.text)
    return f"Fix this function.\n\n{broken}\n\n{error}", scene.text, scene.text


def _drop_colon(source: random.Random, text: str) -> tuple[str, str]:
    lines = text.split("\n")
    ends = [
        i for i, line in enumerate(lines) if re.match(r" *(if|for|while|elif|else|try|with|def)\b.*:$", line)
    ]
    _need(ends)
    at = source.choice(ends)
    lines[at] = lines[at][:-1]
    return "\n".join(lines), f"  line {at + 1}\n    {lines[at].strip()}\nSyntaxError: expected ':'"


def _misspell(source: random.Random, text: str) -> tuple[str, str]:
    name = source.choice(_local_names(text))
    uses = [m.start() for m in re.finditer(rf"(?<![\w.'\"]){name}\b", text)][1:]
    _need(len(name) > 3 and uses)
    at, cut = source.choice(uses), source.randrange(1, len(name))
    wrong = name[:cut] + name[cut + 1 :]
    _need(wrong.isidentifier() and not keyword.iskeyword(wrong) and wrong not in text)
    broken = text[:at] + wrong + text[at + len(name) :]
    return broken, f"NameError: name '{wrong}' is not defined. Did you mean: '{name}'?"


def _document(scene: Scene) -> Made:
    function = scene.function
    _need(function.doc and '"' not in function.doc and function.bare)
    _need(_parse(function.bare))
    lines = function.bare.split("\n")
    described = "\n".join([*lines[: function.head], f'    """{function.doc}"""', *lines[function.head :]])
    request = f'Add the docstring "{function.doc}" to this function.'
    return _shown(request, function.bare, 0), described, described


def _rename(scene: Scene) -> Made:
    names = _local_names(scene.text)
    old = scene.source.choice(names)
    new = scene.source.choice([n for n in _NEW_NAMES if not re.search(rf"\b{n}\b", scene.text)])
    renamed = re.sub(rf"(?<![\w.]){old}\b(?!\s*=[^=].*[,)]$)", new, scene.text)
    _need(renamed != scene.text and not re.search(rf"\b{old}\b", renamed))
    return _shown(f"Rename {old} to {new} in this snippet.", scene.text, scene.turn), renamed, renamed


def _replace(scene: Scene) -> Made:
    constants = [
        t
        for t in _tokens(scene.text)
        if t.type == tokenize.NUMBER or (t.type == tokenize.STRING and 3 < len(t.string) < 24)
    ]
    _need(constants)
    old = scene.source.choice(constants).string
    if old[0] in "'\"":
        new = old[0] + scene.source.choice(_NEW_NAMES) + old[0]
        _need(old[-1] == old[0])
    else:
        new = str(
            scene.source.choice(
                [0, 1, 2, 3, 5, 8, 10, 12, 16, 20, 30, 50, 64, 100, 128, 200, 500, 1000, 1024, 8080]
            )
        )
    changed = re.sub(rf"(?<![\w.]){re.escape(old)}(?![\w.])", lambda _: new, scene.text)
    _need(changed != scene.text)
    return _shown(f"Replace {old} by {new} in this snippet.", scene.text, scene.turn), changed, changed


def _shorten(scene: Scene) -> Made:
    lines = scene.text.split("\n")
    kept = [line for line in lines if not line.strip().startswith("#")]
    _need(len(kept) < len(lines))
    return (
        _shown("Remove the comments from this snippet.", scene.text, scene.turn),
        "\n".join(kept),
        "\n".join(kept),
    )


def _repeat(scene: Scene) -> Made:
    return (
        _shown("Print this snippet again without any change.", scene.text, scene.turn),
        scene.text,
        scene.text,
    )


def _quote(scene: Scene) -> Made:
    words = sorted(set(re.findall(r"[A-Za-z_]{3,}", scene.text)))
    word = scene.source.choice(words)
    lines = [line for line in scene.text.split("\n") if re.search(rf"\b{word}\b", line)]
    _need(lines and len(lines) <= 8)
    return (
        _shown(f"Quote the lines of this snippet that contain {word}.", scene.text, scene.turn),
        "\n".join(lines),
        scene.text,
    )


def _arguments(scene: Scene) -> Made:
    _need(scene.turn == 0 or f"def {scene.function.name}(" in scene.text)
    names = _arguments_of(scene.text)
    if not names:
        answer = f"{scene.function.name} takes no arguments."
    elif len(names) == 1:
        answer = f"{scene.function.name} takes one argument: {names[0]}."
    else:
        answer = (
            f"{scene.function.name} takes {len(names)} arguments: {', '.join(names[:-1])} and {names[-1]}."
        )
    return (
        _shown(f"Which arguments does {scene.function.name} take?", scene.text, scene.turn),
        answer,
        scene.text,
    )


def _purpose(scene: Scene) -> Made:
    _need(scene.function.doc)
    shown = _together(scene.source, scene.text, [f for f in scene.others if f.doc][:1])
    return f"What does {scene.function.name} do?\n\n{shown}", scene.function.doc, scene.text


def _raises(scene: Scene) -> Made:
    _need(scene.function.raises)
    answer = f"{scene.function.name} raises {' and '.join(scene.function.raises)}."
    return (
        _shown(f"Which exceptions does {scene.function.name} raise?", scene.text, scene.turn),
        answer,
        scene.text,
    )


def _which(scene: Scene) -> Made:
    others = [f for f in scene.others if len(f.source) < 600][:2]
    _need(others and len(scene.text) < 800)
    everywhere = "\n".join(f.source for f in others)
    words = sorted(
        {
            w
            for w in re.findall(r"[A-Za-z_]{4,}", scene.text)
            if w not in everywhere and w != scene.function.name
        }
    )
    _need(words and scene.function.name not in everywhere)
    shown = _together(scene.source, scene.text, others)
    word = scene.source.choice(words)
    return (
        f"Which function uses {word}?\n\n{shown}",
        f"{scene.function.name} uses {word}.",
        shown,
    )


def _together(source: random.Random, text: str, others: list[Function]) -> str:
    pieces = [text, *(f.source for f in others)]
    source.shuffle(pieces)
    return "\n\n".join(pieces)


def _parse(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError:
        raise UnsuitableError from None


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    try:
        return iter(list(tokenize.generate_tokens(io.StringIO(text).readline)))
    except (tokenize.TokenError, IndentationError):
        raise UnsuitableError from None


def _arguments_of(text: str) -> list[str]:
    arguments = _parse(text).body[0].args  # type: ignore[attr-defined]
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _local_names(text: str) -> list[str]:
    """Names that the snippet itself binds, each used at least twice."""
    bound = {n.id for n in ast.walk(_parse(text)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = sorted(
        n for n in bound | set(_arguments_of(text)) if len(re.findall(rf"\b{n}\b", text)) > 1 and len(n) > 1
    )
    _need(names)
    return names
