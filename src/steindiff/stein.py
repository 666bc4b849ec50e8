r"""What Stein's identity says about a model's own data, as choices of a `Recipe`: where to step, what energy to keep.

*Stein balance* gives the denoised image back the energy a coarse step took, band by band. Write any step as
T = r x + b D̄ with r = σ_t/σ_s, b = α_t − r α_s. Every marginal has known band energy E|x_f|² = α² M_f + σ². Replace
D̄_f by ρ_f D̄_f so that the next state has the energy it must have if this one does; the noise energy cancels, and ρ_f
is the positive root of

    b² E|D̄_f|² ρ² + 2 r b E[x_f D̄_f] ρ − (α_t² − r² α_s²) M_f = 0.

*Stein's identity* on x = α x* + σ ε, with J = ∂D/∂x and a band f of an orthonormal basis:

    Cov(x* | x) = (σ²/α) J,   hence   M_f = E|x*_f|² = E|D_f|² + (σ²/α) E[J_ff]      (clean energy)
    σ² E tr(J²) = σ² E‖Jᵀv‖²                                                          (where steps are costly)

Both need only D and pull-backs Jᵀv of Rademacher directions v: J_ff ≈ (Bv)_f (B Jᵀv)_f.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least, number
from steindiff._distributed import local_only
from steindiff.averages import mean, standard_error
from steindiff.bases import Basis
from steindiff.corrections.base import Correction, Transition
from steindiff.denoisers.base import Denoiser
from steindiff.grids.stein import Stein
from steindiff.levels import Level, Levels, linear
from steindiff.probes import Rademacher, pullback
from steindiff.reference import ReferenceRun
from steindiff.seeding import in_batches
from steindiff.tableau import Step

Energy = Callable[[ReferenceRun], Tensor]
"""Where the clean energy M comes from: a reference run to `(N, K)` or `(1, K)`."""


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
        number("bound", self.bound, 1.0)
        number("below", self.below, 0.0)
        number("significance", self.significance, 0.0)
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
        # r x + b ρ D̄ = T + B⁻¹[(ρ − 1) ⊙ B(T − r x)].
        residual = candidate if r == 0.0 else candidate.sub(x, alpha=r)
        excess = self.basis.spread(rho - 1.0).to(x.dtype)
        balanced = candidate + self.basis.inverse(self.basis.forward(residual) * excess)
        return Transition(balanced, evaluations, {"rho": rho, "error": found.error})


@dataclass(frozen=True)
class ProbedLevel:
    """What was measured at one level, sample by sample (N samples, K bands), float64.

    Attributes:
        level: where.
        energy: |D_f|², `(N, K)`.
        gain: J_ff, `(N, K)`.
        square: ‖Jᵀv‖², an estimate of tr(JJᵀ), `(N,)`.
    """

    level: Level
    energy: Tensor
    gain: Tensor
    square: Tensor

    def clean_energy(self) -> Tensor:
        r"""The reference-free M_f = |D_f|² + (σ²/α) J_ff, `(N, K)`; its mean over samples estimates E|x*_f|²."""
        return self.energy + (self.level.sigma**2 / self.level.alpha) * self.gain

    def cost(self) -> float:
        r"""σ² E tr(J²), the energy a first-order step of unit log-size loses here."""
        return self.level.sigma**2 * float(mean(self.square))


def measure(denoiser: Denoiser, x: Tensor, level: Level, basis: Basis, v: Tensor) -> ProbedLevel:
    """Measure at states `x`, `(N, *)`, of one level, in directions `v`, `(probes, N, *)`."""
    gain = torch.zeros(len(x), basis.bands, dtype=torch.float64, device=x.device)
    square = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    d, pull = pullback(lambda z: denoiser(z, level), x)
    for direction in v:
        pulled = pull(direction)
        gain += basis.average(basis.forward(direction) * basis.forward(pulled)) / len(v)
        square += pulled.double().square().flatten(1).sum(1) / len(v)
    return ProbedLevel(level, basis.average(basis.forward(d).square()), gain, square)


@dataclass(frozen=True)
class SteinProbes:
    """How a reference run is probed.

    Args:
        levels: at how many of its levels.
        samples: on how many of its samples, at most.
        probes: Rademacher directions for each; each is a backward pass.
    """

    levels: int = 10
    samples: int = 16
    probes: int = 2

    def __post_init__(self) -> None:
        at_least("levels", self.levels, 2)
        at_least("samples", self.samples, 1)
        at_least("probes", self.probes, 1)

    def __call__(self, reference: ReferenceRun) -> tuple[ProbedLevel, ...]:
        """Probe a reference run, from noise to data."""
        path, device = reference.trajectory, reference.model.device
        count = min(self.levels, path.levels.steps)
        found = []
        for k in range(count):
            i = round(k * (path.levels.steps - 1) / (count - 1))
            generator = torch.Generator().manual_seed(i)
            parts = []
            for chosen in in_batches(reference.seeds[: self.samples], reference.batch):
                with local_only():  # every process draws for all parts, and keeps what is its own
                    like = torch.empty(len(chosen), *reference.model.shape, dtype=reference.model.dtype, device=device)
                    v = Rademacher().draw(self.probes, like, generator)
                if chosen[0] not in reference.local_seeds:
                    continue
                start = reference.local_seeds.index(chosen[0])
                here = path.states[i][start : start + len(chosen)].to(like)
                denoiser = reference.model.denoiser_for(chosen)
                parts.append(measure(denoiser, here, path.levels[i], reference.basis, v))
            none = torch.zeros(0, reference.basis.bands, dtype=torch.float64, device=device)
            rows = {
                name: torch.cat([*(getattr(p, name) for p in parts), empty])
                for name, empty in (("energy", none), ("gain", none), ("square", none[:, 0]))
            }
            found.append(ProbedLevel(path.levels[i], **rows))
        return tuple(found)


@dataclass(frozen=True)
class SteinDensity:
    r"""Steps with density ∝ (σ² E tr(J²))^power in log-SNR, measured by backward passes.

    Args:
        power: the exponent; 0.2 suits second- and third-order solvers, 0.3 DDIM.
        probes: how to measure.
    """

    power: float = 0.2
    probes: SteinProbes = SteinProbes()

    def __call__(self, reference: ReferenceRun) -> Stein:
        """The grid of a reference run; it ends where that did."""
        knots = [(probed.level.lam, max(probed.cost(), 1e-12)) for probed in self.probes(reference)]
        return Stein(tuple(knots), self.power, to_zero=reference.to_zero)


@dataclass(frozen=True)
class SelfEnergy:
    """M of the model's own many-step samples, seed by seed; right under guidance too."""

    def __call__(self, reference: ReferenceRun) -> Tensor:
        return reference.self_energy()


