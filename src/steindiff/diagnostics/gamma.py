r"""Three coefficients side by side: with x* known (direct), without it (Stein), and for the flow itself (oracle)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steindiff.averages import mean, ratio_error
from steindiff.corrections.hook import WithHook
from steindiff.corrections.relaxation import stein_numerator
from steindiff.denoisers.base import Denoiser
from steindiff.diagnostics.coupling import Flow, couple, fine_flow, ideal_step
from steindiff.levels import Levels
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
        difference: stein − direct, whose standard error is that of paired samples and so much the smaller.
        oracle: E⟨u, x − Φ(x)⟩/c, the best mixture as seen by the exact flow Φ to the target level.
        gap: J(1) − J(γ*) = (b − c)²/c, what the optimal coefficient gains over the plain step (Thm 4.4).
        excess: c (stein − γ*)², what the estimate loses (Thm 4.11).
    """

    sigma: float
    direct: float
    direct_error: float
    stein: float
    stein_error: float
    difference: float
    difference_error: float
    oracle: float
    gap: float
    excess: float

    @property
    def improves(self) -> bool:
        """The gap condition of Thm 4.11: the estimate beats the plain step in mean square error to x*."""
        return self.excess <= self.gap


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
    c = float(mean(uu))
    return Gammas(
        sigma=levels[i].sigma,
        direct=one,
        direct_error=one_error,
        stein=two,
        stein_error=two_error,
        difference=gap,
        difference_error=gap_error,
        oracle=float(oracle),
        gap=c * (one - 1.0) ** 2,
        excess=c * (two - one) ** 2,
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
    flow: Flow | None = None,
) -> tuple[Gammas, ...]:
    """The coefficients along a plain run that starts at the forward coupling, which is what a sampler sees.

    Arguments as for `ideal_gammas`.
    """
    flow = flow or fine_flow(denoiser, levels.schedule)
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        if levels[i].alpha > 0.0:
            found.append(gammas(step, x, clean, levels, i, flow, generator, probe))

    sample(denoiser, couple(clean, levels[0], generator), levels, solver, WithHook(look))
    return tuple(found)


def plot_gammas(data: Sequence[Gammas], axes: Axes) -> None:
    """The three coefficients over σ, the Stein one with two standard errors."""
    sigma = [row.sigma for row in data]
    axes.plot(sigma, [row.direct for row in data], "o-", label="direct, $x^*$ known")
    axes.errorbar(
        sigma,
        [row.stein for row in data],
        yerr=[2.0 * row.stein_error for row in data],
        fmt="s--",
        capsize=3,
        label="Stein, reference-free",
    )
    axes.plot(sigma, [row.oracle for row in data], "^:", label="oracle, exact flow")
    axes.axhline(1.0, color="black", linewidth=0.8, label="plain solver")
    axes.set(xlabel="$\\sigma$", ylabel="$\\gamma$", xscale="log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.invert_xaxis()
    axes.legend()
