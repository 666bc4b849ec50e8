r"""Stein calibration: measure once where to step and how much energy each step loses, then replay for free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steindiff.calibration import Calibration, fingerprint
from steindiff.corrections.balance import Balance
from steindiff.denoisers.base import Denoiser
from steindiff.grids.base import Grid
from steindiff.sample import sample
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise
from steindiff.solvers.base import Solver
from steindiff.survey import Conditioned, Survey, conditioned, survey

Energy = Callable[[Survey], Tensor]
"""Where the clean energy M comes from: a survey to `(N, K)` or `(1, K)`."""


def self_energy(measured: Survey) -> Tensor:
    """M of the model's own many-step samples, seed by seed; right under guidance too."""
    return measured.self_energy()


@dataclass(frozen=True)
class SteinEnergy:
    r"""The reference-free M_f = E|D_f|² + (σ²/α) E[J_ff], read where σ/α is `ratio` times the data's scale."""

    ratio: float = 0.5

    def __call__(self, measured: Survey) -> Tensor:
        return measured.stein_energy(self.ratio * measured.sigma_data)


def calibrate(
    denoiser: Denoiser | Conditioned,
    solver: Solver,
    schedule: Schedule,
    nfe: int,
    shape: Sequence[int],
    *,
    measured: Survey | None = None,
    seeds: Sequence[int] = range(64),
    batch: int = 64,
    power: float = 0.2,
    grid: Grid | None = None,
    energy: Energy = self_energy,
    below: float = 2.0,
    bound: float = 4.0,
    significance: float = 2.0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    settings: dict[str, Any] | None = None,
    callback: Callable[..., bool | None] | None = None,
) -> Calibration:
    r"""Calibrate a solver at a budget.

    A survey (many steps, Rademacher probes at some levels) gives the Stein grid and the clean energy M. Then the
    coarse trajectory is run once with `Balance`, each step seeing the states the corrected steps before it made.

    Args:
        denoiser: D(x, level), or a function from seeds to the denoiser of those samples.
        solver: the solver to calibrate.
        schedule: the model's schedule.
        nfe: evaluations of a run.
        shape: of one sample.
        measured: a survey of this model made before, to be shared by several calibrations; its seeds are used.
        seeds: of the survey, if it is made here.
        batch: at most so many samples in one network call.
        power: exponent of the Stein grid.
        grid: another grid instead of the Stein grid.
        energy: `self_energy`, or a `SteinEnergy`.
        below: balance steps that end at σ/α <= below · σ_data; 0 the last step only, ∞ all.
        bound: keep ρ in [1/bound, bound].
        significance: leave a band alone unless |ρ − 1| exceeds this many standard errors.
        device: where to run.
        dtype: of the state.
        settings: further facts to record, and to be checked before use (guidance, prompts).
        callback: as in `sample`.
    """
    measured = measured or survey(
        denoiser, schedule, shape, seeds=seeds, batch=batch, device=device, dtype=dtype, callback=callback
    )
    levels = solver.levels(grid or measured.grid(power), schedule, nfe)
    x = noise(measured.seeds, shape, levels[0], dtype).to(device)
    whole = conditioned(denoiser, measured.seeds, batch)
    correction = Balance(measured.basis, energy(measured), below * measured.sigma_data, bound, significance)
    out = sample(whole, x, levels, solver, correction, callback=callback)
    rho, error = [], []
    for statistics in out.statistics:
        found = statistics["rho"]
        active = found is not None and bool((found != 1.0).any())
        rho.append(tuple(found.tolist()) if active else ())
        error.append(tuple(statistics["error"].tolist()) if active else ())
    return Calibration(
        solver,
        levels,
        measured.basis,
        tuple(rho),
        (1.0,) * levels.steps,
        tuple(error),
        fingerprint(conditioned(denoiser, measured.seeds[:1], 1), shape, schedule, device),
        {
            **(settings or {}),
            "seed": measured.seeds[0],
            "samples": len(measured.seeds),
            "grid": type(grid).__name__ if grid else f"Stein, power {power}",
            "energy": getattr(energy, "__name__", repr(energy)),
            "below": below,
            "bound": bound,
            "significance": significance,
            "network_calls": measured.network_calls + out.network_calls,
            "backward_passes": measured.backward_passes,
            "torch": torch.__version__,
        },
    )
