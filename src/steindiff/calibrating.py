r"""Stein calibration: measure once where to step and what leads each step aright, then replay for free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steindiff._distributed import all_reduce_sum
from steindiff.calibration import Calibration, fingerprint
from steindiff.corrections.alignment import Alignment, mismatch
from steindiff.corrections.balance import Balance
from steindiff.corrections.base import Correction
from steindiff.corrections.plain import Plain
from steindiff.denoisers.base import Denoiser
from steindiff.grids.base import Grid
from steindiff.grids.logsnr import LogSNR
from steindiff.levels import Levels
from steindiff.loop import SampleResult, sample
from steindiff.reference_run import Conditioned, ReferenceRun, conditioned, reference_run
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise
from steindiff.solvers.base import Solver

Energy = Callable[[ReferenceRun], Tensor]
"""Where the clean energy M comes from: a survey to `(N, K)` or `(1, K)`."""


@dataclass(frozen=True)
class SelfEnergy:
    """M of the model's own many-step samples, seed by seed; right under guidance too."""

    def __call__(self, measured: ReferenceRun) -> Tensor:
        return measured.self_energy()


@dataclass(frozen=True)
class SteinEnergy:
    r"""The reference-free M_f = E|D_f|² + (σ²/α) E[J_ff], read where σ/α is `ratio` times the data's scale."""

    ratio: float = 0.5

    def __call__(self, measured: ReferenceRun) -> Tensor:
        return measured.stein_energy(self.ratio * measured.sigma_data)


Fit = Callable[[ReferenceRun], Correction]
"""How a coarse run is corrected while it is measured: a survey to a correction that says ρ, τ and their errors."""


@dataclass(frozen=True)
class ByAlignment:
    r"""Align with the model's own fine trajectory and match its typical energy; see `corrections.alignment`.

    Args:
        below: balance the energy of steps that end at σ/α <= below · σ_data.
        bound: keep the energy factor in [1/bound, bound].
        significance: leave a band alone unless the correction exceeds so many standard errors.
        terms: how many differences of the latest denoised images to use.
        tail: weight of busy images in the fit; a large number (1e9) counts all alike.
        ridge: pull towards the plain step.
    """

    below: float = 2.0
    bound: float = 4.0
    significance: float = 2.0
    terms: int = 2
    tail: float = 0.1
    ridge: float = 1e-3

    def __call__(self, measured: ReferenceRun) -> Correction:
        return Alignment(
            measured.basis,
            measured.path,
            self.below * measured.sigma_data,
            self.bound,
            self.significance,
            self.terms,
            self.tail,
            self.ridge,
        )


@dataclass(frozen=True)
class ByEnergy:
    r"""Only balance the energy, one factor a band; see `corrections.balance`.

    Args:
        energy: where the clean energy M comes from: `SelfEnergy()`, or a `SteinEnergy`.
        below: balance steps that end at σ/α <= below · σ_data; 0 the last step only, ∞ all.
        bound: keep ρ in [1/bound, bound].
        significance: leave a band alone unless |ρ − 1| exceeds this many standard errors.
    """

    energy: Energy = SelfEnergy()
    below: float = 2.0
    bound: float = 4.0
    significance: float = 2.0

    def __call__(self, measured: ReferenceRun) -> Correction:
        below = self.below * measured.sigma_data
        return Balance(measured.basis, self.energy(measured), below, self.bound, self.significance)


@dataclass(frozen=True)
class Recipe:
    r"""How to calibrate: the effort of the survey, where to step, how to correct.

    Args:
        steps: of the fine trajectory.
        probe_levels: at how many of its levels to probe.
        probe_samples: on how many of its samples, at most.
        probes: Rademacher directions for each.
        power: exponent of the Stein grid.
        start: begin where σ/α is so many times the root energy of the samples' strongest band, so that no evaluation is
            spent on noise that hides everything; None: where the schedule begins. Pays for few evaluations.
        grid: another grid instead of the Stein grid; no derivatives are taken then, unless a `fit` is given.
        fit: how to correct; default `ByAlignment()`.
        tolerance: keep the plain solver if it ends no further than this from the trajectory (`mismatch`); 0: never.
    """

    steps: int = 24
    probe_levels: int = 10
    probe_samples: int = 16
    probes: int = 2
    power: float = 0.2
    start: float | None = None
    grid: Grid | None = None
    fit: Fit | None = None
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        if self.start is not None and not 0 < self.start < math.inf:
            raise ValueError(f"start = {self.start}: allowed are finite numbers > 0, and None")
        if not self.tolerance >= 0:
            raise ValueError(f"within = {self.tolerance}: allowed are numbers >= 0")

    def reference_run(self, seeds: Sequence[int]) -> dict[str, Any]:
        """What `survey` needs to know."""
        probe_levels = 0 if self.grid is not None and self.fit is None else self.probe_levels
        effort = {"steps": self.steps, "probe_levels": probe_levels, "probes": self.probes}
        return {"seeds": seeds, "probe_samples": min(self.probe_samples, len(seeds)), **effort}


