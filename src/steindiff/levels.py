r"""Noise levels: where on the forward process x = α x* + σ ε a state lives.

Everything downstream (solvers, corrections, calibrations) speaks of levels, never of a schedule's time.
All scalars are Python floats, that is float64, whatever the dtype of the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, overload

if TYPE_CHECKING:
    from steindiff.schedules.base import Schedule


LARGEST = 1e12
"""Of t, α, σ and what is told: their squares, in the float32 of a state, are numbers."""


class Level(NamedTuple):
    r"""One noise level (t, α, σ) of the forward coupling x = α x* + σ ε.

    `t` is what the network is conditioned on; `alpha` and `sigma` are what the mathematics needs. They need not agree:
    a coarse state carries a little less noise than its level says, and a network that is *told* so, by the t that
    belongs to told · σ/α, denoises it better.

    Attributes:
        t: the schedule's time at told · σ/α.
        alpha: α.
        sigma: σ.
        told: the factor of σ/α the network is told; 1 for every level of a schedule.
    """

    t: float
    alpha: float
    sigma: float
    told: float = 1.0

    @property
    def lam(self) -> float:
        r"""Half log-SNR λ = log(α/σ); +∞ at σ = 0, −∞ at α = 0."""
        if self.sigma == 0.0:
            return math.inf
        if self.alpha == 0.0:
            return -math.inf
        return math.log(self.alpha / self.sigma)

    @property
    def ratio(self) -> float:
        r"""Noise-to-signal ratio σ/α, the σ of EDM coordinates; ∞ at α = 0."""
        return math.inf if self.alpha == 0.0 else self.sigma / self.alpha


class Linear(NamedTuple):
    r"""The linear part of a step s → t: every step can be written x_t = r x_s + b D̄, D̄ an effective denoised image.

    r = σ_t/σ_s keeps the noise in proportion, b = α_t − r α_s restores the signal.
    """

    r: float
    b: float


def linear(s: Level, t: Level) -> Linear:
    r"""(r, b) of the step from level s to level t."""
    r = t.sigma / s.sigma
    return Linear(r, t.alpha - r * s.alpha)


@dataclass(frozen=True)
class Levels(Sequence[Level]):
    r"""The levels a sampler visits, from noise to data: σ/α strictly decreasing, at most the last one at σ = 0.

    A solver with inner stages also needs levels between two neighbours; `between` asks the schedule.

    Args:
        levels: at least two levels.
        schedule: the schedule the levels belong to.
    """

    levels: tuple[Level, ...]
    schedule: Schedule

    def __post_init__(self) -> None:
        if len(self.levels) < 2:
            raise ValueError(f"levels must hold at least 2 levels (one step), got {len(self.levels)}")
        for i, level in enumerate(self.levels):
            if not all(abs(v) <= LARGEST for v in level) or level.alpha < 0 or level.sigma < 0:
                raise ValueError(f"levels[{i}] must be finite, <= {LARGEST:g}, alpha and sigma >= 0, got {level}")
            if not 0.0 < level.told < math.inf:
                raise ValueError(f"levels[{i}].told must be finite and > 0, got {level.told}")
            if level.alpha == level.sigma == 0.0:
                raise ValueError(f"levels[{i}] = {level}: alpha and sigma must not both be 0")
        for i, (a, b) in enumerate(pairwise(level.ratio for level in self.levels)):
            if not a > b:
                raise ValueError(f"levels[{i + 1}] must lie below levels[{i}] in sigma/alpha, got {b:.6g} and {a:.6g}")

    @property
    def steps(self) -> int:
        """Number of solver steps, one less than the number of levels."""
        return len(self.levels) - 1

    def between(self, i: int, r: float) -> Level:
        r"""The level at λ_i + r (λ_{i+1} − λ_i), for an inner stage of step i, told what level i is."""
        s, t = self.levels[i].lam, self.levels[i + 1].lam
        lam = s + r * (t - s)
        told = self.levels[i].told
        level = self.schedule.at(lam)
        return level if told == 1.0 else level._replace(t=self.schedule.time(lam - math.log(told)), told=told)

    def tell(self, factors: Sequence[float]) -> Levels:
        r"""These levels with the network told factors[i] · σ_i/α_i at level i; missing factors are 1."""
        told = list(self.levels)
        for i, (factor, level) in enumerate(zip(factors, self.levels, strict=False)):
            if factor != 1.0 and 0.0 < level.ratio < math.inf:
                t = self.schedule.time(-math.log(factor * level.ratio))
                told[i] = level._replace(t=t, told=factor)
        return Levels(tuple(told), self.schedule)

    @overload
    def __getitem__(self, i: int) -> Level: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Level, ...]: ...
    def __getitem__(self, i: int | slice) -> Level | tuple[Level, ...]:
        return self.levels[i]

    def __len__(self) -> int:
        return len(self.levels)

    def __iter__(self) -> Iterator[Level]:
        return iter(self.levels)

    @classmethod
    def from_times(cls, schedule: Schedule, times: Iterable[float], *, to_zero: bool = False) -> Levels:
        """Levels of `schedule` at the given times; `to_zero` appends the noise-free level."""
        levels = [schedule.level(t) for t in times]
        return cls((*levels, schedule.clean()) if to_zero else tuple(levels), schedule)
