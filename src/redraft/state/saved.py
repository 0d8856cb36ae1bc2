"""Saved state: a slot's committed value and its tokens as bytes, checked to the last one when read back.

The layout, little-endian: magic, version, total length, header length; the header (JSON); the arrays in the
order of its table; a SHA-256 of all that precedes. The value is the policy's committed one with nothing
pending, so that it may be restored under another policy, depth or number of slots. It goes on with the same
bytes where the engine's own promise holds: on one build and kind of processor, whose operations it names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from redraft.config import EngineConfig
from redraft.errors import StateError
from redraft.ops import Array
from redraft.state.slots import Committed

MAGIC = b"REDRAFT\0"
VERSION = 1
_PRELUDE = struct.Struct("<8sIQQ")  # magic, version, total length, header length
_CHECKSUM_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class SavedState:
    """What is saved. `value` has consumed the first `value.position` of `tokens`; `about` is whatever the
    engine has to know of the sequence, as JSON can hold it.
    """

    fingerprint: str  # of the model
    arithmetic: str  # of the operations: see `Ops.arithmetic`
    kv_type: str
    compute: str
    tokens: list[int]
    value: Committed
    about: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """The saved form."""
        arrays = {"tokens": np.asarray(self.tokens, np.int64), **self.value.arrays}
        header = {
            "fingerprint": self.fingerprint,
            "arithmetic": self.arithmetic,
            "kv_type": self.kv_type,
            "compute": self.compute,
            "position": self.value.position,
            "about": self.about,
            "arrays": [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()],
        }
        text = json.dumps(header).encode()
        body = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
        total = _PRELUDE.size + len(text) + len(body) + _CHECKSUM_BYTES
        data = _PRELUDE.pack(MAGIC, VERSION, total, len(text)) + text + body
        return data + hashlib.sha256(data).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> SavedState:
        """Read the saved form back. Raises `StateError` if it is anything else than what `to_bytes` wrote."""
        header_bytes = _checked_header_length(data)
        first = _PRELUDE.size + header_bytes
        header = json.loads(data[_PRELUDE.size : first])
        arrays: dict[str, Array] = {}
        for name, dtype, shape in header["arrays"]:
            count = math.prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, offset=first).reshape(shape)
            first += arrays[name].nbytes
        tokens = arrays.pop("tokens").tolist()
        value = Committed(header["position"], arrays)
        return cls(
            header["fingerprint"], header["arithmetic"], header["kv_type"], header["compute"],
            tokens, value, header["about"],
        )  # fmt: skip

    def require(self, fingerprint: str, arithmetic: str, config: EngineConfig) -> None:
        """Raise `StateError` unless the state belongs to this model, these operations and these types."""
        if self.fingerprint != fingerprint:
            raise StateError(
                f"the saved state belongs to another model ({self.fingerprint[:12]}, "
                f"not {fingerprint[:12]}): load the model that it was saved with"
            )
        if self.arithmetic != arithmetic:
            raise StateError(
                f"the saved state was computed by '{self.arithmetic}' operations, which give other bits than "
                f"'{arithmetic}': set REDRAFT_OPS or REDRAFT_ISA, or evaluate the tokens again"
            )
        for name, saved, own in (
            ("KV", self.kv_type, config.kv_type),
            ("compute", self.compute, config.compute),
        ):
            if saved != own:
                raise StateError(
                    f"the saved state has {name} type {saved}, the engine {own}: "
                    f"start the engine with {name} type {saved}"
                )


def _checked_header_length(data: bytes) -> int:
    if data[: len(MAGIC)] != MAGIC:
        raise StateError("the data is not a saved state: it does not begin with its mark")
    if len(data) < _PRELUDE.size:
        raise StateError(f"the saved state is truncated after {len(data)} bytes: save it again")
    _, version, total, header_bytes = _PRELUDE.unpack_from(data)
    if version != VERSION:
        raise StateError(
            f"the saved state has version {version}, but this program reads version {VERSION}: save it again"
        )
    if len(data) != total:
        raise StateError(
            f"the saved state has {len(data)} bytes where {total} were written: it is truncated or damaged; "
            "save it again"
        )
    if hashlib.sha256(data[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise StateError("the saved state is damaged: its checksum differs; save it again")
    return int(header_bytes)


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old content or the new."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                temporary.chmod(0o666 & ~_umask())  # temporary files are for their owner alone
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise StateError(f"{path} cannot be written: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def read_file(path: Path) -> bytes:
    """The bytes of a saved state's file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}") from None
