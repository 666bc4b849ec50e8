r"""Grids by formula: evenly spaced in a power of σ/α, in log-SNR or in time; or written down."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff._checks import number
from steindiff.grids.base import Grid, spread
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class Karras(Grid):
    r"""σ_i/α_i = (σ_max^{1/ρ} + i/(n − 1) (σ_min^{1/ρ} − σ_max^{1/ρ}))^ρ.

    Reference: Karras et al. (2022), arXiv:2206.00364, Eq. 5.
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


@dataclass(frozen=True)
class LogSNR(Grid):
    r"""λ_i = λ_max-noise + i/(n − 1) (λ_min-noise − λ_max-noise).

    Reference: Lu et al. (2022), arXiv:2206.00927.
    """

    to_zero: bool | None = None

    def times(self, schedule: Schedule, num: int) -> list[float]:
        first, last = schedule.level(schedule.t_max).lam, schedule.level(schedule.t_min).lam
        if math.isinf(first):
            raise ValueError("schedule: its first level has alpha = 0, the log-SNR grid needs a finite log-SNR there")
        inner = [schedule.time(lam) for lam in spread(first, last, num)[1:-1]]
        return [schedule.t_max] if num == 1 else [schedule.t_max, *inner, schedule.t_min]


@dataclass(frozen=True)
class UniformTime(Grid):
    r"""t_i = t_max + i/(n − 1) (t_min − t_max), bent by a power: t_i^{1/p} is evenly spaced.

    p = 1 is uniform, p = 2 the quadratic grid of DDIM.

    Reference: Song et al. (2021), arXiv:2010.02502, App. D.2.
    """

    power: float = 1.0
    to_zero: bool | None = None

    def __post_init__(self) -> None:
        number("power", self.power, 0.0, open_end=True)

    def times(self, schedule: Schedule, num: int) -> list[float]:
        inner = spread(schedule.t_max ** (1.0 / self.power), schedule.t_min ** (1.0 / self.power), num)[1:-1]
        ends = [schedule.t_max] if num == 1 else [schedule.t_max, schedule.t_min]
        return [*ends[:1], *(v**self.power for v in inner), *ends[1:]]


@dataclass(frozen=True)
class Explicit(Grid):
    r"""The given times, from noise to data; fits exactly one number of steps."""

    points: tuple[float, ...]
    to_zero: bool = True

    @property
    def steps(self) -> int:
        """How many steps it makes."""
        return len(self.points) - (not self.to_zero)

    def times(self, schedule: Schedule, num: int) -> tuple[float, ...]:
        if num != len(self.points):
            raise ValueError(f"steps: an explicit grid of {len(self.points)} times makes {self.steps} steps only")
        return self.points


VARIANTS = {
    "edm": Karras(),
    "edm-to-zero": Karras(to_zero=True),
    "logsnr": LogSNR(),
    "logsnr-to-zero": LogSNR(to_zero=True),
    "uniform": UniformTime(),
    "quadratic": UniformTime(power=2.0),
}
