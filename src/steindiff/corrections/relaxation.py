r"""The paper's Stein relaxation (Algorithm 1)."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least, number
from steindiff.averages import mean
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Level, Levels
from steindiff.probes.base import Probe, dot
from steindiff.probes.hutchinson import VJP, Adaptive, Analytic
from steindiff.tableau import Step


class Activation(ABC):
    """Which steps are corrected. Children are frozen dataclasses."""

    @abstractmethod
    def __call__(self, levels: Levels, i: int) -> bool:
        """Whether step i, from levels[i] to levels[i + 1], is corrected."""


def inner(levels: Levels, i: int) -> bool:
    """Whether step i starts with signal and ends with noise: α > 0 before it, σ > 0 after it."""
    return levels[i].alpha > 0.0 and levels[i + 1].sigma > 0.0


@dataclass(frozen=True)
class EveryStep(Activation):
    r"""Every step, except the one to σ = 0 unless `to_zero`, as the paper's algorithm reads.

    A relaxed step to σ = 0 keeps a share 1 − γ of a noisy state in the final sample; at γ = 1 there is none.
    """

    to_zero: bool = False

    def __call__(self, levels: Levels, i: int) -> bool:
        return self.to_zero or levels[i + 1].sigma > 0.0


@dataclass(frozen=True)
class FirstSteps(Activation):
    r"""The first k steps that neither start at α = 0 nor end at σ = 0: the paper's sparse activation, with k <= 3."""

    k: int = 3

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def __call__(self, levels: Levels, i: int) -> bool:
        return inner(levels, i) and sum(inner(levels, j) for j in range(i)) < self.k


GROWTH = 3.0
"""A relaxed state this many times larger than both the state and the candidate it mixes is taken as divergence. A rule
of thumb: on VP schedules, where x* may be larger than both, it also refuses steps that are right."""


def stein_numerator(s_xu: Tensor, s_div: Tensor, level: Level) -> Tensor:
    r"""E⟨u, x − x*⟩ without x*: (1 − 1/α) s_xu + (σ²/α) s_div (Thm 4.7); α = 1 leaves σ² s_div."""
    return (1.0 - 1.0 / level.alpha) * s_xu + (level.sigma**2 / level.alpha) * s_div


class Statistics(NamedTuple):
    """What a relaxed step measured, scalars or `(B,)`: γ after and before limits, ⟨u, x⟩, ‖u‖², div u, σ² d."""

    gamma: Tensor
    optimum: Tensor
    s_xu: Tensor
    s_uu: Tensor
    s_div: Tensor
    noise: float


class Bounds(ABC):
    """Which γ are allowed. Children are frozen dataclasses."""

    @abstractmethod
    def limit(self, gamma: Tensor) -> Tensor:
        """The nearest allowed γ."""

    @abstractmethod
    def watch(self, x: Tensor, candidate: Tensor, relaxed: Tensor, found: Statistics, place: str) -> None:
        """Raise if the relaxed step cannot be trusted; `place` names it."""


@dataclass(frozen=True)
class Clamped(Bounds):
    r"""γ_min <= γ <= γ_max, by default <= 1: our reading of the "fast KM variant" behind the paper's tables.

    The paper prints a lower bound only. Krasnosel'skiĭ–Mann iterations take γ in (0, 1]: then the next state is a
    convex combination of state and candidate and cannot leave their hull. A maximum above 1 lets the step overshoot by
    that much and no more.
    """

    minimum: float = 1e-6
    maximum: float = 1.0

    def __post_init__(self) -> None:
        number("minimum", self.minimum, 0.0, 1.0, open_end=True)
        number("maximum", self.maximum, self.minimum)

    def limit(self, gamma: Tensor) -> Tensor:
        return gamma.clamp(self.minimum, self.maximum)

    def watch(self, x: Tensor, candidate: Tensor, relaxed: Tensor, found: Statistics, place: str) -> None:
        """A bounded step needs no watching, and looking at it would stall the device."""


@dataclass(frozen=True)
class Unclamped(Bounds):
    r"""γ >= γ_min and nothing else: Algorithm 1 to the letter. A warning says where it leads.

    For DDIM with an exact denoiser and α = 1, γ* = 1/(1 − σ_t/σ_s), so the relaxed step lands on D(x), the posterior
    mean, whatever the target level. There the next residual nearly vanishes and γ = σ² s_div/s_uu explodes.

    Args:
        minimum: γ_min.
        growth: how much larger than state and candidate a relaxed state may be before the run is stopped with an
            error that names the step; None: run on, whatever comes.
    """

    minimum: float = 1e-6
    growth: float | None = GROWTH

    def __post_init__(self) -> None:
        number("minimum", self.minimum, 0.0, 1.0, open_end=True)
        if self.growth is not None:
            number("growth", self.growth, 0.0, open_end=True)
        warnings.warn(
            "Unclamped(): with an exact denoiser and alpha = 1, gamma of DDIM is 1/(1 - sigma_t/sigma_s): a step jumps "
            "to the posterior mean, the next residual vanishes and gamma explodes; Clamped() keeps gamma <= 1",
            UserWarning,
            stacklevel=3,
        )

    def limit(self, gamma: Tensor) -> Tensor:
        return gamma.clamp(min=self.minimum)

    def watch(self, x: Tensor, candidate: Tensor, relaxed: Tensor, found: Statistics, place: str) -> None:
        if self.growth is None:
            return
        before = torch.maximum(_size(x), _size(candidate))
        bad = ~(_size(relaxed) <= self.growth * before)
        if not bool(bad.any()):
            return
        k = int(bad.nonzero()[0])
        gamma, s_uu = (t.expand(len(x))[k].item() for t in (found.gamma, found.s_uu))
        raise RuntimeError(
            f"{place}: the literal relaxation diverged: gamma = {gamma:.4g} because the residual is small for its "
            f"noise (s_uu = {s_uu:.4g}, sigma^2 d = {found.noise:.4g}), so the state grew from "
            f"{float(before[k]):.4g} to {float(_size(relaxed)[k]):.4g} (root mean square); "
            "use Clamped(), which keeps gamma <= 1"
        )


