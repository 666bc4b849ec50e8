r"""A model's own fine trajectory: many small steps of some seeds, to which coarse steps are fitted. No data needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._distributed import all_reduce_sum, mean, rank
from steindiff.bases import Basis, natural_basis
from steindiff.corrections.alignment import Groups
from steindiff.denoisers.base import Denoiser
from steindiff.grids.rules import LogSNR
from steindiff.grids.stein import Stein
from steindiff.levels import Level, Levels
from steindiff.loop import StepInfo, sample
from steindiff.model import Model
from steindiff.seeding import check_seeds, in_batches
from steindiff.solvers.dpmpp import DPMSolverMultistep

STEPS = 24
"""Steps of a trajectory, at least, unless told otherwise."""
LARGE = 2 * 2**30
"""Bytes beyond which a trajectory is kept in half precision."""


@dataclass(frozen=True)
class Trajectory:
    r"""A trajectory that can be read at any level between its ends.

    States `(N, *)` are kept at all levels visited, denoised images at the first ones, in main memory. In κ = α/σ the
    ODE is d(x/σ)/dκ = D: they are values and slopes of one curve, and a cubic Hermite polynomial joins them. Where the
    slope at the end of a stretch was not evaluated it is a straight line.
    """

    levels: Levels
    states: tuple[Tensor, ...]
    denoised: tuple[Tensor, ...]

    def _visit(self, level: Level) -> int | None:
        """Which of the levels visited it is; None where it is none of them."""
        same = (k for k, known in enumerate(self.levels) if math.isclose(known.ratio, level.ratio, rel_tol=1e-9))
        return next(same, None)

    def reaches(self, level: Level) -> bool:
        """Whether the trajectory passes or ends at that level."""
        finest = min(known.ratio for known in self.levels if known.sigma > 0.0)
        return self._visit(level) is not None or finest < level.ratio < self.levels[0].ratio

    def __call__(self, level: Level) -> Tensor:
        """The states at `level`, `(N, *)`."""
        if not self.reaches(level):
            raise ValueError(f"level = {level}: the fine trajectory goes from {self.levels[0]} to {self.levels[-1]}")
        if (k := self._visit(level)) is not None:
            return self.states[k].float() if self.states[k].dtype.itemsize < 4 else self.states[k]
        i = max(k for k, known in enumerate(self.levels) if known.ratio > level.ratio)
        s, e = self.levels[i], self.levels[i + 1]
        start, end = s.alpha / s.sigma, e.alpha / e.sigma
        width = end - start
        u = (level.alpha / level.sigma - start) / width
        terms = [((1.0 - u) / s.sigma, self.states[i]), (u / e.sigma, self.states[i + 1])]
        if i + 1 < len(self.denoised):
            terms = [
                ((1.0 + 2.0 * u) * (1.0 - u) ** 2 / s.sigma, self.states[i]),
                (u * u * (3.0 - 2.0 * u) / e.sigma, self.states[i + 1]),
                (width * u * (1.0 - u) ** 2, self.denoised[i]),
                (-width * u * u * (1.0 - u), self.denoised[i + 1]),
            ]
        wide = torch.promote_types(self.states[i].dtype, torch.float32)
        total = torch.zeros_like(self.states[i], dtype=wide)
        for weight, tensor in terms:
            total.add_(tensor.to(wide), alpha=level.sigma * weight)
        return total


@dataclass(frozen=True)
class ReferenceRun:
    """A fine trajectory of a model.

    Attributes:
        model: whose it is.
        basis: the basis of the bands.
        seeds: of the samples of all processes.
        local_seeds: those of this process, N of them, in order of rank.
        trajectory: of the local seeds.
        batch: samples in one network call, at most.
        network_calls: what it cost, over all processes.
    """

    model: Model
    basis: Basis
    seeds: tuple[int, ...]
    local_seeds: tuple[int, ...]
    trajectory: Trajectory
    batch: int
    network_calls: int

    def denoiser(self) -> Denoiser:
        """The model's denoiser of the local seeds."""
        return self.model.denoiser_for(self.local_seeds, self.batch)

    @property
    def samples(self) -> Tensor:
        """Where the trajectory ended, `(N, *)`."""
        return self.trajectory(self.trajectory.levels[-1])

    @property
    def to_zero(self) -> bool:
        """Whether it ended at σ = 0."""
        return self.trajectory.levels[-1].sigma == 0.0

    @property
    def places(self) -> range:
        """The places of the local seeds among all."""
        first = self.seeds.index(self.local_seeds[0])
        return range(first, first + len(self.local_seeds))

    def groups(self, chosen: Callable[[int], bool] = lambda place: True) -> Groups:
        """Which local samples share a condition, among those whose places are `chosen`."""
        places = [k for k in range(len(self.seeds)) if chosen(k)]
        labels = [self.model.condition_of(self.seeds[k]) for k in places]
        return Groups.of(labels, [i for i, k in enumerate(places) if k in self.places])

    def rows(self, chosen: Callable[[int], bool]) -> Tensor:
        """Which local samples are chosen by their places, `(N,)` bool."""
        return torch.tensor([chosen(k) for k in self.places])

    def self_energy(self) -> Tensor:
        """The energy |x_f|² of the trajectory's own samples, `(N, K)`: right also where D is not a conditional mean."""
        return self.basis.average(self.basis.forward(self.samples).square())

    def variances(self) -> Tensor:
        """Band variances of the samples within their condition, E|x′_f|², `(K,)` float64."""
        coefficients = self.basis.forward(self.samples)
        return mean(self.basis.average((coefficients - self.groups().means(coefficients)).square()))

    @property
    def sigma_data(self) -> float:
        """Root mean square of the samples, the scale σ/α is compared with."""
        return float(mean(self.samples.double().square().flatten(1).mean(1)).sqrt())

    @property
    def peak_band_rms(self) -> float:
        """Root energy of the samples' strongest band, per coefficient: noise far above it hides everything."""
        return float(mean(self.self_energy()).max().sqrt())


