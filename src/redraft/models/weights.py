"""Named tensors on their way from a file into a model. Every tensor is used exactly once, or an error names
it.

Canonical names are those of GGUF files; a family maps other formats onto them with recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Protocol

import numpy as np

from redraft.config import ComputeType
from redraft.errors import ModelFileError
from redraft.models.layers import Linear, Parallel
from redraft.ops import Array, Matrix, Ops, RawTensor
from redraft.ops.raw import plain


class TensorSource(Protocol):
    """Tensors by name, read on demand."""

    def names(self) -> set[str]:
        """All names."""

    def read(self, name: str) -> RawTensor:
        """One tensor; the name is one of `names()`."""


@dataclass(frozen=True)
class Recipe:
    """How a canonical tensor is made of those of another format."""

    parts: tuple[str, ...]
    combine: Callable[[list[RawTensor]], RawTensor] = lambda parts: parts[0]


def stacked(parts: list[RawTensor]) -> RawTensor:
    """Several tensors of one shape and encoding as one, along a new first axis."""
    first = parts[0]
    data = np.stack([part.data for part in parts])
    return RawTensor(first.name, (len(parts), *first.shape), first.encoding, data)


def elementwise(combine: Callable[..., Array]) -> Callable[[list[RawTensor]], RawTensor]:
    """Combine the flattened float32 values of the parts."""
    return lambda parts: plain(
        parts[0].name, combine(*(part.to_array().ravel() for part in parts)).astype("float32")
    )


class Renamed:
    """A source under canonical names. Tensors that no recipe covers keep their own name, so that they are
    noticed.
    """

    def __init__(self, source: TensorSource, recipes: Mapping[str, Recipe]) -> None:
        self._source = source
        available = source.names()
        self._recipes = {name: r for name, r in recipes.items() if any(part in available for part in r.parts)}
        self._rest = available - {part for recipe in self._recipes.values() for part in recipe.parts}

    def names(self) -> set[str]:
        """Canonical names, and the foreign names left over."""
        return set(self._recipes) | self._rest

    def read(self, name: str) -> RawTensor:
        """Read the parts and combine them."""
        if name in self._rest:
            return self._source.read(name)
        recipe = self._recipes[name]
        missing = [part for part in recipe.parts if part not in self._source.names()]
        if missing:
            raise ModelFileError(f"tensor '{missing[0]}' is missing: the model is incomplete; fetch it again")
        return recipe.combine([self._source.read(part) for part in recipe.parts])


class Weights:
    """Hands tensors to a model, in the form its ops want, and keeps count of bytes and of what was used."""

    def __init__(self, source: TensorSource, ops: Ops, compute: ComputeType) -> None:
        self._source = source
        self._ops = ops
        self._compute = compute
        self._unused = set(source.names())
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        """Whether the tensor is in the file and not used yet."""
        return name in self._unused

    def _take(self, name: str) -> RawTensor:
        if name not in self._unused:
            raise ModelFileError(f"tensor '{name}' is missing: the model is incomplete or of another kind")
        self._unused.remove(name)
        return self._source.read(name)

    def array(self, name: str, *shape: int) -> Array:
        """A small tensor as floats of the compute type; axes of length 1 may differ from the file's."""
        raw = self._take(name)
        if [n for n in raw.shape if n != 1] != [n for n in shape if n != 1]:
            raise _wrong_shape(raw, shape)
        values = raw.to_array(self._compute).reshape(shape)
        self.num_bytes += values.nbytes
        return values

    def optional(self, name: str, *shape: int) -> Array | None:
        """As `array`, or None where the file has no such tensor."""
        return self.array(name, *shape) if self.has(name) else None

    def matrix(self, name: str, *shape: int, row_order: Array | None = None) -> Matrix:
        """A weight matrix [.., N, K]; `row_order` [N] rearranges its rows."""
        return self._pack(self._matrix_rows(name, shape, row_order))

    def _matrix_rows(self, name: str, shape: tuple[int, ...], row_order: Array | None) -> RawTensor:
        raw = self._take(name)
        if raw.shape != shape:
            raise _wrong_shape(raw, shape)
        if row_order is None:
            return raw
        return RawTensor(raw.name, raw.shape, raw.encoding, raw.data.reshape(shape[0], -1)[row_order])

    def _pack(self, raw: RawTensor) -> Matrix:
        packed = self._ops.matrix(raw, self._compute)
        self.num_bytes += self._ops.matrix_bytes(packed)
        return packed

    def linear(
        self,
        name: str,
        num_outputs: int,
        num_inputs: int,
        *,
        row_order: Array | None = None,
        scaled_bias: bool = False,
    ) -> Linear:
        """The matrix `name`.weight with the bias and the scale that the file may have for it.

        With `scaled_bias` the scale multiplies the bias too, as GGUF files mean it in MLPs.
        """
        raw, bias, scale = self._parts(name, num_outputs, num_inputs, row_order, scaled_bias=scaled_bias)
        return Linear(self._ops, self._pack(raw), bias, scale)

    def _parts(
        self, name: str, num_outputs: int, num_inputs: int, row_order: Array | None, *, scaled_bias: bool
    ) -> tuple[RawTensor, Array | None, Array | None]:
        """Weight, bias and scale of one matrix, each taken once."""
        raw = self._matrix_rows(f"{name}.weight", (num_outputs, num_inputs), row_order)
        bias = self.optional(f"{name}.bias", num_outputs)
        scale = self.optional(f"{name}.scale", 1)
        self._unused.discard(
            f"{name}.input_scale"
        )  # calibrates quantized activations, which are not used here
        if bias is not None and row_order is not None:
            bias = bias[row_order]
        if bias is not None and scale is not None and scaled_bias:
            bias = bias * scale
        return raw, bias, scale

    def parallel(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        num_inputs: int,
        *,
        outputs: Sequence[int] | None = None,
        row_orders: Sequence[Array | None] | None = None,
        scaled_bias: bool = False,
    ) -> Parallel:
        """Matrices over one input, neighbours stacked to one where their encodings agree and none has a
        scale.

        Each output is computed by itself, so stacking changes no bit. `outputs`: the widths in which the
        result is wanted, where these are not the matrices' own.
        """
        orders = row_orders or [None] * len(names)
        parts = [
            self._parts(name, size, num_inputs, order, scaled_bias=scaled_bias)
            for name, size, order in zip(names, sizes, orders, strict=True)
        ]
        kinds = [
            (raw.encoding, bias is None, i if scale is not None else -1)
            for i, (raw, bias, scale) in enumerate(parts)
        ]
        linears = [
            self._stacked([part for _, part in group])
            for _, group in groupby(zip(kinds, parts, strict=True), key=itemgetter(0))
        ]
        ends = np.cumsum(outputs or sizes).tolist()
        return Parallel(tuple(linears), tuple(slice(*span) for span in pairwise([0, *ends])))

    def _stacked(self, parts: Sequence[tuple[RawTensor, Array | None, Array | None]]) -> Linear:
        """One product of the rows of all parts, which are alike; of several, none has a scale."""
        raws = [raw for raw, _, _ in parts]
        biases = [bias for _, bias, _ in parts if bias is not None]
        if len(raws) == 1:
            return Linear(self._ops, self._pack(raws[0]), *parts[0][1:])
        rows = np.concatenate([raw.data.reshape(len(raw.data), -1) for raw in raws])
        shape = (sum(raw.shape[0] for raw in raws), raws[0].shape[1])
        stack = self._pack(RawTensor(raws[0].name, shape, raws[0].encoding, rows))
        return Linear(self._ops, stack, np.concatenate(biases) if biases else None)

    def output(self, vocab_size: int, hidden_size: int, embedding: Matrix) -> Linear:
        """The output matrix, or the embedding again where the file has none."""
        if self.has("output.weight"):
            return self.linear("output", vocab_size, hidden_size)
        return Linear(self._ops, embedding)

    def finish(self) -> None:
        """Raise if the file has tensors that the model did not use."""
        if self._unused:
            rest = sorted(self._unused)
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            raise ModelFileError(
                f"tensor '{rest[0]}'{more} has no place in this model: the file is of another kind"
            )


def _wrong_shape(raw: RawTensor, expected: tuple[int, ...]) -> ModelFileError:
    return ModelFileError(
        f"tensor '{raw.name}' has shape {list(raw.shape)}, but its model needs {list(expected)}"
    )
