r"""Evenly spaced in the schedule's own time."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff._checks import number
from steindiff.grids.base import Grid, spread
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class UniformTime(Grid):
    r"""t_i = t_max + i/(n − 1) (t_min − t_max), bent by a power: t_i^{1/p} is evenly spaced.

    p = 1 is uniform, p = 2 the quadratic grid of DDIM.

    References:
        Denoising Diffusion Implicit Models (Song et al., 2021), arXiv:2010.02502, App. D.2.
    """

    power: float = 1.0
    to_zero: bool | None = None

    def __post_init__(self) -> None:
        number("power", self.power, 0.0, open_end=True)

    def times(self, schedule: Schedule, num: int) -> list[float]:
        inner = spread(schedule.t_max ** (1.0 / self.power), schedule.t_min ** (1.0 / self.power), num)[1:-1]
        ends = [schedule.t_max] if num == 1 else [schedule.t_max, schedule.t_min]
        return [*ends[:1], *(v**self.power for v in inner), *ends[1:]]


VARIANTS = {"uniform": UniformTime(), "quadratic": UniformTime(power=2.0)}
