"""Stein alignment against exact answers: trajectories known in closed form, fits with a known result."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import problems
from problems import FLOAT, random_calibration
from steindiff import (
    EDM,
    GRIDS,
    SCHEDULES,
    SOLVERS,
    VP,
    ByAlignment,
    Calibration,
    Identity,
    Level,
    Model,
    Recipe,
    ReferenceRun,
    Schedule,
    Solver,
    StepWeights,
    calibrate,
    noise,
    reference_run,
    sample,
)
from steindiff.bases import DCT
from steindiff.corrections.alignment import Alignment, Groups, differences, significant, typical_scale
from steindiff.corrections.base import WithHook
from steindiff.denoisers import Gaussian
from steindiff.reference import GaussianDensity, Trajectory
from steindiff.solvers import DDIM
from steindiff.tableau import Step, latest

BASIS = DCT((1, 8))
SPECTRUM = 1.0 / (1.0 + torch.arange(8, dtype=FLOAT)) ** 2
Spectral = partial(problems.Spectral, BASIS, SPECTRUM)


def model(schedule: Schedule) -> Model:
    return Model(Spectral(), schedule, (1, 8), dtype=FLOAT)


def fine(schedule: Schedule, seeds: range, steps: int = 400, *, to_zero: bool = True) -> ReferenceRun:
    return reference_run(model(schedule), seeds, steps=steps, batch=999, basis=BASIS, to_zero=to_zero)


EXACT = ByAlignment(significance=0.0, ridge=0.0)
REFERENCES = {name: fine(SCHEDULES[name], range(64)) for name in ("edm", "vp", "flow")}
every = pytest.mark.parametrize("name", REFERENCES)


def fit(features: list[Tensor], goal: Tensor, **settings: float) -> Tensor:
    """The weights of features that lead to a goal: a step that starts at nothing and ends at σ = 0."""
    s, t = Level(1.0, 1.0, 1.0), Level(0.0, 1.0, 0.0)
    groups = Groups.of(range(len(goal)))
    alignment = Alignment(BASIS, lambda level: goal, groups, below=0.0, **settings)
    return alignment.fit(features, torch.zeros_like(goal), goal, s, t._replace(sigma=1e-300)).weights


@every
@pytest.mark.parametrize("solver", ["ddim", "dpmpp-2m", "unipc-bh2-2", "heun", "ipndm-3"])
def test_on_gaussian_data_five_aligned_steps_end_where_four_hundred_do(name: str, solver: str):
    """Every step is linear in each coefficient there, so one weight a band makes it exact, also on other seeds."""
    schedule = SCHEDULES[name]
    recipe = Recipe(fit=EXACT, search=None, rivals=())
    found = calibrate(model(schedule), 5, solver, recipe=recipe, reference=REFERENCES[name])
    x = noise(range(100, 120), (1, 8), found.levels[0], FLOAT)
    goal = fine(schedule, range(100, 120)).samples
    plain = sample(Spectral(), x, found.levels, SOLVERS[solver]).x
    aligned = found.sampler()(model(schedule), range(100, 120))
    assert float((aligned.x - goal).norm() / goal.norm()) < 2e-3
    assert float((plain - goal).norm() / goal.norm()) > 5e-3
    assert (aligned.nfe, aligned.backward_passes) == (5, 0)


def test_the_fit_finds_known_weights_and_leaves_the_rest_alone():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 500, 1, 8, generator=generator, dtype=FLOAT)
    exact = fit([a, b], 1.5 * a - 0.25 * b, tail=0.1, ridge=0.0, significance=2.0)
    torch.testing.assert_close(exact, torch.tensor([[1.5], [-0.25]], dtype=FLOAT).expand(2, 8))
    # A feature that has nothing to do with the goal gains nothing beyond chance: three errors leave all bands alone.
    noisy = a + 0.1 * torch.randn(a.shape, generator=generator, dtype=FLOAT)
    apart = fit([a, b], noisy, tail=0.1, ridge=0.0, significance=3.0)
    torch.testing.assert_close(apart, torch.tensor([[1.0], [0.0]], dtype=FLOAT).expand(2, 8))
    pulled = fit([a, b], 1.5 * a, tail=0.1, ridge=1e6, significance=2.0)
    torch.testing.assert_close(pulled[0], torch.ones(8, dtype=FLOAT), atol=1e-5, rtol=0)


def test_the_fit_does_not_follow_a_few_busy_images():
    """990 images ask for weight 1.2, ten with thirty times the amplitude for 3: the many decide."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(1000, 1, 8, generator=generator, dtype=FLOAT)
    a[:10] *= 30.0
    goal = 1.2 * a
    goal[:10] = 3.0 * a[:10]
    found, unweighted = (fit([a], goal, tail=tail, ridge=0.0, significance=0.0)[0] for tail in (1e-4, 1e9))
    assert bool((found < 1.6).all())
    assert bool((unweighted > 2.4).all())


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_variety_is_kept_whatever_the_mean(mean: float):
    """The goal varies twice as much as the feature explains: the balance restores it, also under a mean of 30."""
    generator = torch.Generator().manual_seed(0)
    known, hidden = torch.randn(2, 4000, 1, 8, generator=generator, dtype=FLOAT)
    goal = mean + known + 3**0.5 * hidden
    s, t = Level(1.0, 1.0, 1.0), Level(0.0, 1.0, 1e-300)
    alignment = Alignment(BASIS, lambda level: goal, Groups.of([0] * 4000), tail=1e9, ridge=0.0, significance=0.0)
    features = [BASIS.forward(mean + 0.1 * known), BASIS.forward(known)]
    weights = alignment.fit(features, torch.zeros_like(goal), BASIS.forward(goal), s, t).weights
    made = sum(BASIS.spread(w) * f for w, f in zip(weights, features, strict=True))
    assert float(BASIS.inverse(made).std(0).mean()) == pytest.approx(2.0, rel=0.05)
    assert float(made.mean(0)[0, 0]) == pytest.approx(float(BASIS.forward(goal).mean(0)[0, 0]), abs=0.15)


