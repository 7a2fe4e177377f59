"""The Muon optimizer: orthogonalized momentum, good for the matrices of a small model with few tokens.

It follows Keller Jordan's description (2024); embeddings and norms belong to another optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalized (all singular values near 1) for each weight matrix.

    The orthogonal factor comes from five Newton-Schulz iterations of an odd quintic polynomial.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for (rows, columns), weights in by_shape.items():
                directions = []
                for weight in weights:
                    average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                    average.lerp_(weight.grad, 1 - group["momentum"])
                    directions.append(weight.grad.lerp(average, group["momentum"]))  # Nesterov
                step_size = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for weight, direction in zip(weights, orthogonal(torch.stack(directions)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction, alpha=-step_size)


def orthogonal(stack: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal polar factor of each matrix in a (count, rows, columns) stack, float32."""
    tall = stack.shape[1] > stack.shape[2]
    x = (stack.mT if tall else stack).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()
