r"""Rectified flow: a straight line between data and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class Flow(Schedule):
    r"""α = 1 − t, σ = t, t ∈ [0, 1].

    At t = 1 the state is pure noise: α = 0, λ = −∞. Solvers accept it as a first level.

    References:
        Flow Straight and Fast: Learning to Generate and Transfer Data with Rectified Flow (Liu et al., 2023),
        arXiv:2209.03003.
    """

    t_min: float = 1e-3
    t_max: float = 1.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0 - t, t)

    def time(self, lam: float) -> float:
        # 1/(1 + e^λ) without overflow on either side.
        return 1.0 / (1.0 + math.exp(lam)) if lam < 0 else math.exp(-lam) / (1.0 + math.exp(-lam))


VARIANTS = {"flow": Flow()}
