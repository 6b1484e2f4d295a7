"""Muon (Jordan et al. 2024) in float32, all matrices of one shape at once: fast on CPUs without bfloat16 units, too."""

from collections import defaultdict
from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor
from torch.nn import Parameter

MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
NUM_ITERATIONS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
SMALLEST_NORM = 1e-7
RMS_OF_ADAMW = 0.2


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonal factor of the momentum; a step of `lr` is as large as one of AdamW."""

    def __init__(self, matrices: Iterable[Parameter], *, lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Parameter]] = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for matrices in by_shape.values():
                directions = orthogonal(torch.stack([self._lookahead(matrix) for matrix in matrices]))
                size = group["lr"] * RMS_OF_ADAMW * sqrt(max(matrices[0].shape))
                for matrix, direction in zip(matrices, directions, strict=True):
                    matrix.mul_(1 - group["lr"] * WEIGHT_DECAY).sub_(direction, alpha=size)

    def _lookahead(self, matrix: Parameter) -> Tensor:
        """Take the gradient into the momentum, and give where that leads (Nesterov)."""
        gradient = matrix.grad
        assert gradient is not None
        momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(momentum, MOMENTUM)


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices near to 1 by Newton-Schulz iterations: [matrices, rows, columns]."""
    first, second, third = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide: Tensor = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        wide = first * wide + (second * gram + third * (gram @ gram)) @ wide
    factors: Tensor = wide.mT if is_tall else wide
    return factors
