"""Write docs/commands.md from the command line's own definitions.

python docs/make_commands.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from redraft.cli import app

TARGET = Path(__file__).with_name("commands.md")


def rendered() -> str:
    """The page."""
    root: Any = typer.main.get_command(app)
    parts = ["# Commands\n", "Made by `python docs/make_commands.py` from what `--help` shows.\n"]
    for name, command in root.commands.items():
        parts += [
            f"## redraft {name}\n",
            f"{command.help.strip()}\n",
            "| option | default | |",
            "|---|---|---|",
        ]
        parts += [_row(parameter) for parameter in command.params if parameter.name != "help"]
        parts.append("")
    return "\n".join(parts)


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{option}`" for option in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    unset = parameter.default is None or parameter.default is False
    default = "" if unset or callable(parameter.default) else f"`{parameter.default}`"
    return f"| {names} | {default} | {parameter.help or ''} |"


if __name__ == "__main__":
    TARGET.write_text(rendered(), encoding="utf-8")
