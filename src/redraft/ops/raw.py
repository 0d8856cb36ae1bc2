"""A tensor as a file holds it: bytes and an encoding. An implementation of the ops decides what to make of
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
BLOCK_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class RawTensor:
    """`data` holds a tensor of `shape` in `encoding`: an array of that type, or rows of quantized blocks
    (uint8).
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    data: NDArray[Any]

    def to_array(self, dtype: str = "float32") -> NDArray[Any]:
        """All values, dequantized, as a new C-contiguous array of `shape`."""
        if self.encoding in PLAIN:
            values = self.data.reshape(self.shape)
        else:
            values = dequantize(self.data, GGMLQuantizationType[self.encoding]).reshape(self.shape)
        return np.array(values, dtype=dtype, order="C")


def plain(name: str, values: NDArray[Any]) -> RawTensor:
    """An array of floats as a `RawTensor`."""
    encoding = next(code for code, kind in PLAIN.items() if values.dtype == kind)
    return RawTensor(name, values.shape, encoding, values)
