r"""The paper's self-consistency correction (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.corrections.base import Correction, Transition
from steindiff.corrections.relaxation import Relaxation
from steindiff.levels import Level, Levels
from steindiff.solvers.base import Solver
from steindiff.solvers.ddim import DDIM
from steindiff.tableau import Evaluation, Step, run

Interpolation = Callable[[Level, Level, Level], tuple[float, float] | None]
"""Weights of the states at s and t for the state at m between them, of (s, m, t); None where it has no answer."""


@dataclass(frozen=True)
class LogSigma:
    r"""The paper's: (1 − w, w) with w = log(σ_m/σ_s)/log(σ_t/σ_s). No answer at σ_t = 0, where w would be 0.

    A straight line in log σ carries (1 − w) σ_s + w σ_t of noise, more than the σ_s^{1−w} σ_t^w = σ_m it should.
    """

    def __call__(self, s: Level, m: Level, t: Level) -> tuple[float, float] | None:
        if t.sigma == 0.0:
            return None
        w = math.log(m.sigma / s.sigma) / math.log(t.sigma / s.sigma)
        return 1.0 - w, w


@dataclass(frozen=True)
class Matched:
    r"""The weights (a, b) with the middle level's signal and noise: a α_s + b α_t = α_m, a σ_s + b σ_t = σ_m.

    Exact where the flow is a straight line (Dirac data); for α = 1 it is linear in σ.
    """

    def __call__(self, s: Level, m: Level, t: Level) -> tuple[float, float] | None:
        det = s.alpha * t.sigma - t.alpha * s.sigma
        return (m.alpha * t.sigma - t.alpha * m.sigma) / det, (s.alpha * m.sigma - m.alpha * s.sigma) / det


Weight = Callable[[Tensor, float], Tensor]
"""How far the proposal is trusted, ρ in [0, 1], `(B,)`, for gaps `(B, *)` from the guess and a scale τ."""


@dataclass(frozen=True)
class Likelihood:
    r"""The paper's: ρ = exp(−‖gap‖²/(2τ²)). In d dimensions ‖gap‖² grows like d, so for images ρ is 0 or 1."""

    def __call__(self, gap: Tensor, tau: float) -> Tensor:
        return torch.exp(-gap.flatten(1).square().sum(1) / (2.0 * tau**2))


@dataclass(frozen=True)
class PerDimension:
    r"""ρ = exp(−‖gap‖²/(2 d τ²)): the geometric mean of the likelihoods of the d coordinates."""

    def __call__(self, gap: Tensor, tau: float) -> Tensor:
        return torch.exp(-gap.flatten(1).square().mean(1) / (2.0 * tau**2))


@dataclass(frozen=True)
class Consistency(Correction):
    r"""Blend a proposal x_p with what a look-ahead over two steps says about the same level.

        x_two from levels[i] to levels[i + 2] in one step,   x_alt = (1 − w) x + w x_two,
        ρ = exp(−‖x_p − x_alt‖²/(2 σ_{i+1}²)) per sample,    x_next = ρ x_p + (1 − ρ) x_alt.

    If the run ends at the next level, or that one is σ = 0 (the scale of ρ is then 0), or the interpolation has no
    answer, the proposal is taken as it is. The look-ahead reuses the step's evaluation at x: with a first-order solver
    it costs nothing; further stages are further network calls.

    Args:
        proposal: the correction whose result is blended; the paper's is the relaxation.
        lookahead: the solver of the long step, as on a run of that one step. The paper's `TwoStep(x, t_k, t_{k−2})`
            is not spelled out; a first-order step is our reading, and the one that needs no further evaluation.
        interpolation: `LogSigma()` as in the paper, or `Matched()`, ours.
        weight: `Likelihood()` as in the paper, or `PerDimension()`, ours.

    References:
        Mitigating the Contractivity Trap in Diffusion ODEs via Stein Stabilization (Li & Zeng, 2026),
        arXiv:2606.07835, Algorithm 2.
    """

    proposal: Correction = field(default_factory=Relaxation)
    lookahead: Solver = field(default_factory=DDIM)
    interpolation: Interpolation = field(default_factory=LogSigma)
    weight: Weight = field(default_factory=Likelihood)

    @property
    def memory(self) -> int:
        return self.proposal.memory

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        proposed = self.proposal(step, x, levels, i)
        if i + 2 >= len(levels) or levels[i + 1].sigma == 0.0:
            return proposed
        weights = self.interpolation(levels[i], levels[i + 1], levels[i + 2])
        if weights is None:
            return proposed
        two = self._look(step, x, Levels((levels[i], levels[i + 2]), levels.schedule), proposed.evaluations)
        alternative = weights[0] * x + weights[1] * two
        rho = self.weight(proposed.x - alternative, levels[i + 1].sigma)
        # lerp from the alternative, so that ρ = 1 returns the proposal itself.
        blended = torch.lerp(alternative, proposed.x, rho.reshape(-1, *[1] * (x.ndim - 1)))
        statistics = {**proposed.statistics, "rho": rho}
        return Transition(blended, proposed.evaluations, statistics, proposed.backward_passes)

    def _look(self, step: Step, x: Tensor, levels: Levels, made: tuple[Evaluation, ...]) -> Tensor:
        """The long step from `x`, with what has already been evaluated at its level."""
        known = next((e.d for e in (*made, *step.history) if e.level == levels[0]), None)

        def denoised(z: Tensor, level: Level) -> Tensor:
            return known if known is not None and z is x and level == levels[0] else step.denoiser(z, level)

        return run(self.lookahead.tableau(levels, 0), x, (), denoised).candidate


VARIANTS = {
    "consistency": Consistency(),
    "consistency-per-dimension": Consistency(weight=PerDimension()),
    "consistency-matched": Consistency(interpolation=Matched(), weight=PerDimension()),
}
