"""Differentiable operations around kernels.cpp, which is compiled when first used: the delta rule, short
convolutions, SiTU, chosen experts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-ffast-math",
    "-shared",
    "-fPIC",
    "-pthread",
]


@cache
def _library() -> ctypes.CDLL:
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(_FLAGS).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"redraft-kernels-{os.getuid()}-{digest}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        subprocess.run([os.environ.get("CXX", "g++"), *_FLAGS, str(_SOURCE), "-o", str(part)], check=True)
        part.replace(path)
    return ctypes.CDLL(str(path))


def _call(name: str, shape: Sequence[int], *tensors: Tensor) -> int:
    sizes = [ctypes.c_long(n) for n in (*shape, torch.get_num_threads())]
    return int(getattr(_library(), name)(*sizes, *(ctypes.c_void_p(t.data_ptr()) for t in tensors)))


def _kind(x: Tensor) -> str:
    return {torch.bfloat16: "bfloat", torch.float32: "float"}[x.dtype]


def _chunks(time: int) -> int:
    return -(-time // _library().chunk_tokens())


@torch.library.custom_op("redraft::delta_rule", mutates_args=())
def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, heads, width = q.shape
    o, u = torch.empty_like(q), torch.empty_like(q)
    starts = q.new_empty(batch, heads, _chunks(time), width, width)
    if _call("delta_forward", q.shape, q, k, v, g, beta, o, u, starts):
        raise ValueError(f"heads of {width} channels are not compiled; 32 and 64 are")
    return o, u, starts


@_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch, time, heads, width = q.shape
    return (
        torch.empty_like(q),
        torch.empty_like(q),
        q.new_empty(batch, heads, _chunks(time), width, width),
    )


@torch.library.custom_op("redraft::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, u: Tensor, starts: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = tuple(torch.empty_like(x) for x in (q, k, v, g, beta))
    _call("delta_backward", q.shape, q, k, g, beta, u, starts, d_o, *grads)
    return grads


@_delta_rule_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, u: Tensor, starts: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x) for x in (q, k, v, g, beta))


def _keep(ctx, inputs, output) -> None:
    _, u, starts = output
    ctx.save_for_backward(*inputs, u, starts)


def _backward(ctx, d_o: Tensor, d_u: Tensor | None, d_starts: Tensor | None) -> tuple[Tensor, ...]:
    return _delta_rule_backward(*ctx.saved_tensors, d_o.contiguous())


_delta_rule.register_autograd(_backward, setup_context=_keep)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, v and the log decay g [batch, time, heads, D], beta [batch, time, heads], float32 → o like q.

    The state starts at zero. D is 32 or 64; another width raises ValueError. Needs a C++ compiler.
    """
    return _delta_rule(*(x.float().contiguous() for x in (q, k, v, g, beta)))[0]


