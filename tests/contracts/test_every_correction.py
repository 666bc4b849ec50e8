"""What every correction must keep, for every variant found in the folder."""

from __future__ import annotations

import pytest
import torch

from paper_only.consistency import VARIANTS as CONSISTENCY
from problems import FLOAT, PROBLEMS
from steindiff import GRIDS, SCHEDULES, SOLVERS, noise, sample
from steindiff.corrections import CORRECTIONS, Correction
from steindiff.schedules import EDM, VP, Schedule
from steindiff.solvers import Solver

FOUND = {**CORRECTIONS, **CONSISTENCY}
corrections = pytest.mark.parametrize("correction", FOUND.values(), ids=FOUND.keys())


@corrections
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
def test_spends_no_evaluation_beyond_the_solvers(correction: Correction, solver: Solver):
    exact = PROBLEMS["gaussian"]()
    for grid, schedule in (("edm", EDM()), ("logsnr", VP())):
        levels = GRIDS[grid](schedule, 5)
        out = sample(exact.denoiser, noise(range(6), (3,), levels[0], FLOAT), levels, solver, correction)
        assert out.nfe == out.network_calls == solver.calls(levels)
        assert len(out.statistics) == levels.steps
        assert bool(out.x.isfinite().all())


@corrections
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_runs_on_every_schedule_pure_noise_included(correction: Correction, schedule: Schedule):
    exact = PROBLEMS["mixture"]()
    levels = GRIDS["uniform"](schedule, 5)
    out = sample(exact.denoiser, noise(range(8), (1,), levels[0], FLOAT), levels, SOLVERS["dpmpp-2m"], correction)
    assert bool(out.x.isfinite().all())


@corrections
def test_is_pure(correction: Correction):
    exact = PROBLEMS["mixture"]()
    levels = GRIDS["edm"](EDM(), 5)
    x = noise(range(5), (1,), levels[0], FLOAT)
    first, second = (sample(exact.denoiser, x, levels, SOLVERS["heun"], correction).x for _ in range(2))
    assert torch.equal(first, second)


@corrections
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_dtype_and_shape(correction: Correction, dtype: torch.dtype):
    exact = PROBLEMS["gaussian"]()
    exact.denoiser.mean, exact.denoiser.variance = exact.denoiser.mean.to(dtype), exact.denoiser.variance.to(dtype)
    levels = GRIDS["edm"](EDM(), 4)
    out = sample(exact.denoiser, noise(range(2), (3,), levels[0], dtype), levels, SOLVERS["dpmpp-2m"], correction)
    assert out.x.dtype == dtype
    assert out.x.shape == (2, 3)
