r"""Cosine schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class Cosine(Schedule):
    r"""α = cos(π/2 · (t + s)/(1 + s)) / cos(π/2 · s/(1 + s)), σ = √(1 − α²).

    `t_max` stays below 1, where α would vanish.

    References:
        Improved Denoising Diffusion Probabilistic Models (Nichol & Dhariwal, 2021), arXiv:2102.09672.
    """

    s: float = 0.008
    t_min: float = 1e-3
    t_max: float = 0.9946

    @property
    def _angle0(self) -> float:
        return 0.5 * math.pi * self.s / (1.0 + self.s)

    def level(self, t: float) -> Level:
        angle0 = self._angle0
        angle = 0.5 * math.pi * (t + self.s) / (1.0 + self.s)
        # 1 − α² = (cos² a0 − cos² a)/cos² a0 = sin(a − a0) sin(a + a0)/cos² a0, free of cancellation.
        variance = math.sin(angle - angle0) * math.sin(angle + angle0) / math.cos(angle0) ** 2
        return Level(t, math.cos(angle) / math.cos(angle0), math.sqrt(max(variance, 0.0)))

    def time(self, lam: float) -> float:
        # cos² a = α² cos² a0, so sin² a = sin² a0 + σ² cos² a0: atan2 keeps precision at both ends.
        angle0 = self._angle0
        ratio = math.exp(-2.0 * lam)
        cos2, sin2 = math.cos(angle0) ** 2, math.sin(angle0) ** 2
        alpha2, sigma2 = 1.0 / (1.0 + ratio), ratio / (1.0 + ratio)
        angle = math.atan2(math.sqrt(sin2 + sigma2 * cos2), math.sqrt(alpha2 * cos2))
        return 2.0 * (1.0 + self.s) * angle / math.pi - self.s


VARIANTS = {"cosine": Cosine()}
