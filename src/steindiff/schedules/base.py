r"""What a noise schedule is: t ↦ (α, σ) and its inverse in λ = log(α/σ)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from steindiff.levels import Level


def vp_from_lam(lam: float) -> tuple[float, float]:
    r"""(α, σ) with α² + σ² = 1 and log(α/σ) = λ."""
    return math.exp(-0.5 * math.log1p(math.exp(-2.0 * lam))), math.exp(-0.5 * math.log1p(math.exp(2.0 * lam)))


class Schedule(ABC):
    r"""A forward process x = α(t) x* + σ(t) ε on t ∈ [t_min, t_max], λ(t) = log(α/σ) strictly decreasing.

    Children are frozen dataclasses with the fields `t_min` and `t_max`: the range a grid spans by default.
    """

    t_min: float
    t_max: float

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
