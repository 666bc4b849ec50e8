r"""What a model says about its own data: a fine trajectory with measurements, and no reference data.

Two facts from Stein's identity on x = α x* + σ ε, with J = ∂D/∂x and a band f of an orthonormal basis:

    Cov(x* | x) = (σ²/α) J,   hence   M_f = E|x*_f|² = E|D_f|² + (σ²/α) E[J_ff]      (clean energy)
    σ² E tr(J²) = σ² E‖Jᵀv‖²                                                          (where steps are costly)

Both need only D and pull-backs Jᵀv of Rademacher directions v: J_ff ≈ (Bv)_f (B Jᵀv)_f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steindiff._distributed import all_reduce_sum, local_only, rank
from steindiff.averages import mean
from steindiff.bases import Basis, natural_basis
from steindiff.denoisers.base import Denoiser
from steindiff.denoisers.batched import Batched
from steindiff.grids.base import Grid
from steindiff.grids.logsnr import LogSNR
from steindiff.grids.stein import Stein
from steindiff.levels import Level, Levels
from steindiff.loop import StepInfo, sample
from steindiff.probes._pullback import Route, by_autograd, pullback
from steindiff.probes.directions import Rademacher
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise
from steindiff.solvers.base import Solver
from steindiff.solvers.dpmpp import DPMSolverMultistep
from steindiff.tableau import HERE, Stage

Conditioned = Callable[[Sequence[int]], Denoiser]
"""Seeds to the denoiser of a batch with those seeds: a sample's condition belongs to its seed."""


def cut(seeds: Sequence[int], batch: int) -> list[Sequence[int]]:
    """The seeds in parts of at most `batch`."""
    if batch < 1:
        raise ValueError(f"batch = {batch}: allowed are whole numbers >= 1")
    return [seeds[k : k + batch] for k in range(0, len(seeds), batch)]


def conditioned(denoiser: Denoiser | Conditioned, seeds: Sequence[int], batch: int) -> Denoiser:
    """The denoiser of all `seeds` together, evaluated in parts of at most `batch`."""
    parts = cut(seeds, batch)
    return Batched(
        [denoiser if isinstance(denoiser, Denoiser) else denoiser(part) for part in parts],
        [len(part) for part in parts],
    )


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


def measure(
    denoiser: Denoiser,
    x: Tensor,
    level: Level,
    basis: Basis,
    v: Tensor,
    route: Route = by_autograd,
) -> ProbedLevel:
    """Measure at states `x`, `(N, *)`, of one level, in directions `v`, `(probes, N, *)`."""
    gain = torch.zeros(len(x), basis.bands, dtype=torch.float64, device=x.device)
    square = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    d, pull = pullback(lambda z: denoiser(z, level), x, route)
    for direction in v:
        pulled = pull(direction)
        gain += basis.average(basis.forward(direction) * basis.forward(pulled)) / len(v)
        square += pulled.double().square().flatten(1).sum(1) / len(v)
    return ProbedLevel(level, basis.average(basis.forward(d).square()), gain, square)


