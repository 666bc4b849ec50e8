r"""Coefficients side by side: with x* known (direct), without it (Stein), and for the flow itself (oracle).

Direct and Stein agree where x = α x* + σ ε. A sampler's own states have no such x*: not even the exact flow returns to
the image a run started from. What can be compared there is the Stein coefficient on the sampler's states (γ̃ of the
paper) with the Stein coefficient on ideal ones (γ*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from steindiff.averages import mean, ratio_error
from steindiff.corrections.hook import WithHook
from steindiff.corrections.relaxation import stein_numerator
from steindiff.denoisers.base import Denoiser
from steindiff.diagnostics.coupling import Flow, couple, fine_flow, ideal_step
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.probes.base import Probe, dot
from steindiff.probes.vjp import VJP
from steindiff.solvers.base import Solver
from steindiff.tableau import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


class SteinGamma(NamedTuple):
    """The reference-free coefficient of one step: where it starts, γ, and its standard error."""

    sigma: float
    gamma: float
    error: float


def stein_gamma(
    step: Step, x: Tensor, level: Level, generator: torch.Generator, probe: Probe | None = None
) -> SteinGamma:
    """The reference-free coefficient (Thm 4.7) of a step at states `x`, `(B, *)`, whatever law they have."""
    probed = (probe or VJP())(step, x, level, generator)
    u = x - probed.candidate
    numerator = stein_numerator(dot(u, x), x[0].numel() - probed.divergence, level)
    gamma, error = ratio_error(numerator, dot(u, u))
    return SteinGamma(level.sigma, float(gamma), float(error))


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

    Args:
        denoiser: D.
        clean: known clean data, `(B, *)`.
        levels: the run; a step from α = 0, which has no Stein form, is left out.
        solver: its solver.
        generator: draws noise and probes.
        probe: how the divergence is found; default 5 VJP probes.
        flow: the exact flow, for the oracle; default many small Heun steps.
    """
    flow = flow or fine_flow(denoiser, levels.schedule)
    found = []
    for i in (i for i in range(levels.steps) if levels[i].alpha > 0.0):
        step = ideal_step(denoiser, clean, levels, i, solver, generator)
        found.append(gammas(step, couple(clean, levels[i], generator), clean, levels, i, flow, generator, probe))
    return tuple(found)


def sampled_gammas(
    denoiser: Denoiser,
    clean: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    probe: Probe | None = None,
) -> tuple[SteinGamma, ...]:
    """γ̃: the reference-free coefficient along a plain run that starts at the forward coupling, as a sampler sees it.

    Arguments as for `ideal_gammas`.
    """
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        if levels[i].alpha > 0.0:
            found.append(stein_gamma(step, x, levels[i], generator, probe))

    sample(denoiser, couple(clean, levels[0], generator), levels, solver, WithHook(look))
    return tuple(found)


def plot_gammas(data: Sequence[Gammas], axes: Axes, sampled: Sequence[SteinGamma] = ()) -> None:
    """The coefficients over σ, the Stein ones with two standard errors: on ideal states, and on a sampler's own."""
    sigma = [row.sigma for row in data]
    axes.plot(sigma, [row.direct for row in data], "o-", label="direct, $x^*$ known")
    ideal = [SteinGamma(row.sigma, row.stein, row.stein_error) for row in data]
    for rows, style, label in ((ideal, "s--", "Stein, ideal states"), (sampled, "D-.", "Stein, sampled states")):
        if rows:
            errors = [2.0 * row.error for row in rows]
            values = [row.gamma for row in rows]
            axes.errorbar([row.sigma for row in rows], values, yerr=errors, fmt=style, capsize=3, label=label)
    axes.plot(sigma, [row.oracle for row in data], "^:", label="oracle, exact flow")
    axes.axhline(1.0, color="black", linewidth=0.8, label="plain solver")
    axes.set(xlabel="$\\sigma$", ylabel="$\\gamma$", xscale="log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.invert_xaxis()
    axes.legend()
