"""Muon: momentum, orthogonalised, for the matrices inside a network; AdamW for everything else.

References:
    | Muon: An optimizer for hidden layers in neural networks (Jordan et al., 2024)
    | https://kellerjordan.github.io/posts/muon/

    | Muon is Scalable for LLM Training (Liu et al., 2025)
    | https://arxiv.org/abs/2502.16982
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

QUINTIC = (3.4445, -4.7750, 2.0315)
"""p(s) = a s + b s³ + c s⁵ drives singular values in (0, 1] into about [0.7, 1.2] within five rounds."""


def orthogonalised(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Nearly U Vᵀ for each matrix U S Vᵀ, by Newton–Schulz iteration; (N, m, n) → (N, m, n)."""
    a, b, c = QUINTIC
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    if x.is_cuda:  # half the bits are enough, and GPUs are fast at them
        x = x.bfloat16()
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """θ ← θ − lr · max(1, m/n)^½ · orth(g + μ v), v ← μ v + g, on parameters seen as matrices (m, n).

    Convolutions (m, c, k, k) count as (m, c k²). Equal shapes are orthogonalised together.

    Args:
        parameters: of two dimensions or more.
        lr: step.
        momentum: μ.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients."""
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                alike[p.shape].append(p)
            for shape, parameters in alike.items():
                gradients = [p.grad for p in parameters]
                velocities = [self.state[p].setdefault("velocity", torch.zeros_like(p)) for p in parameters]
                torch._foreach_mul_(velocities, group["momentum"])
                torch._foreach_add_(velocities, gradients)
                ahead = torch._foreach_add(gradients, velocities, alpha=group["momentum"])
                updates = orthogonalised(torch.stack([u.flatten(1) for u in ahead]))
                rate = group["lr"] * max(1.0, updates.shape[1] / updates.shape[2]) ** 0.5
                torch._foreach_add_(parameters, [u.view(shape) for u in updates], alpha=-rate)
