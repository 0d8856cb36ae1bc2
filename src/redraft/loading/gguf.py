"""GGUF files: the header is parsed here, in milliseconds and without touching the weights; the weights are
mapped.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from redraft.errors import ModelFileError
from redraft.ops.raw import BLOCK_QUANTIZED, PLAIN, RawTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` bytes into `file`."""

    name: str
    shape: tuple[int, ...]  # outermost axis first
    encoding: str
    file: Path
    offset: int
    num_bytes: int


class _Cursor:
    """Reads the header's values one after another."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self._data = data.data
        self._path = path
        self.at = 0

    def take(self, length: int) -> memoryview:
        if length < 0 or self.at + length > len(self._data):
            raise ModelFileError(
                f"{self._path}: the file ends inside its header: it is truncated; fetch it again"
            )
        self.at += length
        return self._data[self.at - length : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                code = f"<{count}{_SCALARS[inner]}"
                return list(struct.unpack(code, self.take(count * struct.calcsize(f"<{_SCALARS[inner]}"))))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise ModelFileError(
                f"{self._path}: value type {kind} in the header is unknown: the file is damaged"
            )
        return self.scalar(_SCALARS[kind])


class GGUFFile:
    """Metadata and tensors of a GGUF file, or of all parts of a split one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, NDArray[np.uint8]] = {}
        for part in _parts(path):
            self._read_header(part)

    def _read_header(self, path: Path) -> None:
        if path.stat().st_size < 24:
            raise ModelFileError(f"{path}: {path.stat().st_size} bytes are no GGUF file")
        data = np.memmap(path, np.uint8, "r")
        self._maps[path] = data
        cursor = _Cursor(data, path)
        if bytes(cursor.take(4)) != b"GGUF":
            raise ModelFileError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise ModelFileError(f"{path}: GGUF version {version} is not supported; 2 and 3 are")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [self._tensor_header(cursor, path) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelFileError(f"{path}: 'general.alignment' is {alignment!r}: the file is damaged")
        start = math.ceil(cursor.at / alignment) * alignment
        for info in infos:
            end = start + info.offset + info.num_bytes
            if end > len(data):
                raise ModelFileError(
                    f"{path}: tensor '{info.name}' ends at byte {end}, but the file has {len(data)}: "
                    "it is truncated; fetch it again"
                )
            self.tensors[info.name] = TensorInfo(
                info.name, info.shape, info.encoding, path, start + info.offset, info.num_bytes
            )
        self.metadata = metadata | self.metadata  # the first part describes the model

    def _tensor_header(self, cursor: _Cursor, path: Path) -> TensorInfo:
        name, num_axes = cursor.string(), cursor.scalar("I")
        shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_axes)]))
        kind, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise ModelFileError(f"{path}: tensor '{name}' has the unknown type {kind}") from None
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise ModelFileError(
                f"{path}: tensor '{name}' of shape {list(shape)} does not fit {quantization.name} blocks"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        return TensorInfo(name, shape, quantization.name, path, offset, num_bytes)

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self.tensors)

    def read(self, name: str) -> RawTensor:
        """A tensor, mapped from the file."""
        info = self.tensors[name]
        data = self._maps[info.file][info.offset : info.offset + info.num_bytes]
        if info.encoding in PLAIN:
            return RawTensor(
                name, info.shape, info.encoding, data.view(PLAIN[info.encoding]).reshape(info.shape)
            )
        if info.encoding not in BLOCK_QUANTIZED:
            supported = ", ".join([*PLAIN, *BLOCK_QUANTIZED])
            raise ModelFileError(
                f"tensor '{name}' is {info.encoding}, which is not supported; these are: {supported}"
            )
        rows = math.prod(info.shape[:-1])
        return RawTensor(
            name, info.shape, info.encoding, data.reshape(*info.shape[:-1], info.num_bytes // rows)
        )


def _parts(path: Path) -> list[Path]:
    """The file, or all parts of a split model, whichever part was named."""
    match = _SHARD.match(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelFileError(f"{part}: this part of the split model is missing; fetch all {count} parts")
    return parts
