r"""What a noise schedule is: t ↦ (α, σ) and its inverse in λ = log(α/σ)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TypeVar

from steindiff._checks import number
from steindiff.levels import Level

S = TypeVar("S", bound="Schedule")


class Schedule(ABC):
    r"""A forward process x = α(t) x* + σ(t) ε on t ∈ [t_min, t_max], λ(t) = log(α/σ) strictly decreasing.

    Children are frozen dataclasses with the fields `t_min` and `t_max`: the range a grid spans by default.
    """

    t_min: float
    t_max: float

    def __post_init__(self) -> None:
        number("t_min", self.t_min, 0.0)
        number("t_max", self.t_max, self.t_min, open_end=True)
        try:
            high, low = self.level(self.t_max), self.level(self.t_min)
            sound = high.ratio > low.ratio >= 0.0 and all(map(math.isfinite, (*high, *low)))
        except (ValueError, ArithmeticError):
            sound = False
        if not sound:
            kind, low_t, high_t = type(self).__name__, self.t_min, self.t_max
            raise ValueError(f"{kind} must be finite and have less noise at t_min = {low_t} than at t_max = {high_t}")

    @abstractmethod
    def level(self, t: float) -> Level:
        r"""The level (t, α(t), σ(t))."""

    @abstractmethod
    def time(self, lam: float) -> float:
        r"""The inverse of λ: the t at which log(α/σ) = λ."""

    def at(self, lam: float) -> Level:
        r"""The level at half log-SNR λ."""
        return self.level(self.time(lam))

    def clean(self) -> Level:
        """The noise-free end of the process: α = 1, σ = 0."""
        return Level(0.0, 1.0, 0.0)

    @property
    def ratio_max(self) -> float:
        """Largest σ/α of the range."""
        return self.level(self.t_max).ratio

    @property
    def ratio_min(self) -> float:
        """Smallest σ/α of the range."""
        return self.level(self.t_min).ratio

    @property
    def ends_above_pixel_noise(self) -> bool:
        """Whether noise at the smallest level shows: σ/α exceeds half a grey level of images in [−1, 1].

        If it does not, a run may as well end there: a last step to σ = 0 would remove detail with the noise.
        """
        return self.ratio_min > 1.0 / 255.0

    def starting_at(self: S, ratio: float) -> S:
        """Return the schedule truncated to start at σ/α <= `ratio`."""
        if self.ratio_max <= ratio:
            return self
        return replace(self, t_max=self.time(-math.log(ratio)))  # type: ignore[type-var]

    def finite_start(self: S) -> S:
        """Return the schedule truncated to σ/α = 500 if it starts at pure noise (α = 0), where x says nothing of x*."""
        return self if self.level(self.t_max).alpha > 0.0 else self.starting_at(500.0)
