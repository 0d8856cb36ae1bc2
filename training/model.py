"""The Kimi K3 architecture in PyTorch, for training: KDA and gated NoPE latent attention, latent experts,
SiTU, attention residuals.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import delta_rule, experts, short_conv, situ

EPS = 1e-5
L2_EPS = 1e-6
LOWER_BOUND = -5.0
CONV_WIDTH = 4


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; all widths in channels. Layers are counted from 0."""

    vocab_size: int
    hidden: int
    num_layers: int
    full_attention: tuple[int, ...]
    heads: int
    head_dim: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    dense_dim: int
    num_dense: int  # layers before the first mixture of experts
    expert_dim: int = 0
    num_experts: int = 0
    num_chosen: int = 0
    num_shared: int = 0
    latent: int = 0
    block_size: int = 2

    def as_dict(self) -> dict[str, object]:
        """For a checkpoint."""
        return asdict(self)


TARGET = Shape(
    vocab_size=4096, hidden=256, num_layers=6, full_attention=(2, 5), heads=4, head_dim=64, kv_rank=96,
    nope_dim=32, rope_dim=32, value_dim=64, dense_dim=768, num_dense=1, expert_dim=256, num_experts=8,
    num_chosen=2, num_shared=2, latent=128,
)  # fmt: skip
DRAFT = Shape(
    vocab_size=4096, hidden=128, num_layers=2, full_attention=(1,), heads=4, head_dim=32, kv_rank=48,
    nope_dim=16, rope_dim=16, value_dim=32, dense_dim=320, num_dense=2,
)  # fmt: skip
SHAPES = {"target": TARGET, "draft": DRAFT}


