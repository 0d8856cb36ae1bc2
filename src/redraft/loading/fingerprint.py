"""Which model is it? A name made of the model's numbers and its weights as the file holds them.

Covered are every field of the spec and, for every tensor, its name, shape, encoding and bytes: all of them up
to 256 KiB, of a larger tensor 64 blocks of 4 KiB, evenly spread, with its first and last. Another model or
another fine-tune differs in far more than the bytes that are skipped; a file altered on purpose may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from redraft.models import ModelSpec
from redraft.ops import RawTensor

_BLOCK_BYTES = 4096
_NUM_BLOCKS = 64


def tensor_digest(tensor: RawTensor) -> str:
    """A hash of a tensor's shape, encoding and bytes, sampled as the module says."""
    digest = hashlib.sha256(f"{tensor.encoding} {list(tensor.shape)}".encode())
    data = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
    if data.size <= _NUM_BLOCKS * _BLOCK_BYTES:
        digest.update(data.tobytes())
        return digest.hexdigest()
    for block in range(_NUM_BLOCKS):
        first = (data.size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1)
        digest.update(data[first : first + _BLOCK_BYTES].tobytes())
    return digest.hexdigest()


def model_fingerprint(spec: ModelSpec, digests: Mapping[str, str]) -> str:
    """One hash of the spec and of the tensors' digests by name."""
    lines = [repr(spec), *(f"{name} {digests[name]}" for name in sorted(digests))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
