r"""The relaxation coefficient γ of every step, measured along a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from steindiff.averages import ratio_error
from steindiff.corrections.base import WithHook
from steindiff.corrections.relaxation import stein_numerator
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.probes.base import Probe, dot
from steindiff.probes.hutchinson import VJP
from steindiff.solvers.base import Solver
from steindiff.tableau import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def sampled_gammas(
    denoiser: Denoiser,
    x: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    probe: Probe | None = None,
) -> tuple[SteinGamma, ...]:
    """γ̃ of every step of a plain run from `x`, `(B, *)`; a step from α = 0, which has no Stein form, is left out."""
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        if levels[i].alpha > 0.0:
            found.append(stein_gamma(step, x, levels[i], generator, probe))

    sample(denoiser, x, levels, solver, WithHook(look))
    return tuple(found)


def plot_gammas(data: Sequence[SteinGamma], axes: Axes, style: str = "o-", label: str = "$\\gamma$") -> None:
    """The coefficients over σ with two standard errors."""
    errors = [2.0 * row.error for row in data]
    sigma, values = [row.sigma for row in data], [row.gamma for row in data]
    axes.errorbar(sigma, values, yerr=errors, fmt=style, capsize=3, label=label)
    axes.set(xlabel="$\\sigma$", ylabel="$\\gamma$", xscale="log")
    axes.set_yscale("symlog", linthresh=1.0)
    if not axes.xaxis_inverted():
        axes.invert_xaxis()
    axes.legend()
