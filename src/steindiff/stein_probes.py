r"""What derivatives say about a model's own data, from Stein's identity on x = α x* + σ ε.

With J = ∂D/∂x and a band f of an orthonormal basis:

    Cov(x* | x) = (σ²/α) J,   hence   M_f = E|x*_f|² = E|D_f|² + (σ²/α) E[J_ff]      (clean energy)
    σ² E tr(J²) = σ² E‖Jᵀv‖²                                                          (where steps are costly)

Both need only D and pull-backs Jᵀv of Rademacher directions v: J_ff ≈ (Bv)_f (B Jᵀv)_f. Calibration does not need them;
they are a choice, `Recipe(grid=SteinDensity())` and `ByEnergy(SteinEnergy())`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._distributed import local_only
from steindiff.averages import mean
from steindiff.bases import Basis
from steindiff.denoisers.base import Denoiser
from steindiff.grids.stein import Stein
from steindiff.levels import Level
from steindiff.probes._pullback import pullback
from steindiff.probes.directions import Rademacher
from steindiff.reference import ReferenceRun
from steindiff.seeding import in_batches


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
class GaussianDensity:
    r"""The same density for a Gaussian with the samples' band variances v_f: no derivative is taken.

    σ² tr(J²) = Σ_f k_f (r v_f/(v_f + r²))² with r = σ/α and k_f coefficients in band f. An ε-network's own derivatives
    inflate the cost at high noise, where its small errors are multiplied by σ/α; this does not.

    Args:
        power: the exponent.
    """

    power: float = 0.2

    def __call__(self, reference: ReferenceRun) -> Stein:
        """The grid of a reference run; it ends where that did."""
        v = reference.variances().cpu()
        k = torch.bincount(reference.basis.index().flatten(), minlength=reference.basis.bands).double()
        levels = [level for level in reference.trajectory.levels if level.sigma > 0.0]
        knots = [
            (level.lam, max(float((k * (level.ratio * v / (v + level.ratio**2)).square()).sum()), 1e-12))
            for level in levels
        ]
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
