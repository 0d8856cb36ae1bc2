"""The documentation says what the program does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import redraft

ROOT = Path(__file__).parents[1]
PACKAGE = Path(redraft.__file__).parent


def test_commands_are_documented_as_they_are() -> None:
    spec = importlib.util.spec_from_file_location("make_commands", ROOT / "docs" / "make_commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.rendered(), "run: python docs/make_commands.py"


def test_every_module_has_its_line_in_the_design() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    modules = [path for path in PACKAGE.rglob("*.py") if path.stem not in {"__init__", "__main__"}]
    missing = [m for path in modules if f"`{(m := str(path.relative_to(PACKAGE)))}`" not in design]
    assert missing == []


def test_the_changelog_has_this_version() -> None:
    assert f"## {redraft.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    broken = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert broken == []


def test_the_examples_about_state_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "state.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    names: dict[str, object] = {"MODEL": ROOT / "tests" / "fixtures" / "kimi_k3.gguf"}
    exec(code, names)
    assert {path.name for path in tmp_path.iterdir()} == {"generation.state", "a.state"}
    assert names["runner"].pool.status(0).position == 1  # type: ignore[attr-defined]
