r"""EDM's process: the noise level is the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class EDM(Schedule):
    r"""α = 1, σ = t.

    References:
        Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        arXiv:2206.00364.
    """

    t_min: float = 0.002
    t_max: float = 80.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0, t)

    def time(self, lam: float) -> float:
        return math.exp(-lam)


VARIANTS = {"edm": EDM()}