def test_groups_are_the_conditions_that_several_samples_share():
    groups = Groups.of(["a", "b", "a", "c", "b"])
    x = torch.arange(5.0)[:, None]
    assert groups.means(x)[:, 0].tolist() == [2.0] * 5  # one label stands alone: all are compared with all
    pairs = Groups.of(["a", "b", "a", "b"])
    assert pairs.means(torch.tensor([[1.0], [2.0], [3.0], [6.0]]))[:, 0].tolist() == [2.0, 4.0, 2.0, 4.0]


def test_a_sample_near_zero_does_not_decide_the_balance():
    """Bands of one coefficient, all samples a tenth too faint; one is 0 but for rounding."""
    goal = torch.randn(64, 1, 8, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    goal[0] = 1e-9
    moved = 0.9 * goal
    moved[0] = 1e-3
    fit = Alignment(BASIS, lambda level: goal, Groups.of([None] * 64), significance=0.0)
    scale, _ = fit.balance(torch.zeros_like(goal), moved, goal)
    torch.testing.assert_close(scale, torch.full_like(scale, 1 / 0.9), rtol=1e-3, atol=0.0)


def test_the_scale_matches_the_typical_energy():
    """Without a part that stays, s = exp(E log(target/moved)/2); one huge sample moves it by its share of logs only."""
    generator = torch.Generator().manual_seed(0)
    moved, target = torch.rand(2, 300, 4, generator=generator, dtype=FLOAT) + 0.1
    zero = torch.zeros_like(moved)
    closed = (0.5 * (target / moved).log().mean(0)).exp()
    torch.testing.assert_close(typical_scale(zero, zero, moved, target, 100.0), closed)
    target[0] *= 1e6
    shift = math.exp(0.5 * math.log(1e6) / 300)
    torch.testing.assert_close(typical_scale(zero, zero, moved, target, 100.0), closed * shift)
    assert bool((typical_scale(zero, zero, moved, 1e9 * target, 4.0) < 4.0 + 1e-6).all())


def test_significance_counts_standard_errors():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 2, generator=generator, dtype=FLOAT) + torch.tensor([0.0, 0.5], dtype=FLOAT)
    assert significant(values, 3.0).tolist() == [False, True]
    assert significant(torch.ones(3, 1, dtype=FLOAT), 100.0).tolist() == [True]