@dataclass(frozen=True)
class Trajectory:
    r"""A trajectory that can be read at any level between its ends.

    In κ = α/σ the ODE is d(x/σ)/dκ = D: states and denoised images are values and slopes of one curve, and a cubic
    Hermite polynomial joins them. Where the slope at the end of a stretch was not evaluated it is a straight line.

    Attributes:
        levels: that were visited.
        states: at all of them, each `(N, *)`, in main memory.
        denoised: at the first ones, each `(N, *)`, likewise.
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
        """The states at `level`, `(N, *)`.

        Raises:
            ValueError: if the trajectory does not reach that level.
        """
        if not self.reaches(level):
            raise ValueError(f"level = {level}: the fine trajectory goes from {self.levels[0]} to {self.levels[-1]}")
        if (k := self._visit(level)) is not None:
            return self.states[k]
        i = max(k for k, known in enumerate(self.levels) if known.ratio > level.ratio)
        s, e = self.levels[i], self.levels[i + 1]
        start, end = s.alpha / s.sigma, e.alpha / e.sigma
        width = end - start
        u = (level.alpha / level.sigma - start) / width
        if i + 1 == len(self.denoised):
            value = (1.0 - u) / s.sigma * self.states[i] + u / e.sigma * self.states[i + 1]
        else:
            value = (1.0 + 2.0 * u) * (1.0 - u) ** 2 / s.sigma * self.states[i]
            value = value + u * u * (3.0 - 2.0 * u) / e.sigma * self.states[i + 1]
            value = value + width * u * (1.0 - u) ** 2 * self.denoised[i]
            value = value - width * u * u * (1.0 - u) * self.denoised[i + 1]
        return level.sigma * value


@dataclass(frozen=True)
class ReferenceRun:
    """A fine trajectory with measurements.

    Attributes:
        schedule: the schedule it ran on.
        basis: the basis of the bands.
        seeds: of the samples of all processes.
        own: those of this process, N of them, in order of rank.
        probe_levels: measured levels, from noise to data, on the first of all samples, as far as they are its own.
        path: the trajectory of its own.
        network_calls: what it cost, the probe_levels included.
        backward_passes: likewise.
    """

    schedule: Schedule
    basis: Basis
    seeds: tuple[int, ...]
    own: tuple[int, ...]
    probe_levels: tuple[ProbedLevel, ...]
    path: Trajectory
    network_calls: int
    backward_passes: int

    @property
    def samples(self) -> Tensor:
        """Where the trajectory ended, `(N, *)`."""
        return self.path.states[-1]

    def self_energy(self) -> Tensor:
        """The energy |x_f|² of the trajectory's own samples, `(N, K)`: right also where D is no conditional mean."""
        return self.basis.average(self.basis.forward(self.samples).square())

    def stein_energy(self, ratio: float) -> Tensor:
        r"""The reference-free clean energy at the station nearest to σ/α = `ratio`, mean over samples, `(1, K)`."""
        if not self.probe_levels:
            raise ValueError("probe_levels = 0: the reference-free energy needs a survey with probe_levels")
        station = min(self.probe_levels, key=lambda s: abs(s.level.lam - Level(0.0, 1.0, ratio).lam))
        return mean(station.clean_energy())[None]

    @property
    def sigma_data(self) -> float:
        """Root mean square of the samples, the scale σ/α is compared with."""
        return float(mean(self.samples.double().square().flatten(1).mean(1)).sqrt())

    @property
    def peak_band_rms(self) -> float:
        """Root energy of the samples' strongest band, per coefficient: noise far above it hides everything."""
        return float(mean(self.self_energy()).max().sqrt())

    def grid(self, power: float = 0.2) -> Stein:
        """The Stein grid that follows from the probe_levels; it ends where the trajectory did."""
        knots = [(station.level.lam, max(station.cost(), 1e-12)) for station in self.probe_levels]
        return Stein(tuple(knots), power, to_zero=self.path.levels[-1].sigma == 0.0)


