r"""Diagnostics: what the steps of a run do to errors, measured along it; each as data and as a plot on given axes.

Local Lipschitz constants, by power iteration on JᵀJ, what they certify (Prop. 4.1), and the relaxation's γ (Thm 4.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._distributed import ratio_error
from steindiff.corrections.base import WithHook
from steindiff.corrections.relaxation import stein_numerator
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.probes.base import Probe, dot
from steindiff.probes.hutchinson import VJP, Function, proposed, pullback, pushforward
from steindiff.solvers.base import Solver
from steindiff.tableau import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Push = Callable[[Function, Tensor, Tensor], Tensor]
"""A way to compute Jv for a function, a point and a direction, all `(B, *)`."""


def difference(function: Function, x: Tensor, v: Tensor, h: float = 1e-3) -> Tensor:
    """Jv by a central difference, for networks without forward mode; `v` of unit length is moved along by h."""
    return (function(x + h * v) - function(x - h * v)) / (2.0 * h)


def operator_norm(
    function: Function,
    x: Tensor,
    generator: torch.Generator,
    *,
    iterations: int = 50,
    tolerance: float = 1e-3,
    push: Push = pushforward,
) -> Tensor:
    r"""The largest singular value of J = ∂function/∂x at every sample, `(B,)`: its local Lipschitz constant.

    Power iteration v ← JᵀJv, which converges from below; it stops when no value grows by more than `tolerance`. ‖Jv‖
    for a random unit v, as from random pairs of points, would give the root mean square of all singular values: far too
    little in many dimensions. `push` computes Jv: `pushforward`, or `difference` for networks without forward mode.
    """
    shape = (-1, *[1] * (x.ndim - 1))
    _, pull = pullback(function, x)
    v = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    found = x.new_zeros(len(x))
    for _ in range(iterations):
        v = v / _norm(v).clamp_min(torch.finfo(x.dtype).tiny).reshape(shape)
        image = push(function, x, v)
        before, found = found, torch.maximum(found, _norm(image))
        if bool((found - before <= tolerance * found).all()):
            break
        v = pull(image)
    return found


def _norm(x: Tensor) -> Tensor:
    """‖x‖ of every sample, `(B,)`."""
    size: Tensor = x.flatten(1).norm(dim=1)
    return size


@dataclass(frozen=True)
class Lipschitz:
    """Local Lipschitz constants along a trajectory, each `(steps, B)`: L_T, L_D and L_ε, ε = (x − α D)/σ, at each σ."""

    sigma: tuple[float, ...]
    transition: Tensor
    denoiser: Tensor
    noise: Tensor


def lipschitz(
    denoiser: Denoiser,
    x: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    every: int = 1,
    iterations: int = 50,
    tolerance: float = 1e-3,
    push: Push = pushforward,
) -> Lipschitz:
    """Measure L_T, L_D and L_ε along a plain run from `x`, `(B, *)`, at every `every`-th step.

    Other arguments as in `operator_norm`.
    """
    at_least("every", every, 1)
    norm = partial(operator_norm, generator=generator, iterations=iterations, tolerance=tolerance, push=push)

    def noise(z: Tensor, level: Level) -> Tensor:
        return (z - level.alpha * denoiser(z, level)) / level.sigma

    rows: list[list[Tensor]] = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        if i % every == 0:
            functions = (partial(candidate, step), partial(denoiser, level=levels[i]), partial(noise, level=levels[i]))
            rows.append([norm(function, x) for function in functions])

    sample(denoiser, x, levels, solver, WithHook(look))
    transition, clean, predicted = (torch.stack(column) for column in zip(*rows, strict=True))
    return Lipschitz(tuple(level.sigma for level in levels[:-1][::every]), transition, clean, predicted)


def candidate(step: Step, x: Tensor) -> Tensor:
    """T alone, and the refusal of a network without a gradient where one is asked for."""
    return proposed(step, x).candidate


def plot_lipschitz(data: Lipschitz, axes: Axes, label: str = "$L_T$") -> None:
    """Median and range over the batch of L_T, over σ."""
    values = data.transition.cpu()
    middle = values.median(1).values
    (line,) = axes.plot(data.sigma, middle.tolist(), "o-", label=label)
    low, high = values.amin(1).tolist(), values.amax(1).tolist()
    axes.fill_between(data.sigma, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=0.8)
    _over_sigma(axes, "local Lipschitz constant of the step", "log")


@dataclass(frozen=True)
class Certificate:
    r"""What L_D and L_ε certify about first-order steps; one entry a step in every field.

    With r = σ_t/σ_s and b = σ_t h = α_t − r α_s:

    Attributes:
        sigma: σ_s, where the step starts.
        threshold: the L_D at which the certificate is lost, (σ_s − σ_t)/(σ_s α_t − σ_t α_s).
        ceiling: 1/α_t, which the paper puts strictly above the threshold; they are equal where α_s = α_t.
        bound: r + b L_D, at least the Lipschitz constant of T, and equal to it where ∂D/∂x is symmetric and
            positive, as it is for every exact denoiser.
        noise_bound: (1 + σ_s L_ε) α_t/α_s − σ_t L_ε, the appendix's form; never below α_t/α_s, so it certifies
            nothing on schedules whose α does not decrease. Infinite at α_s = 0.
    """

    sigma: tuple[float, ...]
    threshold: tuple[float, ...]
    ceiling: tuple[float, ...]
    bound: tuple[float, ...]
    noise_bound: tuple[float, ...]

    @property
    def holds(self) -> tuple[bool, ...]:
        """Whether the bound in L_D certifies a contraction, step by step."""
        return tuple(bound < 1.0 for bound in self.bound)


def certificate(levels: Levels, denoiser: Sequence[float], noise: Sequence[float]) -> Certificate:
    r"""The certificate of every step, from L_D and L_ε at the start of each, ε = (x − α D)/σ."""
    for name, values in (("denoiser", denoiser), ("noise", noise)):
        if len(values) != levels.steps:
            raise ValueError(f"{name} must have one constant a step ({levels.steps}), got {len(values)}")
    steps = [(levels[i], levels[i + 1]) for i in range(levels.steps)]
    return Certificate(
        sigma=tuple(s.sigma for s, _ in steps),
        threshold=tuple((s.sigma - t.sigma) / (s.sigma * t.alpha - t.sigma * s.alpha) for s, t in steps),
        ceiling=tuple(1.0 / t.alpha for _, t in steps),
        bound=tuple(
            t.sigma / s.sigma + (t.alpha - t.sigma / s.sigma * s.alpha) * value
            for (s, t), value in zip(steps, denoiser, strict=True)
        ),
        noise_bound=tuple(
            float("inf") if s.alpha == 0.0 else (1.0 + s.sigma * value) * t.alpha / s.alpha - t.sigma * value
            for (s, t), value in zip(steps, noise, strict=True)
        ),
    )


def plot_certificate(data: Certificate, axes: Axes) -> None:
    """Both bounds on L_T over σ, with the line below which a step is certified to contract."""
    axes.plot(data.sigma, data.bound, "o-", label="bound from $L_D$")
    axes.plot(data.sigma, data.noise_bound, "s--", label="bound from $L_\\epsilon$")
    axes.axhline(1.0, color="black", linewidth=0.8, label="contraction")
    _over_sigma(axes, "bound on $L_T$", "log")


class SteinGamma(NamedTuple):
    """The reference-free coefficient of one step: where it starts, γ, and its standard error."""

    sigma: float
    gamma: float
    error: float


def sampled_gammas(
    denoiser: Denoiser,
    x: Tensor,
    levels: Levels,
    solver: Solver,
    generator: torch.Generator,
    *,
    probe: Probe | None = None,
) -> tuple[SteinGamma, ...]:
    """γ̃ (Thm 4.7) of every step of a plain run from `x`, `(B, *)`; steps from α = 0 have no Stein form: left out."""
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        level = levels[i]
        if level.alpha > 0.0:
            probed = (probe or VJP())(step, x, level, generator)
            u = x - probed.candidate
            numerator = stein_numerator(dot(u, x), x[0].numel() - probed.divergence, level)
            gamma, error = ratio_error(numerator, dot(u, u))
            found.append(SteinGamma(level.sigma, float(gamma), float(error)))

    sample(denoiser, x, levels, solver, WithHook(look))
    return tuple(found)


def plot_gammas(data: Sequence[SteinGamma], axes: Axes, style: str = "o-", label: str = "$\\gamma$") -> None:
    """The coefficients over σ with two standard errors."""
    errors = [2.0 * row.error for row in data]
    sigma, values = [row.sigma for row in data], [row.gamma for row in data]
    axes.errorbar(sigma, values, yerr=errors, fmt=style, capsize=3, label=label)
    _over_sigma(axes, "$\\gamma$", "symlog", linthresh=1.0)


def _over_sigma(axes: Axes, label: str, scale: Any, **settings: float) -> None:
    axes.set(xlabel="$\\sigma$", ylabel=label, xscale="log")
    axes.set_yscale(scale, **settings)
    if not axes.xaxis_inverted():
        axes.invert_xaxis()
    axes.legend()
