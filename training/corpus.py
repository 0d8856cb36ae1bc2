"""The corpus: sources, tests and documentation of the Python standard library, as CPython installs them."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

HELD_OUT = 33  # one file of so many is never trained on
_SKIPPED = (
    "site-packages",
    "__pycache__",
    "lib2to3/tests/data",
    "encodings/",
    "pydoc_data/",
    "idlelib/idle_test/htest",
)
_MAX_FILE = 400_000  # bytes; larger ones are tables
_NOTICE = re.compile(r"copyright|licen[cs]e|all rights reserved|-\*-|^#!|warranty", re.IGNORECASE)
_COMMON = 4  # a comment or docstring paragraph in so many files is boilerplate
_TEST_MAIN = re.compile(
    r"\nif __name__ == ['\"]__main__['\"]:\n    (unittest\.main|test_main|support\.run_unittest)\(.*\)\n*$"
)


@dataclass(frozen=True)
class Document:
    """A cleaned file: its path in the library, its text, and whether it is held out."""

    path: str
    text: str
    held_out: bool


@dataclass(frozen=True)
class Function:
    """A function or method of a document, without its indentation."""

    name: str
    source: str
    bare: str  # the source without its docstring; empty where nothing else is in it
    head: int  # lines before the docstring or the first statement
    doc: str  # the docstring's first sentence, or empty
    arguments: tuple[str, ...]  # without self and cls
    raises: tuple[str, ...]


def documents(library: Path | None = None) -> list[Document]:
    """Every Python file of the library that is neither a table nor a copy, then its reference texts."""
    root = library or Path(sysconfig.get_path("stdlib"))
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(part in name for part in _SKIPPED) or path.stat().st_size > _MAX_FILE:
            continue
        try:
            text = _tidy(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if len(text) > 200 and text not in seen and not _is_table(text):
            seen.add(text)
            texts[name] = text
    boilerplate = _repeated(texts.values())
    found = [Document(name, _without(text, boilerplate), _held_out(name)) for name, text in texts.items()]
    return found + [Document(f"topics/{name}", text, _held_out(name)) for name, text in _topics()]


def functions(document: Document) -> Iterator[Function]:
    """The functions of a document that a task can be made of: 3 to 40 lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):
            return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        source = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if 3 <= source.count("\n") + 1 <= 40 and len(source) <= 1400 and source.startswith("def "):
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            head = node.body[0].lineno - node.lineno
            yield Function(
                node.name,
                source,
                _bare(source, node, head),
                head,
                re.split(r"(?<=[.!?]) ", doc)[0][:160],
                tuple(a for a in arguments if a not in ("self", "cls")),
                tuple(dict.fromkeys(_raised(node))),
            )


def _bare(source: str, node: ast.FunctionDef, head: int) -> str:
    if ast.get_docstring(node) is None:
        return source
    first, lines = node.body[0], source.split("\n")
    assert first.end_lineno is not None
    return "\n".join(lines[:head] + lines[first.end_lineno - node.lineno + 1 :]) if node.body[1:] else ""


def _raised(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            name = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            if isinstance(name, ast.Name) and name.id[0].isupper():
                yield name.id


def _held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0


def _tidy(text: str) -> str:
    """Without notices at the top, rulers, test mains, tabs and long runs of blank lines."""
    lines = [line.rstrip() for line in text.expandtabs(8).splitlines()]
    while lines and (lines[0].startswith("#") or not lines[0]):
        end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        if end and not any(_NOTICE.search(line) for line in lines[:end]):
            break
        lines = lines[max(end, 1) :]
    lines = [line for line in lines if not re.fullmatch(r"\s*#\s*([-=#*~_ ])\1{5,}\s*#?", line)]
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines).strip("\n") + "\n")
    return _TEST_MAIN.sub("\n", text)


def _is_table(text: str) -> bool:
    """Mostly numbers and quoted scraps instead of code."""
    return sum(c.isalpha() or c.isspace() for c in text) < 0.6 * len(text)


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\n+", text)


def _repeated(texts: Iterator[str] | object) -> set[str]:
    counts = Counter(p for text in texts for p in set(_paragraphs(text)) if len(p) > 80)
    return {paragraph for paragraph, n in counts.items() if n >= _COMMON}


def _without(text: str, boilerplate: set[str]) -> str:
    if not any(p in boilerplate for p in _paragraphs(text)):
        return text
    return "\n\n".join(p for p in _paragraphs(text) if p not in boilerplate)


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield name, re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"
