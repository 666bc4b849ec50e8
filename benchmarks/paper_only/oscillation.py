r"""The paper's picture of a map that is not expansive and yet does not converge: T = −Id (Fig. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from steindiff._distributed import mean
from steindiff.probes.base import dot

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Oscillation:
    """The iterates of x ← (1 − γ) x + γ T(x) with T = −Id, plain (γ = 1) and relaxed.

    Attributes:
        plain: iterates at γ = 1, `(steps + 1, *)`.
        relaxed: iterates at `gamma`, `(steps + 1, *)`.
        gamma: the Stein coefficient for x* = 0 at noise level σ: σ² E div u/E‖u‖², u = 2x.
    """

    plain: Tensor
    relaxed: Tensor
    gamma: float


def oscillation(start: Tensor, steps: int, sigma: float, generator: torch.Generator, batch: int = 4096) -> Oscillation:
    """Iterate T = −Id from `start`, `(*)`, with the γ that Monte Carlo over x ~ N(0, σ²) gives.

    Raises:
        ValueError: if `steps` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    x = sigma * torch.randn((batch, *start.shape), generator=generator, dtype=start.dtype)
    u = x - (-x)
    divergence = 2.0 * start.numel()
    gamma = float(sigma**2 * divergence / mean(dot(u, u)))
    trails = []
    for weight in (1.0, gamma):
        states = [start]
        for _ in range(steps):
            states.append((1.0 - weight) * states[-1] + weight * -states[-1])
        trails.append(torch.stack(states))
    return Oscillation(trails[0], trails[1], gamma)


def plot_oscillation(data: Oscillation, axes: Axes) -> None:
    """Both trails: first coordinate over the step."""
    for trail, style, label in (
        (data.plain, "o-", "$T = -$Id"),
        (data.relaxed, "s--", f"$\\gamma = {data.gamma:.2f}$"),
    ):
        axes.plot(range(len(trail)), trail.flatten(1)[:, 0].tolist(), style, label=label)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="step", ylabel="first coordinate of $x$")
    axes.legend()
