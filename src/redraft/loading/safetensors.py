"""Hugging Face directories: config.json and the tensors of one or several safetensors files."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from redraft.errors import ModelFileError
from redraft.ops.raw import PLAIN, RawTensor, plain

_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; a model directory needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: must hold a JSON object")
    return value


class SafetensorsDirectory:
    """The tensors of a directory, by name. Files are opened at once and read on demand."""

    def __init__(self, directory: Path, ignored_prefixes: tuple[str, ...] = ()) -> None:
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()
        for path in _files(directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise ModelFileError(f"{path}: damaged or truncated ({error}); fetch it again") from None
            names = [name for name in file.keys() if not name.startswith(ignored_prefixes)]  # noqa: SIM118
            self._files |= dict.fromkeys(names, file)

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._files)

    def read(self, name: str) -> RawTensor:
        """One tensor."""
        values = self._files[name].get_tensor(name)
        if values.dtype not in PLAIN.values():
            raise ModelFileError(
                f"tensor '{name}' is {values.dtype}, which is not supported; use a float checkpoint"
            )
        return plain(name, values)


def _files(directory: Path) -> list[Path]:
    if not (directory / _INDEX).is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise ModelFileError(f"{directory}: holds no .safetensors file")
        return paths
    shards = sorted(set(read_json(directory / _INDEX).get("weight_map", {}).values()))
    for shard in shards:
        if not (directory / shard).is_file():
            raise ModelFileError(
                f"{directory / shard}: this shard is missing; fetch all {len(shards)} of them"
            )
    return [directory / shard for shard in shards]
