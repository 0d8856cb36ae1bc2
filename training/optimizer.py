"""Muon for stacks of matrices, Adam for everything else."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 3e-3
_MOMENTUM = 0.95
_DECAY = 0.02  # of Muon's matrices, times the rate
_QUINTIC = (3.4445, -4.7750, 2.0315)  # drives singular values towards 1 in five rounds


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly: [S, m, n] → bf16, by Newton-Schulz iteration."""
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).contiguous()
    a, b, c = _QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal, for parameters [*stack, m, n].

    PyTorch's own takes single matrices only; here all matrices of one shape are iterated together.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float = MUON_RATE) -> None:
        super().__init__(parameters, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape[-2:], []).append(parameter)
            for shape, parameters in by_shape.items():
                updates = orthogonal(torch.cat([self._direction(p).reshape(-1, *shape) for p in parameters]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                sizes = [p.numel() // (shape[0] * shape[1]) for p in parameters]
                for parameter, update in zip(parameters, updates.split(sizes), strict=True):
                    parameter.mul_(1 - group["lr"] * _DECAY)
                    parameter.add_(update.reshape(parameter.shape).float(), alpha=-group["lr"] * scale)

    def _direction(self, parameter: nn.Parameter) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
        return parameter.grad.lerp(state["momentum"], _MOMENTUM)


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One of each kind; their groups know the `base` rate that a schedule scales."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and not any(part in name for part in ("embedding", "conv", "router"))
        (matrices if is_matrix else others).append(parameter)
    made = [Muon(matrices), torch.optim.Adam(others, ADAM_RATE, betas=(0.9, 0.98), fused=True)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["base"] = group["lr"]
    return made
