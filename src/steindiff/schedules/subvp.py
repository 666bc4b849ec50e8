r"""Sub-variance-preserving process."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule
from steindiff.schedules.vp import vp_log_alpha, vp_time


@dataclass(frozen=True)
class SubVP(Schedule):
    r"""α as in VP, σ = 1 − α².

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
        return Level(t, math.exp(log_alpha), -math.expm1(2.0 * log_alpha))

    def time(self, lam: float) -> float:
        # alpha/(1 − alpha²) = kappa has the positive root 2 kappa / (1 + √(1 + 4 kappa²)).
        kappa = math.exp(lam)
        return vp_time(math.log(2.0 * kappa / (1.0 + math.hypot(1.0, 2.0 * kappa))), self.beta_min, self.beta_max)


VARIANTS = {"sub-vp": SubVP()}
