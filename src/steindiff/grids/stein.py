r"""The Stein grid: steps where the model says they are needed."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from steindiff._checks import number
from steindiff.grids.base import Grid
from steindiff.schedules.base import Schedule

POINTS = 2000
"""Where the density is summed."""


@lru_cache(maxsize=32)
def cumulative(grid: Stein, first: float, last: float) -> tuple[list[float], list[float]]:
    """Places λ from first to last, and the integral of the grid's density up to each, in units of their distance."""
    lams = [first + (last - first) * k / POINTS for k in range(POINTS + 1)]
    return lams, [0.0, *accumulate(0.5 * (a + b) for a, b in pairwise(map(grid.density, lams)))]


@dataclass(frozen=True)
class Stein(Grid):
    r"""Density of steps in λ = log(α/σ) ∝ (σ² E tr(J²))^p, measured once along a trajectory.

    One DDIM step of log-size h loses the energy h² mmse(σ); carried to the end, a direction of variance c loses
    h² c g(1 − g) with g = c/(c + σ²/α²), and the sum over directions is h² σ² E tr(J²). Equal shares of a power of
    that cost go to every step. The levels are the quantiles 0, 1/n, …, and the last step goes to σ = 0 straight from
    quantile (n − 1)/n: no evaluation is spent at the smallest σ, where D(x) ≈ x says nothing new.

    Args:
        knots: (λ, σ² E tr(J²)) pairs, λ strictly increasing; between them log-cost is linear, beyond them constant.
        power: p; 0 is the log-SNR grid. Measured best: 0.2 for second- and third-order solvers, 0.3 for DDIM.
        to_zero: as in `Grid`.
    """

    knots: tuple[tuple[float, float], ...]
    power: float = 0.2
    to_zero: bool | None = None

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or any(not a[0] < b[0] for a, b in pairwise(self.knots)):
            raise ValueError(f"knots: need at least two with strictly increasing log-SNR, got {len(self.knots)}")
        if not all(math.isfinite(lam) and cost > 0 and math.isfinite(cost) for lam, cost in self.knots):
            raise ValueError("knots: log-SNR must be finite and cost finite and > 0")
        number("power", self.power, 0.0)

    def density(self, lam: float) -> float:
        """The (unnormalised) density of steps at λ."""
        lams = [knot[0] for knot in self.knots]
        i = bisect.bisect_right(lams, lam)
        if i == 0 or i == len(lams):
            return math.pow(self.knots[min(i, len(lams) - 1)][1], self.power)
        (a, low), (b, high) = self.knots[i - 1], self.knots[i]
        return math.exp(self.power * (math.log(low) + (lam - a) / (b - a) * math.log(high / low)))

    def times(self, schedule: Schedule, num: int) -> list[float]:
        # At t_max of a flow λ is −∞, where nothing can be measured: the density begins at the first knot.
        first = schedule.level(schedule.t_max).lam
        first = first if math.isfinite(first) else self.knots[0][0]
        last = schedule.level(schedule.t_min).lam
        lams, total = cumulative(self, first, last)
        to_zero = self.reaches_zero(schedule)
        shares = num if to_zero else num - 1
        times = [schedule.t_max]
        for k in range(1, num):
            target = total[-1] * k / shares
            j = min(bisect.bisect_left(total, target), POINTS)
            part = (target - total[j - 1]) / (total[j] - total[j - 1])
            times.append(schedule.time(lams[j - 1] + part * (lams[j] - lams[j - 1])))
        if not to_zero and num > 1:
            times[-1] = schedule.t_min
        return times
