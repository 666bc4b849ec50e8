r"""The log-SNR grid: evenly spaced in λ = log(α/σ)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.grids.base import Grid, spread
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class LogSNR(Grid):
    r"""λ_i = λ_max-noise + i/(n − 1) (λ_min-noise − λ_max-noise).

    References:
        DPM-Solver: A Fast ODE Solver for Diffusion Probabilistic Model Sampling (Lu et al., 2022),
        arXiv:2206.00927.
    """

    to_zero: bool | None = None

    def times(self, schedule: Schedule, num: int) -> list[float]:
        first, last = schedule.level(schedule.t_max).lam, schedule.level(schedule.t_min).lam
        if math.isinf(first):
            raise ValueError("schedule: its first level has alpha = 0, the log-SNR grid needs a finite log-SNR there")
        inner = [schedule.time(lam) for lam in spread(first, last, num)[1:-1]]
        return [schedule.t_max] if num == 1 else [schedule.t_max, *inner, schedule.t_min]


VARIANTS = {"logsnr": LogSNR(), "logsnr-to-zero": LogSNR(to_zero=True)}
