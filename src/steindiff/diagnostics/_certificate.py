r"""The contractivity certificate of every step (Prop. 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from steindiff.levels import Levels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    r"""The certificate of every step of a run.

    Args:
        levels: the run.
        denoiser: L_D at the start of every step.
        noise: L_ε at the start of every step, ε = (x − α D)/σ.
    """
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
    axes.set(xlabel="$\\sigma$", ylabel="bound on $L_T$", xscale="log", yscale="log")
    axes.invert_xaxis()
    axes.legend()
