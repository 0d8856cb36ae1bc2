"""Agent tasks: what the agent is told, turn by turn. One JSON object a line: docs/tasks.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from redraft.errors import TaskFileError

_TASK_KEYS = {"id", "kind", "system", "turns"}
_TURN_KEYS = {"content", "tool", "random_tokens", "max_tokens", "latency_s"}
_MAX_OUTPUT = 100_000


@dataclass(frozen=True)
class Turn:
    """What the agent is given next, `latency_s` after its last answer, and how long its answer may be.

    `tool` is what a tool printed, `content` what the user says after it; either may be empty. A turn of
    `random_tokens` is that many arbitrary tokens instead.
    """

    content: str
    random_tokens: int
    max_tokens: int
    latency_s: float
    tool: str = ""


@dataclass(frozen=True)
class Task:
    """One job of an agent: its turns follow each other in one conversation."""

    name: str
    kind: str
    system: str
    turns: tuple[Turn, ...]


def builtin_tasks() -> list[Task]:
    """The queue that comes with redraft: coding, rewriting, knowledge, and one task of random tokens."""
    resource = files("redraft.decide").joinpath("queue.jsonl")
    return parse_tasks(resource.read_text(encoding="utf-8").splitlines(), "the built-in queue")


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TaskFileError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise TaskFileError(f"{path}: not UTF-8 text; a task file has one JSON object a line") from None
    return parse_tasks(lines, str(path))


def parse_tasks(lines: Iterable[str], source: str) -> list[Task]:
    """Tasks from lines; an error names the line, the key and what it should be."""
    tasks: list[Task] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            tasks.append(_task(line, f"{source}, line {number}"))
    if not tasks:
        raise TaskFileError(f"{source}: holds no task; it needs one JSON object a line")
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise TaskFileError(f"{source}: two tasks have the id '{name}'; ids must differ")
    return tasks


def _task(line: str, where: str) -> Task:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskFileError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise TaskFileError(f"{where}: a task is a JSON object")
    _known(record, _TASK_KEYS, where)
    turns = record.get("turns")
    if not isinstance(turns, list) or not turns:
        raise TaskFileError(f"{where}: 'turns' must be a list of at least one turn")
    return Task(
        name=_text(record, "id", where),
        kind=_text(record, "kind", where, default="task"),
        system=_text(record, "system", where, default=""),
        turns=tuple(_turn(turn, f"{where}, turn {i}") for i, turn in enumerate(turns, start=1)),
    )


def _turn(record: Any, where: str) -> Turn:
    if not isinstance(record, dict):
        raise TaskFileError(f"{where}: a turn is a JSON object")
    _known(record, _TURN_KEYS, where)
    if bool({"content", "tool"} & set(record)) == ("random_tokens" in record):
        raise TaskFileError(f"{where}: needs either text ('content', 'tool' or both) or 'random_tokens'")
    return Turn(
        content=_text(record, "content", where) if "content" in record else "",
        random_tokens=int(_number(record, "random_tokens", where, 1, _MAX_OUTPUT))
        if "random_tokens" in record
        else 0,
        max_tokens=int(_number(record, "max_tokens", where, 1, _MAX_OUTPUT)),
        latency_s=_number(record, "latency_s", where, 0, 86_400, default=0.0),
        tool=_text(record, "tool", where) if "tool" in record else "",
    )


def _known(record: dict[str, Any], keys: set[str], where: str) -> None:
    for key in record:
        if key not in keys:
            raise TaskFileError(f"{where}: unknown key '{key}'; known are {', '.join(sorted(keys))}")


def _text(record: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if not isinstance(value, str) or (default is None and not value):
        raise TaskFileError(f"{where}: '{key}' must be a text, not {value!r}")
    return value


def _number(
    record: dict[str, Any], key: str, where: str, lowest: float, highest: float, default: float | None = None
) -> float:
    value = record.get(key, default)
    whole = default is None
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not lowest <= value <= highest:
        what = "a whole number" if whole else "a number"
        raise TaskFileError(f"{where}: '{key}' must be {what} from {lowest} to {highest}, not {value!r}")
    return value
