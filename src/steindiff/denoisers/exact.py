r"""Data whose denoiser is known in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from steindiff.denoisers.base import CountingDenoiser
from steindiff.levels import Level


class Gaussian(CountingDenoiser):
    r"""Data N(μ, diag(c)): D(x) = μ + α c/(α² c + σ²) (x − α μ).

    The probability flow is known too: every coordinate keeps its quantile, so
    x_t = α_t μ + √((α_t² c + σ_t²)/(α_s² c + σ_s²)) (x_s − α_s μ).

    Args:
        mean: μ, one sample's shape `(*)`.
        variance: diagonal c >= 0, broadcastable to μ.
    """

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        if bool((variance < 0).any()):
            raise ValueError(f"variance must be >= 0, got a minimum of {float(variance.min())}")
        self.mean = mean
        self.variance = variance.broadcast_to(mean.shape)

    def gain(self, level: Level) -> Tensor:
        r"""The diagonal of ∂D/∂x, α c/(α² c + σ²), shape `(*)`."""
        if level.sigma == 0.0:
            return torch.full_like(self.variance, 1.0 / level.alpha)
        return level.alpha * self.variance / (level.alpha**2 * self.variance + level.sigma**2)

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        return self.mean + self.gain(level) * (x - level.alpha * self.mean)

    def divergence(self, x: Tensor, level: Level) -> Tensor:
        r"""Exact div D, `(B,)`."""
        return self.gain(level).sum().expand(x.shape[0])

    def flow(self, x: Tensor, s: Level, t: Level) -> Tensor:
        """The exact solution of the probability-flow ODE from level s to level t, `(B, *)`."""
        before = s.alpha**2 * self.variance + s.sigma**2
        after = t.alpha**2 * self.variance + t.sigma**2
        return t.alpha * self.mean + (after / before).sqrt() * (x - s.alpha * self.mean)

    def sample(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw clean data, `(num, *)`."""
        noise = torch.randn((num, *self.mean.shape), generator=generator, dtype=self.mean.dtype)
        return self.mean + self.variance.sqrt() * noise
