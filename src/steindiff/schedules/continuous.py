r"""Processes: variance preserving (continuous, cosine and discrete), variance exploding, EDM, rectified flow."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from steindiff.levels import Level
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class VP(Schedule):
    r"""α = exp(−t²(β₁ − β₀)/4 − tβ₀/2), σ = √(1 − α²), t ∈ [0, 1].

    Reference: Song et al. (2021), arXiv:2011.13456.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    t_min: float = 1e-3
    t_max: float = 1.0

    def _log_alpha(self, t: float) -> float:
        return -0.25 * t * t * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min

    def _time(self, log_alpha: float) -> float:
        """The t with log α(t) given; the quadratic's root written so that nothing cancels."""
        c = -2.0 * log_alpha
        root = math.sqrt(self.beta_min * self.beta_min + 2.0 * c * (self.beta_max - self.beta_min))
        return 2.0 * c / (self.beta_min + root)

    def level(self, t: float) -> Level:
        log_alpha = self._log_alpha(t)
        return Level(t, math.exp(log_alpha), math.sqrt(-math.expm1(2.0 * log_alpha)))

    def time(self, lam: float) -> float:
        return self._time(-0.5 * math.log1p(math.exp(-2.0 * lam)))


@dataclass(frozen=True)
class SubVP(VP):
    r"""α as in VP, σ = 1 − α².

    Reference: Song et al. (2021), arXiv:2011.13456.
    """

    def level(self, t: float) -> Level:
        log_alpha = self._log_alpha(t)
        return Level(t, math.exp(log_alpha), -math.expm1(2.0 * log_alpha))

    def time(self, lam: float) -> float:
        # alpha/(1 − alpha²) = kappa has the positive root 2 kappa / (1 + √(1 + 4 kappa²)).
        kappa = math.exp(lam)
        return self._time(math.log(2.0 * kappa / (1.0 + math.hypot(1.0, 2.0 * kappa))))


@dataclass(frozen=True)
class VE(Schedule):
    r"""α = 1, σ = σ_min (σ_max/σ_min)^t, t ∈ [0, 1].

    Reference: Song et al. (2021), arXiv:2011.13456.
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0
    t_min: float = 0.0
    t_max: float = 1.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0, self.sigma_min * (self.sigma_max / self.sigma_min) ** t)

    def time(self, lam: float) -> float:
        return (-lam - math.log(self.sigma_min)) / math.log(self.sigma_max / self.sigma_min)


@dataclass(frozen=True)
class EDM(Schedule):
    r"""α = 1, σ = t.

    Reference: Karras et al. (2022), arXiv:2206.00364.
    """

    t_min: float = 0.002
    t_max: float = 80.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0, t)

    def time(self, lam: float) -> float:
        return math.exp(-lam)


@dataclass(frozen=True)
class Flow(Schedule):
    r"""α = 1 − t, σ = t, t ∈ [0, 1].

    At t = 1 the state is pure noise: α = 0, λ = −∞. Solvers accept it as a first level.

    Reference: Liu et al. (2023), arXiv:2209.03003.
    """

    t_min: float = 1e-3
    t_max: float = 1.0

    def level(self, t: float) -> Level:
        return Level(t, 1.0 - t, t)

    def time(self, lam: float) -> float:
        # 1/(1 + e^λ) without overflow on either side.
        return 1.0 / (1.0 + math.exp(lam)) if lam < 0 else math.exp(-lam) / (1.0 + math.exp(-lam))


@dataclass(frozen=True)
class Cosine(Schedule):
    r"""α = cos(π/2 · (t + s)/(1 + s)) / cos(π/2 · s/(1 + s)), σ = √(1 − α²).

    `t_max` stays below 1, where α would vanish.

    Reference: Nichol & Dhariwal (2021), arXiv:2102.09672.
    """

    s: float = 0.008
    t_min: float = 1e-3
    t_max: float = 0.9946

    @property
    def _angle0(self) -> float:
        return 0.5 * math.pi * self.s / (1.0 + self.s)

    def level(self, t: float) -> Level:
        angle0 = self._angle0
        angle = 0.5 * math.pi * (t + self.s) / (1.0 + self.s)
        # 1 − α² = (cos² a0 − cos² a)/cos² a0 = sin(a − a0) sin(a + a0)/cos² a0, free of cancellation.
        variance = math.sin(angle - angle0) * math.sin(angle + angle0) / math.cos(angle0) ** 2
        return Level(t, math.cos(angle) / math.cos(angle0), math.sqrt(max(variance, 0.0)))

    def time(self, lam: float) -> float:
        # cos² a = α² cos² a0, so sin² a = sin² a0 + σ² cos² a0: atan2 keeps precision at both ends.
        angle0 = self._angle0
        ratio = math.exp(-2.0 * lam)
        cos2, sin2 = math.cos(angle0) ** 2, math.sin(angle0) ** 2
        alpha2, sigma2 = 1.0 / (1.0 + ratio), ratio / (1.0 + ratio)
        angle = math.atan2(math.sqrt(sin2 + sigma2 * cos2), math.sqrt(alpha2 * cos2))
        return 2.0 * (1.0 + self.s) * angle / math.pi - self.s


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
            given = f"{len(bars)} from {bars[:1]} to {bars[-1:]}"
            raise ValueError(f"alphas_cumprod must hold two or more strictly decreasing values in (0, 1), got {given}")
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
        # (α, σ) with α² + σ² = 1 and log(α/σ) = λ.
        alpha, sigma = (math.exp(-0.5 * math.log1p(math.exp(sign * lam))) for sign in (-2.0, 2.0))
        return Level(float(t), alpha, sigma)

    def time(self, lam: float) -> float:
        # The tuple decreases, so search in its negative.
        i = min(max(bisect_right(self._lam, -lam, key=lambda v: -v) - 1, 0), len(self._lam) - 2)
        return i + (lam - self._lam[i]) / (self._lam[i + 1] - self._lam[i])


VARIANTS = {
    "vp": VP(),
    "sub-vp": SubVP(),
    "ve": VE(),
    "edm": EDM(),
    "flow": Flow(),
    "cosine": Cosine(),
    "ddpm": Discrete.linear(),
}
