r"""Stein balance: give the denoised image back the energy a coarse step took, band by band.

Write any step as T = r x + b D̄ with r = σ_t/σ_s, b = α_t − r α_s; D̄ is the solver's effective denoised image. Every
marginal has known band energy E|x_f|² = α² M_f + σ². Replace D̄_f by ρ_f D̄_f so that the next state has the energy it
must have if this one does; the noise energy cancels (r² σ_s² = σ_t²), and ρ_f is the positive root of

    b² E|D̄_f|² ρ² + 2 r b E[x_f D̄_f] ρ − (α_t² − r² α_s²) M_f = 0.

An exact solver has ρ = 1, and ρ → 1 as steps shrink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff.averages import mean, standard_error
from steindiff.bases import Basis
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Level, Levels, linear
from steindiff.tableau import Step


class Balanced(NamedTuple):
    """The root ρ_f and its standard error, both `(K,)` float64."""

    rho: Tensor
    error: Tensor


def balance(denoised: Tensor, cross: Tensor, energy: Tensor, s: Level, t: Level) -> Balanced:
    r"""Solve for ρ from sample-wise |D̄_f|², x_f D̄_f and |x*_f|², each `(N, K)`.

    The standard error is that of the implicit function ρ(A, C, M): every sample's influence is
    (b² ρ² a_n + 2 r b ρ c_n − w m_n)/F_ρ, F_ρ = 2 b² A ρ + 2 r b C. Clean energies of the same seeds as the states
    cancel most of the spread.
    """
    r, b = linear(s, t)
    w = t.alpha**2 - (r * s.alpha) ** 2
    a, c, m = mean(denoised), mean(cross), mean(energy)
    quadratic, slant, constant = b * b * a, 2.0 * r * b * c, w * m.clamp(min=0.0)
    root = (slant.square() + 4.0 * quadratic * constant).sqrt()
    # The two forms of the positive root; each avoids the cancellation of the other.
    rho = torch.where(slant > 0, 2.0 * constant / (slant + root), (root - slant) / (2.0 * quadratic))
    rho = torch.where(quadratic > 0, rho, torch.ones_like(rho))
    slope = 2.0 * quadratic * rho + slant
    influence = b * b * rho.square() * denoised + 2.0 * r * b * rho * cross - w * energy
    error = standard_error(influence) / slope.abs().clamp(min=torch.finfo(torch.float64).tiny)
    return Balanced(rho, error)


def rebalance(basis: Basis, x: Tensor, candidate: Tensor, s: Level, t: Level, excess: Tensor) -> Tensor:
    r"""The state r x + b ρ D̄ = T + B⁻¹[(ρ − 1) ⊙ B(T − r x)], `(B, *)`; `excess` is ρ − 1 of every coefficient."""
    r, _ = linear(s, t)
    residual = candidate if r == 0.0 else candidate.sub(x, alpha=r)
    return candidate + basis.filter(residual, excess)


@dataclass(frozen=True)
class Balance(Correction):
    r"""Stein balance with ρ measured on the batch itself. Run it to calibrate; sample with `Replay`. See `ByEnergy`.

    Args:
        basis: orthonormal basis and its bands.
        energy: clean energies |x*_f|² or their estimates, `(N, K)` for the seeds of the batch or `(1, K)` for all.
    """

    basis: Basis
    energy: Tensor
    below: float = float("inf")
    bound: float = 4.0
    significance: float = 2.0

    def __post_init__(self) -> None:
        if not self.bound >= 1:
            raise ValueError(f"bound must be >= 1, got {self.bound}")
        if not self.below >= 0:
            raise ValueError(f"below must be >= 0, got {self.below}")
        if not self.significance >= 0:
            raise ValueError(f"significance must be >= 0, got {self.significance}")
        if self.energy.ndim != 2 or self.energy.shape[1] != self.basis.bands:
            raise ValueError(f"energy: shape {tuple(self.energy.shape)}, need (samples or 1, {self.basis.bands} bands)")

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        s, t = levels[i], levels[i + 1]
        candidate, evaluations = step(x)
        if t.ratio > self.below:
            return Transition(candidate, evaluations, {"rho": None})
        r, b = linear(s, t)
        coefficients = self.basis.forward(x)
        effective = (self.basis.forward(candidate) - r * coefficients) / b
        energy = self.energy.to(x.device).expand(len(x), -1)
        found = balance(
            self.basis.average(effective.square()), self.basis.average(coefficients * effective), energy, s, t
        )
        rho = found.rho.clamp(1.0 / self.bound, self.bound)
        rho = torch.where((rho - 1.0).abs() > self.significance * found.error, rho, torch.ones_like(rho))
        excess = self.basis.spread(rho - 1.0).to(x.dtype)
        return Transition(
            rebalance(self.basis, x, candidate, s, t, excess), evaluations, {"rho": rho, "error": found.error}
        )
