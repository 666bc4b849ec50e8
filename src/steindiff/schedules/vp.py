r"""Variance-preserving process with linear β(t)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


def vp_log_alpha(t: float, beta_min: float, beta_max: float) -> float:
    r"""Log α(t) = −t²(β₁ − β₀)/4 − tβ₀/2."""
    return -0.25 * t * t * (beta_max - beta_min) - 0.5 * t * beta_min


def vp_time(log_alpha: float, beta_min: float, beta_max: float) -> float:
    r"""The t with log α(t) given; the quadratic's root written so that nothing cancels."""
    c = -2.0 * log_alpha
    return 2.0 * c / (beta_min + math.sqrt(beta_min * beta_min + 2.0 * c * (beta_max - beta_min)))


@dataclass(frozen=True)
class VP(Schedule):
    r"""α = exp(−t²(β₁ − β₀)/4 − tβ₀/2), σ = √(1 − α²), t ∈ [0, 1].

    References:
        Score-Based Generative Modeling through Stochastic Differential Equations (Song et al., 2021),
        arXiv:2011.13456.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    t_min: float = 1e-3
    t_max: float = 1.0

    def level(self, t: float) -> Level:
        log_alpha = vp_log_alpha(t, self.beta_min, self.beta_max)
        return Level(t, math.exp(log_alpha), math.sqrt(-math.expm1(2.0 * log_alpha)))

    def time(self, lam: float) -> float:
        return vp_time(-0.5 * math.log1p(math.exp(-2.0 * lam)), self.beta_min, self.beta_max)


VARIANTS = {"vp": VP()}
