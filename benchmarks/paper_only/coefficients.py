r"""γ with x* known (direct), without it (Stein) and for the flow itself (oracle), and how the error to x* falls.

Direct and Stein agree where x = α x* + σ ε. A sampler's own states have no such x*: not even the exact flow returns to
the image a run started from. What can be compared there is the Stein coefficient on the sampler's states (γ̃ of the
paper) with the Stein coefficient on ideal ones (γ*).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steindiff._distributed import mean, ratio_error
from steindiff.corrections.base import Correction, Transition, WithHook
from steindiff.corrections.relaxation import stein_numerator
from steindiff.denoisers.base import Denoiser
from steindiff.diagnostics import SteinGamma, plot_gammas, sampled_gammas
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.probes.base import Probe, dot
from steindiff.probes.hutchinson import VJP
from steindiff.schedules.base import Schedule
from steindiff.solvers.base import Solver
from steindiff.solvers.heun import Heun
from steindiff.tableau import Evaluation, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Flow = Callable[[Tensor, Level, Level], Tensor]
"""The probability flow from one level to another, states `(B, *)` to `(B, *)`."""

REACH = 10.0
"""How far in λ beyond 0 a fine flow goes where an end is infinite: σ/α = e^±10."""


def couple(clean: Tensor, level: Level, generator: torch.Generator) -> Tensor:
    """Draw states α x* + σ ε, `(B, *)`, for clean data of that shape."""
    noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype, device=generator.device)
    return level.alpha * clean + level.sigma * noise.to(clean.device)


def ideal_step(
    denoiser: Denoiser, clean: Tensor, levels: Levels, i: int, solver: Solver, generator: torch.Generator
) -> Step:
    r"""Step i as Theorem 4.7 wants it: every past state is α x* + σ ε on the same x*, with an ε of its own.

    In a real run the past states share their noise with the present one, and Stein's identity with the history held
    fixed is off by the derivative through it.
    """
    history: list[Evaluation] = []
    for k in range(i):
        for stage in solver.tableau(levels, k).stages:
            x = couple(clean, stage.level, generator)
            history.insert(0, Evaluation(x, denoiser(x, stage.level), stage.level))
    return Step(solver.tableau(levels, i), denoiser, tuple(history[: solver.memory]))


def fine_flow(denoiser: Denoiser, schedule: Schedule, steps: int = 64) -> Flow:
    """The probability flow by Heun's method in `steps` small steps, even in log-SNR."""

    def flow(x: Tensor, s: Level, t: Level) -> Tensor:
        last = t.lam if math.isfinite(t.lam) else max(s.lam, 0.0) + REACH
        first = s.lam if math.isfinite(s.lam) else min(t.lam, 0.0) - REACH
        inner = [schedule.at(first + (last - first) * k / steps) for k in range(1, steps)]
        if not math.isfinite(t.lam):
            inner.append(schedule.at(last))
        return sample(denoiser, x, Levels((s, *inner, t), schedule), Heun()).x

    return flow


@dataclass(frozen=True)
class Gammas:
    r"""The coefficients of one step, with u = x − T(x), b = E⟨u, x − x*⟩, c = E‖u‖².

    Attributes:
        sigma: σ_s, where the step starts.
        direct: b/c (Thm 4.3), and its standard error.
        stein: the reference-free form (Thm 4.7), and its standard error.
        c: E‖u‖².
        difference: stein − direct, whose standard error is that of paired samples and so much the smaller.
        oracle: E⟨u, x − Φ(x)⟩/c, the best mixture as seen by the exact flow Φ to the target level.
    """

    sigma: float
    direct: float
    direct_error: float
    stein: float
    stein_error: float
    difference: float
    difference_error: float
    oracle: float
    c: float

    @property
    def gap(self) -> float:
        """J(1) − J(γ*) = c (1 − γ*)², what the optimal coefficient gains over the plain step (Thm 4.4)."""
        return self.c * (self.direct - 1.0) ** 2

    def improves(self, gamma: float) -> bool:
        """The gap condition of Thm 4.11: whether γ beats the plain step in mean square error, c (γ − γ*)² <= gap."""
        return self.c * (gamma - self.direct) ** 2 <= self.gap


def gammas(
    step: Step,
    x: Tensor,
    clean: Tensor,
    levels: Levels,
    i: int,
    flow: Flow,
    generator: torch.Generator,
    probe: Probe | None = None,
) -> Gammas:
    """Compare the coefficients of step i at states `x`, `(B, *)`, of the clean data `clean`, `(B, *)`."""
    probed = (probe or VJP())(step, x, levels[i], generator)
    u = x - probed.candidate
    uu, ux = dot(u, u), dot(u, x)
    direct = dot(u, x - clean)
    stein = stein_numerator(ux, x[0].numel() - probed.divergence, levels[i])
    (one, one_error), (two, two_error), (gap, gap_error) = (
        [float(value) for value in ratio_error(numerator, uu)] for numerator in (direct, stein, stein - direct)
    )
    oracle = mean(dot(u, x - flow(x, levels[i], levels[i + 1]))) / mean(uu)
    return Gammas(
        sigma=levels[i].sigma,
        direct=one,
        direct_error=one_error,
        stein=two,
        stein_error=two_error,
        difference=gap,
        difference_error=gap_error,
        oracle=float(oracle),
        c=float(mean(uu)),
    )