@pytest.mark.parametrize("schedule", [EDM(0.02, 20.0), VP()], ids=["edm", "vp"])
def test_a_path_can_be_read_between_its_levels_at_fourth_order(schedule: Schedule):
    """On one Gaussian direction x(t) = x_0 √(v_t/v_0), v = α²c + σ²: knots and slopes exact, cubic between."""
    c = 0.3
    exact = Gaussian(torch.zeros(1, dtype=FLOAT), torch.full((1,), c, dtype=FLOAT))

    def state(level: Level) -> Tensor:
        return torch.full((1, 1), math.sqrt(level.alpha**2 * c + level.sigma**2), dtype=FLOAT)

    errors = []
    for steps in (8, 16):
        levels = GRIDS["logsnr"](schedule, steps)
        path = Trajectory(levels, tuple(map(state, levels)), tuple(exact(state(level), level) for level in levels[:-1]))
        assert all(torch.equal(path(level), state(level)) for level in levels)
        inside = [levels.between(i, 0.5) for i in range(steps - 1)]
        errors.append(max(abs(float(path(level) / state(level)) - 1.0) for level in inside))
        last = levels.between(steps - 1, 0.5)  # no slope at the end: a straight line
        assert float(path(last)) == pytest.approx(float(state(last)), rel=0.05)
    assert errors[1] < 1e-3
    assert math.log2(errors[0] / errors[1]) > 3.0


def test_a_path_does_not_reach_beyond_its_ends():
    short = fine(EDM(), range(4), 20, to_zero=False)
    with pytest.raises(ValueError, match="the fine trajectory goes from"):
        short.trajectory(EDM().level(90.0))
    with pytest.raises(ValueError, match="the fine trajectory goes from"):
        calibrate(
            model(EDM()), 4, "ddim", recipe=Recipe(grid=GRIDS["edm-to-zero"], search=None, rivals=()), reference=short
        )


def test_runs_end_where_the_reference_ended():
    down, short = fine(EDM(), range(4), 20), fine(EDM(), range(4), 20, to_zero=False)
    assert GaussianDensity()(down)(EDM(), 4)[-1].sigma == 0.0
    assert GaussianDensity()(short)(EDM(), 4)[-1].sigma == EDM().t_min
    assert (EDM().ends_above_pixel_noise, EDM(0.02, 80.0).ends_above_pixel_noise) == (False, True)


def test_aligned_states_follow_the_fine_trajectory():
    reference = REFERENCES["edm"]
    levels = GaussianDensity()(reference)(EDM(), 5)
    x = noise(reference.seeds, (1, 8), levels[0], FLOAT)
    out = sample(Spectral(), x, levels, DDIM(), EXACT(reference, 5), capture=True)
    for level, state in zip(levels, out.trajectory, strict=True):
        torch.testing.assert_close(state, reference.trajectory(level), rtol=1e-3, atol=1e-3 * float(state.std()))


def test_a_large_trajectory_is_kept_in_half_precision(monkeypatch):
    monkeypatch.setattr("steindiff.reference.LARGE", 100)
    small = Model(Gaussian(torch.zeros(1, 8), torch.ones(1, 8)), EDM(), (1, 8))
    halved = reference_run(small, range(4), steps=6)
    monkeypatch.undo()
    whole = reference_run(small, range(4), steps=6)
    assert halved.trajectory.states[1].dtype == torch.float16
    assert torch.equal(halved.samples, whole.samples)
    level = EDM().level(3.0)
    torch.testing.assert_close(halved.trajectory(level), whole.trajectory(level), rtol=5e-3, atol=5e-3)