@dataclass(frozen=True)
class GaussianDensity:
    r"""Steps with density ∝ (σ² E tr(J²))^power in log-SNR, of a Gaussian with the samples' band variances v_f.

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


def reference_run(
    model: Model,
    seeds: Sequence[int],
    *,
    steps: int = STEPS,
    to_zero: bool | None = None,
    batch: int = 64,
    basis: Basis | None = None,
    callback: Callable[[StepInfo], bool | None] | None = None,
) -> ReferenceRun:
    """Sample some seeds with many steps of DPM-Solver++(3M), evenly in log-SNR, and keep the trajectory.

    Args:
        model: what to sample from.
        seeds: of the samples; use seeds you do not evaluate on.
        steps: of the trajectory; enough for its end to be trusted.
        to_zero: end at σ = 0, or at the schedule's smallest level; None: as the schedule suggests. Coarse runs that
            are fitted to it end where it ends.
        batch: samples in one network call, at most.
        basis: of the bands; default: the natural one for the model's shape.
        callback: as in `sample`.
    """
    at_least("steps", steps, 2)
    check_seeds(seeds)
    seeds = tuple(map(int, seeds))
    levels = LogSNR(to_zero=to_zero)(model.schedule.finite_start(), steps)
    levels = Levels(levels.levels, model.schedule)
    batches = in_batches(seeds, batch)
    share = rank()
    if len(batches) < share.world:
        raise ValueError(
            f"batch must leave one for each of {share.world} processes, got {batch} for {len(seeds)} seeds"
        )
    # Whole batches, so that each is what one process alone would evaluate.
    own = tuple(seed for part in share.slice(batches) for seed in part)
    model.check_once(own[:batch])
    denoiser = model.denoiser_for(own, batch)
    calls = denoiser.calls
    x = model.noise(own, levels[0])
    # Many steps of many samples: kept in main memory, whatever the device has, thinned where they are large.
    # By all seeds, not this process's: how many processes there are must not be seen.
    bytes_needed = 2 * steps * len(seeds) * x[0].numel() * x.element_size()
    kept = torch.float16 if bytes_needed > LARGE and x.dtype == torch.float32 else x.dtype
    states, denoised = [x.to("cpu", kept)], []

    def watch(info: StepInfo) -> bool | None:
        assert info.denoised is not None, "the solver evaluates at every state"
        states.append(info.x.cpu() if info.i == levels.steps - 1 else info.x.to("cpu", kept))
        denoised.append(info.denoised.to("cpu", kept))
        return None if callback is None else callback(info)

    sample(denoiser, x, levels, DPMSolverMultistep(3), callback=watch)
    cost = int(all_reduce_sum(torch.tensor(denoiser.calls - calls)))
    trajectory = Trajectory(levels, tuple(states), tuple(denoised))
    return ReferenceRun(model, basis or natural_basis(model.shape), seeds, own, trajectory, batch, cost)