def reference_run(
    denoiser: Denoiser | Conditioned,
    schedule: Schedule,
    shape: Sequence[int],
    *,
    seeds: Sequence[int] = range(64),
    steps: int = 24,
    probe_levels: int = 10,
    probe_samples: int = 16,
    probes: int = 2,
    batch: int = 64,
    basis: Basis | None = None,
    grid: Grid | None = None,
    solver: Solver | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    route: Route = by_autograd,
    callback: Callable[..., bool | None] | None = None,
) -> ReferenceRun:
    """Sample with many steps, then measure at some of the levels passed.

    Args:
        denoiser: D(x, level), or a function from seeds to the denoiser of those samples.
        schedule: the model's schedule.
        shape: of one sample.
        seeds: of the samples; calibrate on seeds you do not evaluate on.
        steps: of the trajectory; enough for its end to be trusted.
        probe_levels: how many of its levels to measure at; 0 needs no derivative and allows no Stein grid.
        probe_samples: on how many of the samples.
        probes: Rademacher directions for each.
        batch: at most so many samples in one network call.
        basis: default: the natural one for `shape`.
        grid: of the trajectory; log-SNR's by default, to σ = 0 where the schedule `ends_above_pixel_noise`. Calibrated
            runs on the Stein grid end where it ends; a trajectory to σ = 0 serves runs of both kinds.
        solver: of the trajectory; default DPM-Solver++(3M). It must evaluate once a step, at the state it visits.
        device: where to run.
        dtype: of the state.
        route: how to pull back.
        callback: as in `sample`.

    Raises:
        ValueError: if a count is out of range, or the solver evaluates elsewhere.
    """
    if probe_levels < 0 or probe_levels == 1 or probe_levels > steps:
        raise ValueError(f"probe_levels = {probe_levels}: allowed are 0, and 2 to steps = {steps}")
    if probe_levels and (probes < 1 or not 1 <= probe_samples <= len(seeds)):
        raise ValueError(
            f"probes = {probes}, probe_samples = {probe_samples}: need >= 1 probe on 1 to {len(seeds)} samples"
        )
    shape = tuple(shape)
    basis = basis or natural_basis(shape)
    grid = grid or LogSNR(to_zero=schedule.ends_above_pixel_noise)
    levels = grid(schedule.finite_start(), steps)
    solver = solver or DPMSolverMultistep(3)
    if any(solver.tableau(levels, i).stages != (Stage(HERE, levels[i]),) for i in range(levels.steps)):
        raise ValueError(f"solver = {solver!r}: allowed are those that evaluate once a step, at the state they visit")
    batches = cut(seeds, batch)
    if len(batches) < rank().world:
        raise ValueError(
            f"batch = {batch}: {len(seeds)} samples are fewer than a batch for each of {rank().world} processes"
        )
    parts = rank().slice(batches)  # whole batches, so that each is what one process alone would evaluate
    own = tuple(seed for part in parts for seed in part)
    first = tuple(seeds).index(own[0])
    whole = conditioned(denoiser, own, batch)
    calls = whole.calls
    x = noise(own, shape, levels[0], dtype).to(device)
    # Many steps of many samples: kept in main memory, whatever the device has.
    states, denoised = [x.cpu()], []

    def watch(moment: StepInfo) -> bool | None:
        assert moment.denoised is not None, "the solver evaluates at every state"
        states.append(moment.x.cpu())
        denoised.append(moment.denoised.cpu())
        return None if callback is None else callback(moment)

    sample(whole, x, levels, solver, callback=watch)
    cost = whole.calls - calls
    measured = []
    for k in range(probe_levels):
        i = round(k * (levels.steps - 1) / (probe_levels - 1))
        generator = torch.Generator().manual_seed(i)
        none = torch.zeros(0, basis.bands, dtype=torch.float64, device=device)
        found = [ProbedLevel(levels[i], none, none, none.sum(1))]
        for start in range(0, probe_samples, batch):
            chosen = seeds[start : min(start + batch, probe_samples)]
            with local_only():  # every process draws for all parts, and keeps what is its own
                v = Rademacher().draw(probes, x.new_empty(len(chosen), *shape), generator)
            if first <= start < first + len(own):
                here = states[i][start - first :][: len(chosen)].to(device)
                chunk = conditioned(denoiser, chosen, batch)
                before = chunk.calls
                found.append(measure(chunk, here, levels[i], basis, v, route))
                cost += chunk.calls - before
        measured.append(
            ProbedLevel(
                levels[i], *(torch.cat([getattr(p, name) for p in found]) for name in ("energy", "gain", "square"))
            )
        )
    passes = probe_levels * -(-probe_samples // batch) * probes if probe_levels else 0
    path = Trajectory(levels, tuple(states), tuple(denoised))
    cost = int(all_reduce_sum(torch.tensor(cost)))
    return ReferenceRun(schedule, basis, tuple(seeds), own, tuple(measured), path, cost, passes)