HOST_RECIPE = Recipe(probe_levels=8, probe_samples=8)
"""For the networks of hosts, whose derivatives are dear."""


def calibrate(
    denoiser: Denoiser | Conditioned,
    solver: Solver,
    schedule: Schedule,
    nfe: int,
    shape: Sequence[int],
    *,
    recipe: Recipe | None = None,
    measured: ReferenceRun | None = None,
    seeds: Sequence[int] = range(64),
    batch: int = 64,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    settings: dict[str, Any] | None = None,
    callback: Callable[..., bool | None] | None = None,
) -> Calibration:
    r"""Calibrate a solver at a budget.

    A survey (many steps, Rademacher probes at some levels) gives the Stein grid and the trajectory to follow. Then the
    coarse trajectory is run once and corrected, each step seeing the states the corrected steps before it made.

    With enough evaluations a good solver is as near to the trajectory as the trajectory is to the truth, and there is
    nothing left to correct. So the plain solver is run first, evenly in log-SNR or on the recipe's own grid; where it
    ends `within` the trajectory, that run is the calibration.

    Args:
        denoiser: D(x, level), or a function from seeds to the denoiser of those samples.
        solver: the solver to calibrate.
        schedule: the model's schedule.
        nfe: evaluations of a run.
        shape: of one sample.
        recipe: how; default `Recipe()`.
        measured: a survey of this model made before, to be shared by several calibrations; its seeds are used.
        seeds: of the survey, if it is made here; calibrate on seeds you do not evaluate on.
        batch: at most so many samples in one network call.
        device: where to run.
        dtype: of the state.
        settings: further facts to record, and to be checked before use (guidance, prompts).
        callback: as in `sample`.
    """
    recipe = recipe or Recipe()
    measured = measured or reference_run(
        denoiser,
        schedule,
        shape,
        **recipe.reference_run(seeds),
        batch=batch,
        grid=LogSNR() if recipe.grid else None,  # a trajectory to σ = 0 serves any grid
        device=device,
        dtype=dtype,
        callback=callback,
    )
    whole = conditioned(denoiser, measured.own, batch)
    calls = whole.calls

    def run(levels: Levels, correction: Correction) -> SampleResult:
        x = noise(measured.own, shape, levels[0], dtype).to(device)
        return sample(whole, x, levels, solver, correction, callback=callback)

    late = schedule if recipe.start is None else schedule.starting_at(recipe.start * measured.peak_band_rms)
    if not late.ratio_max > late.ratio_min:
        raise ValueError(f"start = {recipe.start}: sigma/alpha = {late.ratio_max:.4g} is below the schedule's smallest")
    levels = solver.levels(recipe.grid or measured.grid(0.0), schedule, nfe)
    rows, how, power, start = [StepRow()] * levels.steps, repr(Plain()), 0.0, None
    checked = recipe.tolerance > 0 and measured.path.reaches(levels[-1])
    if not checked or recipe.tolerance < mismatch(
        measured.basis, run(levels, Plain()).x.cpu(), measured.path(levels[-1])
    ):
        fit, power = recipe.fit or ByAlignment(), recipe.power
        start = None if late is schedule else recipe.start
        levels = Levels(solver.levels(recipe.grid or measured.grid(power), late, nfe).levels, schedule)
        rows, how = [step_row(found) for found in run(levels, fit(measured)).statistics], repr(fit)
    spent = int(all_reduce_sum(torch.tensor(whole.calls - calls)))
    return Calibration(
        solver,
        levels,
        measured.basis,
        tuple(row.rho for row in rows),
        (1.0,) * levels.steps,
        tuple(row.error for row in rows),
        fingerprint(conditioned(denoiser, measured.seeds[:1], 1), shape, schedule, device),
        {
            **(settings or {}),
            "seed": measured.seeds[0],
            "samples": len(measured.seeds),
            "grid": type(recipe.grid).__name__ if recipe.grid else f"Stein, power {power}",
            "start": start,
            "fit": how,
            "network_calls": measured.network_calls + spent,
            "backward_passes": measured.backward_passes,
            "torch": torch.__version__,
        },
        tuple(row.tau for row in rows),
    )


class StepRow(NamedTuple):
    """What a calibration keeps of one step; all empty where it is left alone."""

    rho: tuple[float, ...] = ()
    tau: tuple[tuple[float, ...], ...] = ()
    error: tuple[float, ...] = ()


def step_row(statistics: Mapping[str, Any]) -> StepRow:
    """The row of a step from what its correction said."""
    rho, tau = statistics.get("rho"), statistics.get("tau", ())
    if rho is None or not (bool((rho != 1.0).any()) or any(bool(row.any()) for row in tau)):
        return StepRow()
    return StepRow(tuple(rho.tolist()), tuple(tuple(row.tolist()) for row in tau), tuple(statistics["error"].tolist()))
