"""Where a model's description comes from: a GGUF file, a directory with a config.json, or the catalogue of
published configurations that comes with the package. Weights are never read, only headers.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from redraft.errors import ConfigError, ModelFileError
from redraft.loading.packaged import BUILT_IN, PACKAGED, resolve
from redraft.loading.safetensors import read_json
from redraft.plan.gguf import spec_from_gguf
from redraft.plan.hf import spec_from_config
from redraft.plan.sizes import TYPE_BYTES, parse_size
from redraft.plan.spec import PlanSpec, WeightGroup

_MAX_HEADER_BYTES = 2**28


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    text = resources.files("redraft.plan").joinpath("catalogue.json").read_text(encoding="utf-8")
    entries: dict[str, dict[str, Any]] = json.loads(text)["models"]
    return entries


def catalogue_names() -> list[str]:
    """The built-in models."""
    return sorted(_catalogue())


def open_spec(model: str | Path, weights: str | None = None) -> PlanSpec:
    """Describe a model: a built-in name, a GGUF file or part of a split one, or a local directory.

    `weights` replaces what is known of their size: `17.5GiB`, or a type such as `q4_k` for a model whose
    number of parameters is known. Raises `ModelFileError` for what is no model, `ConfigError` for `weights`
    that say nothing.
    """
    spec = _open(str(model))
    return spec if weights is None else _with_weights(spec, weights, _parameters(str(model)))


def _open(model: str) -> PlanSpec:
    if model in _catalogue():
        return catalogue_spec(model)
    if model.startswith(("hf:", "http:", "https:")):
        raise ModelFileError(
            f"'{model}': nothing is read from the network; give a local directory or GGUF file, or one of: "
            f"{', '.join(catalogue_names())}"
        )
    path = resolve(model) if model in (*BUILT_IN, *PACKAGED) else Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelFileError(
            f"'{model}' is neither a file, a directory nor a known model; these are known: "
            f"{', '.join(catalogue_names())}"
        )
    return spec_from_gguf(path)


def catalogue_spec(name: str) -> PlanSpec:
    """A built-in model. Its weights are counted from its number of parameters."""
    entry = _catalogue()[name]
    spec = spec_from_config(entry["config"], name=name, source=entry["source"])
    groups = tuple(
        WeightGroup(kind.upper(), int(count * TYPE_BYTES[kind]))
        for kind, count in entry.get("parameters", {}).items()
    )
    return replace(
        spec,
        weights=groups,
        weights_basis="published number of parameters, in the published type",
        remark=entry.get("note", ""),
    )


def _parameters(model: str) -> int:
    entry = _catalogue().get(model, {})
    return sum(entry.get("parameters", {}).values())


def _with_weights(spec: PlanSpec, weights: str, parameters: int) -> PlanSpec:
    kind = weights.lower()
    if kind not in TYPE_BYTES:
        size, basis = parse_size(weights), "size given with --weights"
    elif not parameters:
        raise ConfigError(
            f"--weights {weights}: how many parameters '{spec.name}' has is not known; give a size like 17GiB"
        )
    else:
        size, basis = (
            int(parameters * TYPE_BYTES[kind]),
            "published number of parameters, all in the type given",
        )
    label = kind.upper() if kind in TYPE_BYTES else "as given"
    return replace(spec, weights=(WeightGroup(label, size),), weights_exact=False, weights_basis=basis)


def _open_directory(path: Path) -> PlanSpec:
    spec = spec_from_config(read_json(path / "config.json"), name=path.name, source=str(path))
    totals: dict[tuple[bool, str], int] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, encoding, size in _tensor_sizes(file):
            key = (name.startswith("mtp.") or ".mtp." in name, encoding)
            totals[key] = totals.get(key, 0) + size
    groups = tuple(WeightGroup(encoding, size, mtp) for (mtp, encoding), size in sorted(totals.items()))
    return replace(spec, weights=groups, weights_exact=True)


def _tensor_sizes(file: Path) -> list[tuple[str, str, int]]:
    """Name, encoding and bytes of each tensor, from the header alone."""
    damaged = ModelFileError(f"{file}: no valid safetensors header; the file is damaged: fetch it again")
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8 or (length := struct.unpack("<Q", prefix)[0]) > _MAX_HEADER_BYTES:
            raise damaged
        try:
            header = json.loads(stream.read(length))
            return [
                (name, str(entry["dtype"]), int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]))
                for name, entry in header.items()
                if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise damaged from None
