"""Imports go downward only, and a model knows nothing but ops and its view of state."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import redraft

ROOT = Path(redraft.__file__).parent
# From the bottom up. A module may import its own package and those of lower rank.
RANKS = [
    {"errors", "config"},
    {"ops", "_native"},
    {"models"},
    {"state", "loading"},
    {"runner"},
    {"speculate"},
    {"engine"},
    {"decide", "plan", "serve", "verify"},
    {"cli"},
]
FORBIDDEN = {"plan": {"engine", "speculate"}, "state": {"loading"}, "loading": {"state"}}


def _rank(package: str) -> int:
    return next(i for i, rank in enumerate(RANKS) if package in rank)


def _package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("redraft"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("redraft.")}
    return found


def violations(path: Path, package: str) -> list[str]:
    """Imports of `path` that a module of `package` may not have."""
    found = _imports(path) - {package, "__version__"}
    if package == "errors":
        return sorted(found)
    upward = {name for name in found if _rank(name) > _rank(package)}
    sideways = {name for name in found if _rank(name) == _rank(package) and _rank(package) == _rank("decide")}
    return sorted(upward | sideways | (found & FORBIDDEN.get(package, set())))


MODULES = [
    path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in {"runner", "config", "errors"}
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    assert violations(path, _package(path)) == []


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(
        "from redraft.engine import Engine\nfrom redraft.decide.tasks import Task\n"
    )
    assert violations(tmp_path / "bad.py", "state") == ["decide", "engine"]
    assert violations(tmp_path / "bad.py", "serve") == ["decide"]


def test_the_state_is_committed_in_one_place() -> None:
    """Law: `commit` of a runner or drafter is called from Engine._commit alone (a drafter forwards to its
    runner). `verify` tests the law, and drives a runner by hand in one place of its own.
    """
    callers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "commit"
        if _package(path) not in {"runner", "state"}
    ]
    assert sorted(caller.split(":")[0] for caller in callers) == [
        "engine/engine.py", "speculate/drafters.py", "verify/trial.py",
    ]  # fmt: skip


def test_states_are_written_and_rolled_back_in_one_place() -> None:
    """Above the runner, a committed state is replaced or taken back by the handover between steps alone (a
    drafter forwards to its runner; `_restart` resets what an interrupted pass has torn).
    """
    callers = {
        (str(path.relative_to(ROOT)), node.func.attr)
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if (node.func.attr == "rollback" or ast.unparse(node.func).endswith(("pool.write", "pool.reset")))
        if _package(path) not in {"runner", "state", "verify"}  # the validator drives a runner of its own
    }
    assert callers == {
        ("engine/engine.py", "reset"),
        ("engine/handover.py", "reset"),
        ("engine/handover.py", "rollback"),
        ("engine/handover.py", "write"),
        ("speculate/drafters.py", "reset"),
        ("speculate/drafters.py", "rollback"),
    }
