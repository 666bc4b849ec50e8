r"""How the error to x* falls from step to step (Thm 4.8)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steindiff.averages import mean
from steindiff.corrections.base import Correction, Transition
from steindiff.corrections.hook import WithHook
from steindiff.denoisers.base import Denoiser
from steindiff.diagnostics.coupling import couple
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.probes.base import dot
from steindiff.solvers.base import Solver
from steindiff.tableau import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    r"""Follow a run that starts at x = α x* + σ ε with x* known.

    Args:
        denoiser: D.
        clean: x*, `(B, *)`.
        levels: the run.
        solver: its solver.
        generator: draws the noise.
        correction: decides every next state; None: the theorem's own update with γ* = b/c from the known x*.
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
