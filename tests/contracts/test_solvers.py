"""What every solver must keep, for every variant found in the folder."""

from __future__ import annotations

import math

import pytest
import torch

from problems import FLOAT, PROBLEMS
from steindiff import GRIDS, SCHEDULES, SOLVERS, noise, sample
from steindiff.levels import Level, Levels
from steindiff.sampler import levels_for
from steindiff.schedules import EDM, VP, Schedule
from steindiff.solvers import IPNDM, Solver
from steindiff.tableau import Evaluation, Row, Step

solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())


def dirac(row: Row, x: Level, stages: list[Level], past: list[Level]) -> tuple[float, float]:
    """(signal, noise) of a row on Dirac data, where state k is (α_k, σ_k) and every denoised image is (1, 0)."""
    alpha = row.x * x.alpha + sum(row.d)
    sigma = row.x * x.sigma
    for (u, v), level in zip(row.past, past, strict=False):
        alpha += u * level.alpha + v
        sigma += u * level.sigma
    return alpha, sigma


@solvers
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("grid", ["uniform", "quadratic"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 16])
def test_every_row_is_consistent_on_dirac_data(solver: Solver, schedule: Schedule, grid: str, steps: int):
    levels = GRIDS[grid](schedule, steps)
    past: list[Level] = []
    for i in range(levels.steps):
        tableau = solver.tableau(levels, i)
        here = [stage.level for stage in tableau.stages]
        for row, target in [*tableau.stages, (tableau.output, levels[i + 1])]:
            assert len(row.past) <= min(len(past), solver.memory)
            scale = 1.0 + abs(row.x) * levels[i].sigma
            alpha, sigma = dirac(row, levels[i], here, past)
            assert alpha == pytest.approx(target.alpha, abs=1e-9 * scale)
            assert sigma == pytest.approx(target.sigma, abs=1e-9 * scale)
        past = [*reversed(here), *past][: solver.memory]


def error(solver: Solver, problem: str, steps: int, span: tuple[float, float]) -> float:
    """Final error on levels even in σ, with the history seeded from the exact flow: no cold start."""
    exact = PROBLEMS[problem]()
    high, low = span
    width = (high - low) / steps
    lead = max(solver.memory, 1)
    levels = Levels.from_times(EDM(), [high + lead * width - k * width for k in range(steps + lead + 1)])
    # One level more after the end keeps the run away from the lowered order of the last steps.
    longer = Levels((*levels.levels, *(EDM().level(low - k * width / 8) for k in (1, 2, 3, 4))), EDM())
    x = torch.linspace(-1.5, 1.5, 9, dtype=FLOAT)[:, None] * torch.ones(3 if problem == "gaussian" else 1, dtype=FLOAT)
    x = x * levels[0].sigma
    states = [exact.flow(x, levels[0], level) for level in levels[: lead + 1]]
    history = tuple(
        Evaluation(states[k], exact.denoiser(states[k], levels[k]), levels[k]) for k in reversed(range(lead + 1))
    )
    reuses = solver.tableau(longer, lead).stages[0].level != levels[lead]
    history = (history if reuses else history[1:])[: solver.memory]
    x = states[lead]
    for i in range(lead, levels.steps):
        x, evaluations = Step(solver.tableau(longer, i), exact.denoiser, history)(x)
        history = (*reversed(evaluations), *history)[: solver.memory]
    return float((x - exact.flow(states[0], levels[0], levels[-1])).abs().max())


@solvers
@pytest.mark.parametrize("problem", PROBLEMS)
def test_converges_at_the_order_it_claims(solver: Solver, problem: str):
    errors = [error(solver, problem, n, (2.0, 1.0)) for n in (64, 128)]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(solver.order, abs=0.2), errors


@pytest.mark.parametrize("order", [3, 4])
def test_ipndm_is_second_order_on_uneven_grids(order: int):
    exact = PROBLEMS["gaussian"]()
    errors = []
    for steps in (64, 128):
        levels = GRIDS["edm"](EDM(0.5, 5.0), steps)
        levels = Levels(levels.levels[:-1], levels.schedule)
        x = torch.full((1, 3), 4.0, dtype=FLOAT)
        errors.append(
            float(
                (sample(exact.denoiser, x, levels, IPNDM(order)).x - exact.flow(x, levels[0], levels[-1])).abs().max()
            )
        )
    assert math.log2(errors[0] / errors[1]) == pytest.approx(2, abs=0.35)


@solvers
@pytest.mark.parametrize("to_zero", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_counts_its_evaluations_and_reaches_the_end(solver: Solver, to_zero: bool, steps: int):
    exact = PROBLEMS["gaussian"]()
    schedule = VP()
    levels = type(GRIDS["logsnr"])(to_zero=to_zero)(schedule, steps)
    out = sample(exact.denoiser, noise([1, 2], (3,), levels[0], FLOAT), levels, solver)
    assert out.nfe == out.network_calls == solver.calls(levels)
    assert out.backward_passes == 0
    assert bool(out.x.isfinite().all())


@solvers
def test_a_step_to_zero_noise_lands_on_the_data(solver: Solver):
    """With σ = 0 as target a Dirac's sample is the Dirac, whatever came before."""
    exact = PROBLEMS["gaussian"]()
    exact.denoiser.variance = torch.zeros(3, dtype=FLOAT)
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    out = sample(exact.denoiser, noise(range(4), (3,), levels[0], FLOAT), levels, solver).x
    torch.testing.assert_close(out, exact.denoiser.mean.expand_as(out), atol=1e-9, rtol=0)


@solvers
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_runs_on_every_schedule_pure_noise_included(solver: Solver, schedule: Schedule):
    exact = PROBLEMS["mixture"]()
    levels = GRIDS["uniform"](schedule, 6)
    out = sample(exact.denoiser, noise(range(8), (1,), levels[0], FLOAT), levels, solver)
    assert bool(out.x.isfinite().all())


@solvers
def test_is_pure(solver: Solver):
    """The same inputs twice give the same bits, and nothing handed in is changed."""
    exact = PROBLEMS["mixture"]()
    levels = GRIDS["edm"](EDM(), 6)
    x = noise(range(5), (1,), levels[0], FLOAT)
    before = x.clone()
    first, second = (sample(exact.denoiser, x, levels, solver, capture=True) for _ in range(2))
    assert torch.equal(x, before)
    for a, b in zip(first.trajectory, second.trajectory, strict=True):
        assert torch.equal(a, b)


@solvers
def test_gives_the_levels_for_a_budget_or_says_which_it_can(solver: Solver):
    possible = {solver.calls(GRIDS["edm"](EDM(), steps)) for steps in range(1, 13)}
    for nfe in range(1, 13):
        if nfe in possible:
            assert solver.calls(levels_for(solver, GRIDS["edm"], EDM(), nfe)) == nfe
        else:
            with pytest.raises(ValueError, match=f"nfe must be one .* can spend exactly, got {nfe}"):
                levels_for(solver, GRIDS["edm"], EDM(), nfe)