def matrix(rows: int, columns: int, *stack: int, gain: float = 1.0) -> nn.Parameter:
    """A weight [*stack, rows, columns] of which each rows × columns part is a matrix of its own to the
    optimizer.
    """
    return nn.Parameter(torch.randn(*stack, rows, columns) * gain * columns**-0.5)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times a stack of matrices [S, N, K] → [..., S·N]."""
    return F.linear(x, weight.flatten(0, -2))


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x) * self.weight


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def l2(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class DeltaAttention(nn.Module):
    """KDA."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        inner, self.heads, self.dim = shape.heads * shape.head_dim, shape.heads, shape.head_dim
        self.qkvg = matrix(inner, shape.hidden, 4)
        self.f_a = matrix(shape.head_dim, shape.hidden)
        self.f_b = matrix(inner, shape.head_dim, gain=0.3)
        self.b_proj = matrix(shape.heads, shape.hidden)
        self.conv = nn.Parameter(
            torch.cat([torch.randn(3 * inner, CONV_WIDTH - 1) * 0.1, torch.ones(3 * inner, 1)], 1)
        )
        self.dt_bias = nn.Parameter(
            torch.linspace(-6.0, 0.0, shape.head_dim).repeat(shape.heads)
        )  # from slow to fast
        self.a_log = nn.Parameter(torch.zeros(shape.heads))
        self.o_norm = Norm(shape.head_dim)
        self.o_proj = matrix(shape.hidden, inner, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = (batch, time, self.heads, self.dim)
        qkv, gate = product(x, self.qkvg).split([self.conv.shape[0], self.heads * self.dim], dim=-1)
        q, k, v = (part.reshape(heads) for part in short_conv(qkv, self.conv).chunk(3, dim=-1))
        f = (F.linear(F.linear(x, self.f_a), self.f_b).float() + self.dt_bias).reshape(heads)
        g = LOWER_BOUND * torch.sigmoid(self.a_log.exp()[:, None] * f)
        beta = torch.sigmoid(F.linear(x, self.b_proj).float())
        o = delta_rule(l2(q) * self.dim**-0.5, l2(k), v, g, beta)
        o = self.o_norm(o).reshape(batch, time, -1) * torch.sigmoid(gate.float())
        return F.linear(o, self.o_proj)


class LatentAttention(nn.Module):
    """Gated latent attention without positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        s, hidden = shape, shape.hidden
        self.q_proj = matrix(s.heads * (s.nope_dim + s.rope_dim), hidden)
        self.kv_a = matrix(s.kv_rank + s.rope_dim, hidden)
        self.kv_norm = Norm(s.kv_rank)
        self.kv_b = matrix(s.heads * (s.nope_dim + s.value_dim), s.kv_rank)
        self.g_proj = matrix(s.heads * s.value_dim, hidden)
        self.o_proj = matrix(hidden, s.heads * s.value_dim, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        batch, time, _ = x.shape
        q = F.linear(x, self.q_proj).reshape(batch, time, s.heads, -1)
        c, r = F.linear(x, self.kv_a).split([s.kv_rank, s.rope_dim], dim=-1)
        up = F.linear(self.kv_norm(c), self.kv_b).reshape(batch, time, s.heads, -1)
        k_nope, v = up.split([s.nope_dim, s.value_dim], dim=-1)
        k = torch.cat([k_nope, r.to(up.dtype)[:, :, None].expand(-1, -1, s.heads, -1)], dim=-1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, -1)
        return F.linear(o.float() * torch.sigmoid(F.linear(x, self.g_proj).float()), self.o_proj)


class MLP(nn.Module):
    """SiTU-gated."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = matrix(inner, hidden, 2)
        self.down = matrix(hidden, inner, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(situ(product(x, self.gate_up)), self.down)


class Experts(nn.Module):
    """Latent experts, sigmoid-routed, beside a shared one. `bias` steers the choice only; training balances
    it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        self.router = nn.Parameter(torch.randn(s.num_experts, s.hidden) * s.hidden**-0.5)
        self.register_buffer("bias", torch.zeros(s.num_experts))
        self.register_buffer(
            "load", torch.zeros(s.num_experts), persistent=False
        )  # tokens each since last balanced
        self.routed_down = matrix(s.latent, s.hidden)
        self.routed_up = matrix(s.hidden, s.latent, gain=0.5)
        self.routed_norm = Norm(s.latent)
        self.gate_up = matrix(s.expert_dim, s.latent, s.num_experts, 2)
        self.down = matrix(
            s.expert_dim, s.latent, s.num_experts, gain=(s.latent / s.expert_dim) ** 0.5
        )  # transposed
        self.shared = MLP(s.hidden, s.expert_dim * s.num_shared)

    def forward(self, x: Tensor) -> Tensor:
        s = self.shape
        scores = torch.sigmoid(F.linear(x, self.router).float())
        ids = (scores.detach() + self.bias).topk(s.num_chosen).indices
        weights = scores.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.load += F.one_hot(ids.flatten(), s.num_experts).sum(0)
        z = F.linear(x, self.routed_down)
        y = experts(
            z.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1),
            self.gate_up.flatten(1, 2).to(z.dtype), self.down.to(z.dtype),
        ).view_as(z)  # fmt: skip
        return F.linear(self.routed_norm(y), self.routed_up).float() + self.shared(x)


class Layer(nn.Module):
    """What one layer owns; the residual streams are the model's."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.attention_mix = nn.Parameter(torch.zeros(shape.hidden))
        self.attention_norm = Norm(shape.hidden)
        self.attention = (LatentAttention if number in shape.full_attention else DeltaAttention)(shape)
        self.ffn_mix = nn.Parameter(torch.zeros(shape.hidden))
        self.ffn_norm = Norm(shape.hidden)
        self.ffn = MLP(shape.hidden, shape.dense_dim) if number < shape.num_dense else Experts(shape)


def mix(bank: list[Tensor], stream: Tensor, score: Tensor) -> Tensor:
    """A learned mixture of residual streams, each [batch, time, hidden]."""
    if not bank:
        return stream
    streams = torch.stack([*bank, stream], dim=-2)
    return (torch.softmax(rms(streams) @ score, dim=-1)[..., None] * streams).sum(-2)


class MiniK3(nn.Module):
    """The model; the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.num_layers))
        self.output_mix = nn.Parameter(torch.zeros(shape.hidden))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, time] → logits [batch, time, vocab], float32."""
        return F.linear(self.features(tokens), self.embedding).float()

    def features(self, tokens: Tensor) -> Tensor:
        """tokens [batch, time] → what the output matrix sees, [batch, time, hidden]."""
        stream = F.embedding(tokens, self.embedding)
        bank: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            attended = layer.attention(layer.attention_norm(mix(bank, stream, layer.attention_mix))).float()
            if i % self.shape.block_size == 0:
                bank.append(stream)
                stream = attended
            else:
                stream = stream + attended
            stream = stream + layer.ffn(layer.ffn_norm(mix(bank, stream, layer.ffn_mix))).float()
        return self.norm(mix(bank, stream, self.output_mix))

    def experts(self) -> list[Experts]:
        """The mixtures, in order."""
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, Experts)]
