r"""Epsilon scaling: a sampler's predicted noise is too large; divide it."""

from __future__ import annotations

import math

from torch import Tensor

from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.levels import Level, Levels


class EpsilonScaling(Wrapper):
    r"""ε ← ε/λ_k, λ_k = base + slope · k, k the steps left at that level: D ← D/λ_k + (1 − 1/λ_k) x/α.

    Args:
        denoiser: the model.
        levels: of the run; an inner stage has the k of its step.
        base: λ at the end of the run.
        slope: what a step adds; the authors' uniform schedule has 0.

    Raises:
        ValueError: if λ would not be finite and > 0 at every level.

    References:
        Elucidating the Exposure Bias in Diffusion Models (Ning et al., 2024), arXiv:2308.15321.
    """

    def __init__(self, denoiser: Denoiser, levels: Levels, base: float, slope: float = 0.0) -> None:
        if not all(0 < base + slope * k < math.inf for k in (0, levels.steps)):
            raise ValueError(f"base + slope * k must be finite and > 0, got base = {base}, slope = {slope}")
        self.denoiser = denoiser
        self.levels = levels
        self.base = base
        self.slope = slope

    def divisor(self, level: Level) -> float:
        """λ at `level`."""
        return self.base + self.slope * sum(other.ratio < level.ratio for other in self.levels)

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        d, share = self.denoiser(x, level), 1.0 / self.divisor(level)
        return d if share == 1.0 or level.alpha == 0.0 else share * d + ((1.0 - share) / level.alpha) * x
