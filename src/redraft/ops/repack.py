"""Encodings that the native products do not read, brought into one they do, near their size on disk."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from redraft.ops.raw import RawTensor

PACKED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
_SUPER = 256  # weights in a block of a K-quant


def packable(raw: RawTensor) -> RawTensor:
    """The tensor itself, or in place of Q4_K: Q4_1 with the same 4-bit numbers, scales and minima rounded to
    half precision; in place of Q5_K and Q6_K: Q8_0, each weight rounded to 1/127 of its group's largest.
    """
    if raw.encoding in PACKED:
        return raw
    if raw.encoding == "Q4_K":
        return RawTensor(raw.name, raw.shape, "Q4_1", q4_1_from_q4_k(raw.data, raw.shape))
    if raw.encoding in ("Q5_K", "Q6_K"):
        data = gguf.quants.quantize(raw.to_array(), gguf.GGMLQuantizationType.Q8_0)
        return RawTensor(raw.name, raw.shape, "Q8_0", data)
    return RawTensor(raw.name, raw.shape, "F32", raw.to_array())


def q4_1_from_q4_k(data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Blocks of Q4_K [.., 144·n] as blocks of Q4_1 [.., 160·n]: value = d·q + m for each group of 32."""
    blocks = data.reshape(-1, 144)
    d, dmin = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))  # [n, 1]
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)  # [n, 8]
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=1)
    pairs = blocks[:, 16:].reshape(-1, 4, 32)  # a byte holds weight j of two groups
    numbers = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8, 32)
    out = np.empty((len(blocks), 8, 20), np.uint8)
    out[:, :, :2] = (d * scales).astype(np.float16)[:, :, None].view(np.uint8)
    out[:, :, 2:4] = (-dmin * minima).astype(np.float16)[:, :, None].view(np.uint8)
    out[:, :, 4:] = numbers[:, :, :16] | numbers[:, :, 16:] << 4
    return out.reshape(*shape[:-1], shape[-1] // _SUPER * 160)