def test_differences_are_of_the_newest_images():
    a, b, c = (torch.full((1, 2), value) for value in (5.0, 3.0, 2.0))
    assert [d[0, 0].item() for d in differences([a, b, c], 2)] == [2.0, 1.0]
    assert [d[0, 0].item() for d in differences([a, b, c], 1)] == [2.0]
    assert differences([a], 2) == differences([], 2) == []


def test_replay_uses_earlier_evaluations_also_under_a_solver_without_memory():
    """x_next = r x + b (ρ D + τ_1 (D − D') + τ_2 (D' − D'')), by hand; plain where the run is too young for its τ."""
    levels = GRIDS["edm-to-zero"](EDM(), 4)
    basis = Identity((2,))
    rho, tau = (1.1,), ((0.5,), (-0.25,))
    steps = tuple(StepWeights(rho, () if i == 0 else tau) for i in range(4))
    calibration = Calibration(solver=DDIM(), levels=levels, basis=basis, steps=steps)
    exact = Gaussian(torch.zeros(2, dtype=FLOAT), torch.ones(2, dtype=FLOAT))
    x = noise([3], (2,), levels[0], FLOAT)
    out = sample(exact, x, levels, DDIM(), WithHook(lambda *_: None, calibration.replay()), capture=True)
    known: list[Tensor] = []
    for i, (s, t) in enumerate(pairwise(levels)):
        known.insert(0, exact(x, s))
        r = t.sigma / s.sigma
        d = known[0]
        if i == 0:
            d = rho[0] * d
        elif i > 1:
            d = rho[0] * d + sum(w[0] * (a - b) for w, a, b in zip(tau, known, known[1:], strict=False))
        x = r * x + (t.alpha - r * s.alpha) * d
        torch.testing.assert_close(out.trajectory[i + 1], x)
    assert (out.nfe, out.network_calls) == (4, 4)


def test_replay_keeps_its_precision_where_the_host_lowers_that_of_its_network():
    levels = GRIDS["edm"](EDM(), 3)
    calibration = random_calibration(levels, DDIM(), (3, 8, 8))
    exact = Gaussian(torch.zeros(3, 8, 8), torch.ones(3, 8, 8))
    x = noise([3], (3, 8, 8), levels[0])
    plain = sample(exact, x, levels, DDIM(), calibration.replay()).x
    with torch.autocast("cpu", torch.bfloat16):
        lowered = sample(exact, x, levels, DDIM(), calibration.replay()).x
    assert torch.equal(plain, lowered)


@pytest.mark.parametrize("schedule", [EDM(), VP()], ids=["edm", "vp"])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
def test_replay_of_a_table_is_replay_of_its_candidate(solver: Solver, schedule: Schedule):
    """The loop replays the solver's row itself, a host's scheduler only its result: both are one formula."""
    levels = GRIDS["logsnr"](schedule, 5)
    replay = random_calibration(levels, solver, (3, 8, 8)).replay()
    exact = Gaussian(torch.full((3, 8, 8), 0.3, dtype=FLOAT), torch.linspace(0.1, 1, 192, dtype=FLOAT).view(3, 8, 8))
    x, history = noise(range(2), (3, 8, 8), levels[0], FLOAT), ()
    for i in range(levels.steps):
        step = Step(solver.tableau(levels, i), exact, history)
        made, evaluations, *_ = replay(step, x, levels, i)
        candidate, _ = step(x)
        torch.testing.assert_close(made, replay.apply(i, x, candidate, levels, latest(evaluations, history)))
        assert not torch.allclose(made, candidate)
        x, history = made, (*reversed(evaluations), *history)[: max(solver.memory, replay.memory)]


@pytest.mark.parametrize("name", ["below", "bound", "significance", "terms", "tail", "ridge"])
@pytest.mark.parametrize("value", [-1, math.nan])
def test_bad_settings_are_named(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ByAlignment(**{name: value})


@pytest.mark.parametrize("name", ["bound", "tail", "ridge"])
def test_settings_that_would_undo_the_fit_are_named(name: str):
    with pytest.raises(ValueError, match=f"{name} must be"):
        ByAlignment(**{name: math.inf})
