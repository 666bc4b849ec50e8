r"""A variance-preserving process known only at the integer times a network was trained on."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from steindiff.levels import Level
from steindiff.schedules.base import Schedule, vp_from_lam


@dataclass(frozen=True)
class Discrete(Schedule):
    r"""α_t = √ᾱ_t, σ_t = √(1 − ᾱ_t) at t = 0, …, N − 1; λ linear in t between and beyond them.

    Args:
        alphas_cumprod: ᾱ_t, strictly decreasing, in (0, 1).

    Reference: Ho et al. (2020), arXiv:2006.11239.
    """

    alphas_cumprod: tuple[float, ...]
    t_min: float = 0.0
    t_max: float = field(default=math.nan)
    _lam: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        bars = tuple(float(a) for a in self.alphas_cumprod)
        if len(bars) < 2 or not all(0.0 < a < 1.0 for a in bars) or any(a <= b for a, b in pairwise(bars)):
            raise ValueError(
                "alphas_cumprod: need at least two values in (0, 1), strictly decreasing, "
                f"got {len(bars)} from {bars[:1]} to {bars[-1:]}"
            )
        object.__setattr__(self, "alphas_cumprod", bars)
        object.__setattr__(self, "_lam", tuple(0.5 * math.log(a / (1.0 - a)) for a in bars))
        if math.isnan(self.t_max):
            object.__setattr__(self, "t_max", float(len(bars) - 1))
        super().__post_init__()

    @classmethod
    def from_betas(cls, betas: Sequence[float]) -> Discrete:
        r"""ᾱ_t = Π_{s ≤ t} (1 − β_s)."""
        bar, bars = 1.0, []
        for beta in betas:
            bar *= 1.0 - float(beta)
            bars.append(bar)
        return cls(tuple(bars))

    @classmethod
    def linear(cls, beta_min: float = 1e-4, beta_max: float = 0.02, steps: int = 1000) -> Discrete:
        """The DDPM schedule: β linear from `beta_min` to `beta_max`."""
        return cls.from_betas([beta_min + (beta_max - beta_min) * i / (steps - 1) for i in range(steps)])

    def level(self, t: float) -> Level:
        i = min(max(math.floor(t), 0), len(self._lam) - 2)
        lam = self._lam[i] + (t - i) * (self._lam[i + 1] - self._lam[i])
        return Level(float(t), *vp_from_lam(lam))

    def time(self, lam: float) -> float:
        # The tuple decreases, so search in its negative.
        i = min(max(bisect_right(self._lam, -lam, key=lambda v: -v) - 1, 0), len(self._lam) - 2)
        return i + (lam - self._lam[i]) / (self._lam[i + 1] - self._lam[i])


VARIANTS = {"ddpm": Discrete.linear()}
