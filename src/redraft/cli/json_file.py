"""A command's figures as a JSON file, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from redraft.errors import ConfigError
from redraft.state.saved import write_file


def require_writable(target: Path) -> None:
    """Raise now if the figures cannot be written later."""
    if str(target) != "-" and (target.is_dir() or not os.access(target.parent, os.W_OK)):
        raise ConfigError(f"cannot write {target}: name a file in a folder that exists and is writable")


def write_json(target: Path, figures: Mapping[str, Any]) -> None:
    """Write figures to a file, or to stdout for '-'. Raises `StateError` if it cannot be written."""
    text = json.dumps(figures, indent=2)
    if str(target) == "-":
        typer.echo(text)
        return
    write_file(target, f"{text}\n".encode())