def _size(x: Tensor) -> Tensor:
    """Root mean square of every sample, `(B,)`."""
    return x.flatten(1).square().mean(1).sqrt()


@dataclass(frozen=True)
class Relaxation(Correction):
    r"""x_next = (1 − γ) x + γ T(x), with γ minimising E‖x_next − x*‖² under the forward coupling.

    With the residual u = x − T(x) and averages s over the batch,

        γ = [(1 − 1/α) s_xu + (σ²/α) s_div]/(s_uu + ε),   s_xu = ⟨u, x⟩, s_uu = ‖u‖², s_div = div u = d − div T,

    for any α > 0: VP, sub-VP, VE, EDM, flow. A step from α = 0 (pure noise) is left alone: there x says nothing about
    x* and 1/α is infinite. Where γ = 1 the candidate itself is returned, bit for bit.

    The paper's modes are probes: *full* `VJP()`, *analytical* `Analytic()`, *adaptive* `Adaptive()`.

    UniPC evaluates at its own prediction, before the relaxation: the next step starts from the relaxed state and uses
    that evaluation. A last step to σ = 0 returns it, so the relaxation of the step before has no effect there.

    The identity behind γ needs x = α x* + σ ε with ε independent of everything else in the step. Beyond the first step
    of a run that is an approximation, and with a multistep solver it also ignores how the history depends on x
    (measured in docs/reproduction.md).

    Args:
        probe: how div T is found.
        activation: at which steps to act; the paper's sparse activation is `FirstSteps(3)`.
        bounds: `Clamped()` for γ <= 1 (our reading of the paper's KM variant), `Clamped(maximum=…)` for another limit,
            `Unclamped()` for Algorithm 1 to the letter.
        per_sample: one γ a sample, noisier, but a sample then depends on its own state and probes alone; else one for
            the batch, all processes together, as in the paper.
        normalised: mix x/α, in which every schedule is EDM's (α = 1, σ = σ/α). It agrees with the paper where α = 1 and
            spares other schedules the terms in 1/α, whose noise drowns γ where α is small.
        epsilon: safeguard in the denominator.
        seed: the probe directions of step i are drawn from (seed, i), so a run can be repeated.

    Reference: Li & Zeng (2026), arXiv:2606.07835, Algorithm 1, Theorems 4.3 and 4.7.
    """

    probe: Probe = field(default_factory=VJP)
    activation: Activation = field(default_factory=EveryStep)
    bounds: Bounds = field(default_factory=Clamped)
    per_sample: bool = False
    normalised: bool = False
    epsilon: float = 1e-12
    seed: int = 0

    def __post_init__(self) -> None:
        number("epsilon", self.epsilon, 0.0)
        at_least("seed", self.seed, 0)

    def _average(self, values: Tensor) -> Tensor:
        """`values`, `(B,)`, in float64: their mean, or as they are."""
        return values.double() if self.per_sample else mean(values)

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        s, t = levels[i], levels[i + 1]
        if s.alpha == 0.0 or not self.activation(levels, i):
            return Transition(*step(x), {"active": False})
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        probed = self.probe(step, x, s, generator)
        # With carry = k both x and T are seen at the target's scale; there div T is taken with respect to k x.
        carry, level = (t.alpha / s.alpha, Level(s.t, 1.0, s.ratio)) if self.normalised else (1.0, s)
        scale = level.alpha / s.alpha / carry  # from the target's scale to the coordinates
        carried = x if carry == 1.0 else carry * x
        u = carried - probed.candidate
        s_xu, s_uu = (self._average(dot(u, z)) * scale**2 for z in (carried, u))
        s_div = self._average(x[0].numel() - probed.divergence / carry)
        if s_div.ndim and len(s_div) != len(x):
            raise ValueError(f"per_sample needs a probe of every sample; {self.probe!r} probes some")
        optimum = stein_numerator(s_xu, s_div, level) / (s_uu + self.epsilon)
        gamma = self.bounds.limit(optimum)
        # lerp returns the candidate itself at weight 1, where x + 1·(T − x) would round.
        weight = gamma.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        relaxed = torch.lerp(carried, probed.candidate, weight)
        found = Statistics(gamma, optimum, s_xu, s_uu, s_div, noise=level.sigma**2 * x[0].numel())
        place = f"step {i + 1} of {levels.steps}, sigma {s.sigma:.4g} to {t.sigma:.4g}"
        self.bounds.watch(carried, probed.candidate, relaxed, found, place)
        statistics = {"active": True, **found._asdict(), "extra_calls": probed.extra_calls}
        return Transition(relaxed, probed.evaluations, statistics, probed.backward_passes)


VARIANTS = {
    "relaxation": Relaxation(),
    "relaxation-analytical": Relaxation(probe=Analytic()),
    "relaxation-adaptive": Relaxation(probe=Adaptive()),
    "relaxation-sparse": Relaxation(activation=FirstSteps()),
}