@dataclass(frozen=True)
class SteinEnergy:
    r"""The reference-free M_f = E|D_f|² + (σ²/α) E[J_ff], read where σ/α is `ratio` times the data's scale."""

    ratio: float = 0.5
    probes: SteinProbes = SteinProbes()

    def __call__(self, reference: ReferenceRun) -> Tensor:
        """Mean over samples, `(1, K)`."""
        wanted = Level(0.0, 1.0, self.ratio * reference.sigma_data).lam
        probed = min(self.probes(reference), key=lambda p: abs(p.level.lam - wanted))
        return mean(probed.clean_energy())[None]


@dataclass(frozen=True)
class ByEnergy:
    r"""Only balance the energy, one factor a band; see `Balance`.

    Args:
        energy: where the clean energy M comes from: `SelfEnergy()`, or a `SteinEnergy`.
        below: balance steps that end at σ/α <= below · σ_data; 0 the last step only, ∞ all.
        bound: keep ρ in [1/bound, bound].
        significance: leave a band alone unless |ρ − 1| exceeds this many standard errors.
    """

    energy: Energy = field(default_factory=SelfEnergy)
    below: float = 2.0
    bound: float = 4.0
    significance: float = 2.0

    def __call__(self, reference: ReferenceRun, steps: int, fitted: Callable[[int], bool] | None = None) -> Correction:
        """The correction for runs of `steps` steps; it fits nothing to single samples."""
        below = self.below * reference.sigma_data
        return Balance(reference.basis, self.energy(reference), below, self.bound, self.significance)