def ideal_gammas(
    denoiser: Denoiser,
    clean: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    probe: Probe | None = None,
    flow: Flow | None = None,
) -> tuple[Gammas, ...]:
    """The coefficients of every step on states fresh from the forward coupling, which is what the theorems assume.

    A step from α = 0, which has no Stein form, is left out. Defaults: 5 VJP probes, the flow by many small Heun steps.
    """
    flow = flow or fine_flow(denoiser, levels.schedule)
    found = []
    for i in (i for i in range(levels.steps) if levels[i].alpha > 0.0):
        step = ideal_step(denoiser, clean, levels, i, solver, generator)
        found.append(gammas(step, couple(clean, levels[i], generator), clean, levels, i, flow, generator, probe))
    return tuple(found)


def coupled_gammas(
    denoiser: Denoiser,
    clean: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    probe: Probe | None = None,
) -> tuple[SteinGamma, ...]:
    """γ̃: the reference-free coefficient along a plain run that starts at the forward coupling, as a sampler sees it."""
    return sampled_gammas(denoiser, couple(clean, levels[0], generator), levels, solver, generator, probe=probe)


def plot_comparison(data: Sequence[Gammas], axes: Axes, sampled: Sequence[SteinGamma] = ()) -> None:
    """The coefficients over σ, the Stein ones with two standard errors: on ideal states, and on a sampler's own."""
    sigma = [row.sigma for row in data]
    axes.plot(sigma, [row.direct for row in data], "o-", label="direct, $x^*$ known")
    ideal = [SteinGamma(row.sigma, row.stein, row.stein_error) for row in data]
    for rows, style, label in ((ideal, "s--", "Stein, ideal states"), (sampled, "D-.", "Stein, sampled states")):
        if rows:
            plot_gammas(rows, axes, style, label)
    axes.plot(sigma, [row.oracle for row in data], "^:", label="oracle, exact flow")
    axes.axhline(1.0, color="black", linewidth=0.8, label="plain solver")
    axes.legend()


@dataclass(frozen=True)
class Decay:
    r"""The errors of a run whose clean images are known, with u = x − T(x) at every step.

    Attributes:
        sigma: σ of every level visited, one more than steps.
        error: E_k = E‖x_k − x*‖², measured at every level.
        b: E⟨u, x − x*⟩ of every step.
        c: E‖u‖² of every step.
        plain: E‖T(x) − x*‖² of every step: what the solver alone would have reached from there.
        deviation: E‖x_next − T(x)‖² of every step.
    """

    sigma: tuple[float, ...]
    error: tuple[float, ...]
    b: tuple[float, ...]
    c: tuple[float, ...]
    plain: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def gamma(self) -> tuple[float, ...]:
        """γ* = b/c of every step."""
        return tuple(b / c for b, c in zip(self.b, self.c, strict=True))

    @property
    def rho(self) -> tuple[float, ...]:
        """ρ = b²/(c E) of every step, in [0, 1]."""
        return tuple(b * b / (c * e) for b, c, e in zip(self.b, self.c, self.error, strict=False))

    @property
    def product(self) -> float:
        """E_N Π (1 − ρ): what the theorem says is left at the end."""
        return self.error[0] * math.prod(1.0 - rho for rho in self.rho)

    @property
    def bound(self) -> float:
        """(1 − η)^N E_N with η the least ρ."""
        return self.error[0] * (1.0 - min(self.rho)) ** len(self.rho)


@dataclass(frozen=True)
class Optimal(Correction):
    r"""The theorem's own update x − γ* u, γ* = b/c from known clean images.

    Args:
        clean: x*, `(B, *)`.
    """

    clean: Tensor

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        candidate, evaluations = step(x)
        u = x - candidate
        gamma = mean(dot(u, x - self.clean)) / mean(dot(u, u))
        return Transition(x - gamma.to(x.dtype) * u, evaluations, {"gamma": gamma})


def decay(
    denoiser: Denoiser,
    clean: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    correction: Correction | None = None,
) -> Decay:
    r"""Follow a run that starts at x = α x* + σ ε with x*, `clean` `(B, *)`, known.

    Without a correction each step is the theorem's own, with γ* = b/c from the known x*.
    """
    candidates: list[Tensor] = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        candidates.append(step(x).candidate)

    x = couple(clean, levels[0], generator)
    watched = WithHook(look, correction or Optimal(clean))
    states = sample(denoiser, x, levels, solver, watched, capture=True).trajectory
    rows = []
    for x, candidate, following in zip(states, candidates, states[1:], strict=False):
        u = x - candidate
        pairs = ((u, x - clean), (u, u), (candidate - clean,) * 2, (following - candidate,) * 2)
        rows.append([float(mean(dot(*pair))) for pair in pairs])
    b, c, plain, deviation = (tuple(column) for column in zip(*rows, strict=True))
    errors = tuple(float(mean(dot(x - clean, x - clean))) for x in states)
    return Decay(tuple(level.sigma for level in levels), errors, b, c, plain, deviation)


def plot_decay(data: Decay, axes: Axes) -> None:
    """The measured error at every level, beside the product and the bound of the theorem."""
    steps = range(len(data.error))
    product, left = [data.error[0]], data.error[0]
    for rho in data.rho:
        left *= 1.0 - rho
        product.append(left)
    eta = min(data.rho)
    axes.plot(steps, data.error, "o-", label="measured $E_k$")
    axes.plot(steps, product, "s--", label="$E_N \\prod (1 - \\rho_k)$")
    axes.plot(steps, [data.error[0] * (1.0 - eta) ** k for k in steps], ":", label="$(1 - \\eta)^k E_N$")
    axes.set(xlabel="step", ylabel="mean square error to $x^*$", yscale="log")
    axes.legend()
