r"""Variance-exploding process with geometric σ(t)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class VE(Schedule):
    r"""α = 1, σ = σ_min (σ_max/σ_min)^t, t ∈ [0, 1].

    References:
        Score-Based Generative Modeling through Stochastic Differential Equations (Song et al., 2021),
        arXiv:2011.13456.
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0
    t_min: float = 0.0
    t_max: float = 1.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0, self.sigma_min * (self.sigma_max / self.sigma_min) ** t)

    def time(self, lam: float) -> float:
        return (-lam - math.log(self.sigma_min)) / math.log(self.sigma_max / self.sigma_min)


VARIANTS = {"ve": VE()}