@torch.library.custom_op("redraft::short_conv", mutates_args=())
def _short_conv(x: Tensor, taps: Tensor) -> Tensor:
    y = torch.empty_like(x, dtype=torch.float32)
    _call(f"conv_{_kind(x)}", (*x.shape[:2], x.shape[2] // 64), x, taps, y)
    return y


@_short_conv.register_fake
def _(x: Tensor, taps: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


@torch.library.custom_op("redraft::short_conv_backward", mutates_args=())
def _short_conv_backward(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    d_x, d_taps = torch.empty_like(x), taps.new_empty(len(x), *taps.shape)
    _call(f"conv_{_kind(x)}_backward", (*x.shape[:2], x.shape[2] // 64), x, taps, d_y, d_x, d_taps)
    return d_x, d_taps.sum(0)


@_short_conv_backward.register_fake
def _(x: Tensor, taps: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(taps)


_short_conv.register_autograd(
    lambda ctx, d_y: _short_conv_backward(*ctx.saved_tensors, d_y.contiguous()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def short_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution, then SiLU: x [batch, time, channels], taps [channels, 4] → float32.

    The last tap meets the current token. Channels are a multiple of 64; another number raises ValueError.
    """
    if x.shape[-1] % 64:
        raise ValueError(f"{x.shape[-1]} channels are not a multiple of 64")
    return _short_conv(x.contiguous(), taps.contiguous())


def _situ(gate_up: Tensor, weight: Tensor) -> Tensor:
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _call(f"situ_{_kind(gate_up)}", out.shape, gate_up, weight, out)
    return out


def _situ_backward(gate_up: Tensor, weight: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    d_in, d_weight = torch.empty_like(gate_up), torch.empty_like(weight)
    _call(f"situ_{_kind(gate_up)}_backward", d_out.shape, gate_up, weight, d_out, d_in, d_weight)
    return d_in, d_weight


@torch.library.custom_op("redraft::situ", mutates_args=())
def _situ_op(gate_up: Tensor) -> Tensor:
    return _situ(gate_up, torch.ones(len(gate_up)))


@_situ_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@torch.library.custom_op("redraft::situ_backward", mutates_args=())
def _situ_op_backward(gate_up: Tensor, d_out: Tensor) -> Tensor:
    return _situ_backward(gate_up, torch.ones(len(gate_up)), d_out)[0]


@_situ_op_backward.register_fake
def _(gate_up: Tensor, d_out: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


_situ_op.register_autograd(
    lambda ctx, d_out: _situ_op_backward(*ctx.saved_tensors, d_out.contiguous()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def situ(gate_up: Tensor) -> Tensor:
    """K3's activation of [..., 2·I], gate branch first → [..., I], in float32 or bf16."""
    return _situ_op(gate_up.flatten(0, -2).contiguous()).unflatten(0, gate_up.shape[:-1])


_ROWS = 128  # an expert's rows are padded to a multiple: products come in few shapes, each compiled once


@dataclass(frozen=True)
class _Places:
    """Pairs (row, choice) in order of expert, with room between; an empty place shows pair 0, weight 0."""

    pair: Tensor  # [P] of a place, numbered row · k + choice
    place: Tensor  # [B · k] of a pair
    weight: Tensor  # [P]
    parts: list[slice]  # each expert's places

    @staticmethod
    def of(ids: Tensor, weights: Tensor, num_experts: int) -> _Places:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        room = (counts + _ROWS - 1) // _ROWS * _ROWS
        moved = (room.cumsum(0) - room) - (counts.cumsum(0) - counts)
        places = torch.arange(len(flat)) + moved[flat[order]]
        pair = torch.zeros(_num_places(ids, num_experts), dtype=torch.long)
        weight = torch.zeros(len(pair))
        pair[places], weight[places] = order, weights.flatten()[order]
        place = torch.empty_like(order)
        place[order] = places
        ends = room.cumsum(0).tolist()
        return _Places(pair, place, weight, [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)])


def _num_places(ids: Tensor, num_experts: int) -> int:
    return ids.numel() + num_experts * _ROWS


def _products(x: Tensor, weights: Tensor, parts: list[slice]) -> Tensor:
    """Rows x [P, K] times their own expert's matrix, weights [E, K, N] → [P, N]."""
    out = x.new_empty(len(x), weights.shape[-1])
    for part, weight in zip(parts, weights, strict=True):
        torch.mm(x[part], weight, out=out[part])
    return out


def _outer(x: Tensor, y: Tensor, parts: list[slice]) -> Tensor:
    """Per expert xᵀ y: [P, K], [P, N] → [E, K, N]."""
    return torch.stack([x[part].T @ y[part] for part in parts])


def _summed(pairs: Tensor, places: _Places, choices: int) -> Tensor:
    """Pairs' vectors [P, N] summed for each row → [B, N]."""
    return pairs[places.place].unflatten(0, (-1, choices)).sum(1)


@torch.library.custom_op("redraft::experts", mutates_args=())
def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    places = _Places.of(ids, weights, len(gate_up))
    hidden = _products(x[places.pair // ids.shape[1]], gate_up.transpose(1, 2), places.parts)
    active = _situ(hidden, places.weight)
    return _summed(_products(active, down, places.parts), places, ids.shape[1]), hidden, active


@_experts.register_fake
def _(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    pairs = _num_places(ids, len(gate_up))
    return torch.empty_like(x), x.new_empty(pairs, gate_up.shape[1]), x.new_empty(pairs, down.shape[1])


@torch.library.custom_op("redraft::experts_backward", mutates_args=())
def _experts_backward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden: Tensor,
    active: Tensor,
    d_y: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    choices = ids.shape[1]
    places = _Places.of(ids, weights, len(gate_up))
    rows, d_pairs = x[places.pair // choices], d_y[places.pair // choices]
    d_active = _products(d_pairs, down.transpose(1, 2), places.parts)
    d_hidden, d_weight = _situ_backward(hidden, places.weight, d_active)
    d_x = _summed(_products(d_hidden, gate_up, places.parts), places, choices)
    d_gate_up, d_down = _outer(d_hidden, rows, places.parts), _outer(active, d_pairs, places.parts)
    return d_x, d_weight[places.place].view_as(weights), d_gate_up, d_down


@_experts_backward.register_fake
def _(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden: Tensor,
    active: Tensor,
    d_y: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(t) for t in (x, weights, gate_up, down))


def _keep_experts(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output[1:])


def _experts_gradient(
    ctx, d_y: Tensor, d_hidden: Tensor | None, d_active: Tensor | None
) -> tuple[Tensor | None, ...]:
    d_x, d_weights, d_gate_up, d_down = _experts_backward(*ctx.saved_tensors, d_y.contiguous())
    return d_x, None, d_weights, d_gate_up, d_down


_experts.register_autograd(_experts_gradient, setup_context=_keep_experts)


def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Σ over each row's choices: weight · SiTU-gated expert(x).

    x [B, L], ids and float32 weights [B, k], gate_up [E, 2·I, L], down [E, I, L] (transposed) → [B, L]. Only
    chosen experts are computed. x, gate_up and down are all float32 or all bf16.
    """
    return _experts(x.contiguous(), ids, weights.contiguous(), gate_up.contiguous(), down.contiguous())[0]
