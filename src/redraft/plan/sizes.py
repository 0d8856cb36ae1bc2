"""Sizes as people write and read them, and how many bytes a number takes in each storage type."""

from __future__ import annotations

import re
from fractions import Fraction

from redraft.errors import ConfigError

MIB, GIB = 2**20, 2**30

_UNITS = {
    "": 1, "B": 1,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip

# Bytes a number. Quantized types are blocks of numbers with their scales, after ggml's definitions.
TYPE_BYTES = {
    "float32": Fraction(4), "f32": Fraction(4), "float16": Fraction(2), "f16": Fraction(2),
    "bfloat16": Fraction(2), "bf16": Fraction(2), "fp8": Fraction(1), "int8": Fraction(1),
    "q8_0": Fraction(34, 32), "q6_k": Fraction(210, 256), "q5_k": Fraction(176, 256),
    "q5_1": Fraction(24, 32), "q5_0": Fraction(22, 32), "q4_k": Fraction(144, 256),
    "q4_1": Fraction(20, 32), "q4_0": Fraction(18, 32), "iq4_nl": Fraction(18, 32),
    "mxfp4": Fraction(17, 32), "nvfp4": Fraction(9, 16),
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes from text such as `24GiB`, `512M` (binary) or `80GB` (decimal).

    Raises `ConfigError` for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ConfigError(f"'{text}' is no size; write it like 24GiB, 512MiB or 80GB")
    return int(Fraction(match[1]) * unit)


def mib(num_bytes: int | Fraction) -> str:
    """MiB with two decimals, as llama.cpp prints them (halves of an exact binary value round to even)."""
    return f"{float(num_bytes / MIB):.2f}"


def gib(num_bytes: int | Fraction) -> str:
    """GiB with two decimals, as SGLang prints them under the name GB."""
    return f"{float(num_bytes / GIB):.2f}"


def human(num_bytes: int | Fraction) -> str:
    """A size for a sentence or a table: one decimal, in GiB from 0.1 GiB on."""
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= (unit if unit != GIB else GIB / 10):
            return f"{float(num_bytes / unit):.1f} {name}"
    return f"{float(num_bytes / 2**10):.1f} KiB"


def pad(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit
