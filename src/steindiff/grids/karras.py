r"""The EDM grid: evenly spaced in (σ/α)^(1/ρ)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff._checks import number
from steindiff.grids.base import Grid, spread
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class Karras(Grid):
    r"""σ_i/α_i = (σ_max^{1/ρ} + i/(n − 1) (σ_min^{1/ρ} − σ_max^{1/ρ}))^ρ.

    References:
        Elucidating the Design Space of Diffusion-Based Generative Models (Karras et al., 2022),
        arXiv:2206.00364, Eq. 5.
    """

    rho: float = 7.0
    to_zero: bool | None = None

    def __post_init__(self) -> None:
        number("rho", self.rho, 0.0, open_end=True)

    def times(self, schedule: Schedule, num: int) -> list[float]:
        high, low = schedule.ratio_max, schedule.ratio_min
        if math.isinf(high):
            raise ValueError("schedule: its first level has alpha = 0, the EDM grid needs a finite sigma/alpha there")
        inner = spread(high ** (1.0 / self.rho), low ** (1.0 / self.rho), num)[1:-1]
        ends = [schedule.t_max] if num == 1 else [schedule.t_max, schedule.t_min]
        return [*ends[:1], *(schedule.time(-self.rho * math.log(v)) for v in inner), *ends[1:]]


VARIANTS = {"edm": Karras(), "edm-to-zero": Karras(to_zero=True)}
