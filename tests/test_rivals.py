"""Other people's methods, each against a closed form or an identity its authors state."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from problems import FLOAT, Nonlinear, gaussian, mixture
from rivals.analytical_first_step import AnalyticalFirstStep
from rivals.ays import AYS, SDXL, STABLE_DIFFUSION, STABLE_VIDEO_DIFFUSION
from rivals.dpm_v3 import DPMSolverV3, ModelStatistics, gain_diagonal, measure
from rivals.epsilon_scaling import EpsilonScaling
from rivals.gits import GITS, jump_costs
from rivals.iia import IIA, least_squares
from rivals.learned import LearnedSolver, Training, history_weights
from rivals.restart import Restart, renoise
from steindiff import SOLVERS, noise, sample
from steindiff.denoisers import Epsilon, Gaussian
from steindiff.grids import Karras, LogSNR
from steindiff.levels import Level, Levels
from steindiff.reference import Trajectory
from steindiff.sampler import levels_for
from steindiff.schedules import EDM, VP, Discrete
from steindiff.solvers import DDIM, UniPCBh1
from stepping import step_at

SCHEDULES = pytest.mark.parametrize("schedule", [EDM(0.02, 20.0), VP(t_min=0.01)], ids=["edm", "vp"])


def exact_path(denoiser: Gaussian, levels: Levels, count: int = 64) -> Trajectory:
    """A fine trajectory without any error."""
    x = noise(range(count), denoiser.mean.shape, Level(0.0, 1.0, 1.0), FLOAT)
    s = levels[0]
    x = s.alpha * denoiser.mean + (s.alpha**2 * denoiser.variance + s.sigma**2).sqrt() * x
    states = tuple(denoiser.flow(x, s, t) for t in levels)
    return Trajectory(levels, states, tuple(denoiser(z, t) for z, t in zip(states, levels[:-1], strict=False)))


# GITS


@SCHEDULES
def test_gits_costs_of_gaussian_data_are_the_closed_form(schedule):
    c = 0.4
    denoiser = Gaussian(torch.zeros(5, dtype=FLOAT), torch.full((5,), c, dtype=FLOAT))
    levels = LogSNR(to_zero=False)(schedule, 8)
    path = exact_path(denoiser, levels)
    for i, row in enumerate(jump_costs(path)):
        s, norm = levels[i], path.states[i].norm(dim=1).mean()
        for t, cost in zip(levels[i + 1 :], row, strict=True):
            r = t.sigma / s.sigma
            spread_s, spread_t = (a.alpha**2 * c + a.sigma**2 for a in (s, t))
            step = r + (t.alpha - r * s.alpha) * s.alpha * c / spread_s
            assert cost == pytest.approx(float(norm * abs(step - math.sqrt(spread_t / spread_s))), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("coefficient", [1.0, 1.15, 2.0])
@pytest.mark.parametrize("to_zero", [False, True])
def test_gits_finds_the_best_of_all_paths(coefficient, to_zero):
    generator, size = torch.Generator().manual_seed(3), 8
    cost = tuple(tuple(torch.rand(n, generator=generator).tolist()) for n in range(size - 1, 0, -1))
    points = tuple(Karras(to_zero=False)(EDM(), size - 1 - to_zero)[k].t for k in range(size - to_zero))
    grid = GITS(points, cost, coefficient, to_zero)

    def price(path):
        return sum(coefficient**k * cost[a][b - a - 1] for k, (a, b) in enumerate(itertools.pairwise(path)))

    for steps in range(1, size):
        paths = [(0, *inner, size - 1) for inner in itertools.combinations(range(1, size - 1), steps - 1)]
        assert price(grid.path(steps)) == pytest.approx(min(map(price, paths)), rel=1e-12)
        levels = grid(EDM(), steps)
        assert levels.steps == steps
        assert levels[0].t == points[0]
        assert (levels[-1].sigma == 0.0) is to_zero


def test_gits_serves_every_budget_from_one_trajectory_and_helps_on_a_mixture():
    problem, schedule = mixture(), EDM(0.02, 20.0)
    fine = LogSNR(to_zero=False)(schedule, 60)
    x = noise(range(64), (1,), fine[0], FLOAT)
    kept, denoised = [x], []

    def watch(info):
        kept.append(info.x)
        denoised.append(info.denoised)

    sample(problem.denoiser, x, fine, SOLVERS["dpmpp-3m"], callback=watch)
    grid = GITS.of(Trajectory(fine, tuple(kept), tuple(denoised)))
    y = noise(range(100, 164), (1,), fine[0], FLOAT)
    exact = problem.flow(y, fine[0], fine[-1])
    for nfe in (4, 6, 8):
        errors = [
            (sample(problem.denoiser, y, levels_for(DDIM(), g, schedule, nfe), DDIM()).x - exact).abs().mean()
            for g in (grid, LogSNR(to_zero=False))
        ]
        assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GITS((1.0,), ()), "cost must hold"),
        (lambda: GITS((2.0, 1.0), ((float("nan"),),)), "finite"),
        (lambda: GITS((2.0, 1.0), ((1.0,),), 0.0), "coefficient must be"),
        (lambda: GITS((2.0, 1.0), ((1.0,),))(EDM(), 2), "steps must be 1 to 1"),
    ],
)
def test_gits_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# AYS


def test_ays_tables_at_ten_steps_and_between():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=FLOAT).square()
    schedule = Discrete.from_betas(betas.tolist())  # Stable Diffusion's
    assert schedule.ratio_max == pytest.approx(14.615, rel=1e-4)
    assert schedule.ratio_min == pytest.approx(0.029, rel=0.01)
    for table in (STABLE_DIFFUSION, SDXL):
        levels = table(schedule, 10)
        assert [level.ratio for level in levels[1:-1]] == pytest.approx(list(table.sigmas[1:-1]), rel=1e-9)
        assert levels[0].t == schedule.t_max
        assert levels[-1].t == schedule.t_min
    halves = SDXL(EDM(0.029, 14.615), 5)
    assert [level.sigma for level in halves] == pytest.approx(list(SDXL.sigmas[::2]), rel=1e-9)
    video = STABLE_VIDEO_DIFFUSION(EDM(0.002, 700.0), 20)
    assert video[3].sigma == pytest.approx(math.sqrt(54.5 * 15.886), rel=1e-9)


def test_ays_refuses_another_model():
    with pytest.raises(ValueError, match="use the table of your model"):
        STABLE_VIDEO_DIFFUSION(EDM(0.029, 14.615), 10)
    assert AYS((4.0, 1.0), to_zero=True)(EDM(1.0, 4.0), 1).steps == 1


# Epsilon scaling


@SCHEDULES
def test_epsilon_scaling_divides_the_noise(schedule):
    levels = LogSNR(to_zero=False)(schedule, 5)
    network = Epsilon(Nonlinear())
    scaled = EpsilonScaling(network, levels, base=1.01, slope=0.002)
    x = noise(range(3), (6,), levels[0], FLOAT)
    for i, level in enumerate(levels[:-1]):
        before = (x - level.alpha * network(x, level)) / level.sigma
        after = (x - level.alpha * scaled(x, level)) / level.sigma
        torch.testing.assert_close(after, before / (1.01 + 0.002 * (5 - i)))


def test_epsilon_scaling_by_one_changes_nothing_and_inner_stages_belong_to_their_step():
    levels = Karras(to_zero=False)(EDM(), 4)
    denoiser = gaussian().denoiser
    x = noise(range(3), (3,), levels[0], FLOAT)
    plain, scaled = (sample(d, x, levels, DDIM()).x for d in (denoiser, EpsilonScaling(denoiser, levels, 1.0)))
    assert torch.equal(plain, scaled)
    steep = EpsilonScaling(denoiser, levels, 1.0, 0.1)
    assert steep.divisor(levels.between(1, 0.5)) == steep.divisor(levels[1]) == pytest.approx(1.3)
    with pytest.raises(ValueError, match="must be finite and > 0"):
        EpsilonScaling(denoiser, levels, 1.0, -0.5)


# Analytical first step


@pytest.mark.parametrize("solver", [SOLVERS["ddim"], SOLVERS["dpmpp-3m"], SOLVERS["ipndm-4"]], ids=str)
@SCHEDULES
def test_analytical_first_step_is_exact_on_centred_gaussians_and_saves_one_call(solver, schedule):
    denoiser = Gaussian(torch.zeros(4, dtype=FLOAT), torch.full((4,), 0.3, dtype=FLOAT))
    levels = LogSNR(to_zero=False)(schedule, 5)
    x = noise(range(3), (4,), levels[0], FLOAT)
    plain = sample(denoiser, x, levels, solver)
    saved = sample(AnalyticalFirstStep(denoiser, levels[0], variance=0.3), x, levels, solver)
    torch.testing.assert_close(saved.x, plain.x)
    assert (plain.nfe, plain.network_calls) == (5, 5)
    assert (saved.nfe, saved.network_calls) == (5, 4)


def test_analytical_first_step_defaults_to_pure_noise():
    level = EDM().level(80.0)
    x = noise(range(2), (4,), level)
    afs = AnalyticalFirstStep(Gaussian(torch.zeros(4), torch.ones(4)), level)
    assert torch.equal((x - afs(x, level)) / level.sigma, x / level.sigma)
    assert afs.calls == 0
    afs(x, EDM().level(79.0))
    assert afs.calls == 1
    with pytest.raises(ValueError, match="variance must be"):
        AnalyticalFirstStep(afs, level, -1.0)


# IIA


def test_iia_is_least_squares_with_scalars():
    """The fit with one band is the least-squares solution of torch, and its goal is fine steps from the same state."""
    problem = mixture()
    levels = LogSNR(to_zero=False)(EDM(0.05, 10.0), 5)
    x = noise(range(200), (1,), levels[0], FLOAT)
    solver = SOLVERS["dpmpp-2m"]
    step, state = step_at(solver, problem.denoiser, levels, 3, x)
    goal = problem.flow(state, levels[3], levels[4])
    found = least_squares((1,), goal, terms=1)(step, state, levels, 3)
    candidate, evaluations = step(state)
    r = levels[4].sigma / levels[3].sigma
    b = levels[4].alpha - r * levels[3].alpha
    features = torch.stack(
        [((candidate - r * state) / b).flatten(), (evaluations[0].d - step.history[0].d).flatten()], dim=1
    )
    expected = torch.linalg.lstsq(features, ((goal - r * state) / b).flatten()[:, None]).solution.flatten()
    weights = torch.cat([found.statistics["rho"], *found.statistics["tau"]])
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)
    near = IIA(substeps=64, terms=1)(step, state, levels, 3)
    torch.testing.assert_close(near.x, found.x, rtol=1e-3, atol=1e-3)
    assert len(near.evaluations) == 1  # fine steps are preparation, not part of the run


# DPM-Solver-v3


@SCHEDULES
@pytest.mark.parametrize("order", [1, 3])
def test_dpm_v3_with_l_1_is_the_exact_expansion_of_the_denoised_image(schedule, order):
    """(l, s, b) = (1, 0, 0): DDIM at order 1, UniP-3, which integrates the same polynomial, at order 3."""
    levels = LogSNR(to_zero=False)(schedule, 6)
    v3 = DPMSolverV3(ModelStatistics.constant(1.0, 0.0, 0.0), levels, order=order, corrector=False)
    used = [levels[3 - k] for k in range(order)]
    expected = UniPCBh1(3, corrector=False).weights(used, levels[4], corrected=False)
    got = v3.weights(3, corrected=False, order=order)
    assert float(got.state) == pytest.approx(levels[4].sigma / levels[3].sigma, rel=1e-6)
    assert float(got.constant) == 0.0
    # f = −D
    assert [-float(w) for w in got.past] == pytest.approx(expected, rel=1e-5)


def test_dpm_v3_with_s_minus_1_is_the_expansion_of_the_noise():
    """(l, s, b) = (0, −1, 0): x_t = (α_t/α_s) x − σ_t (e^h − 1) ε − σ_t h φ₂(h) h ε', DPM-Solver's own form."""
    levels = LogSNR(to_zero=False)(VP(t_min=0.01), 6)
    s, t, past = levels[3], levels[4], levels[2]
    got = DPMSolverV3(ModelStatistics.constant(0.0, -1.0, 0.0), levels, corrector=False).weights(
        3, corrected=False, order=2
    )
    h, back = t.lam - s.lam, past.lam - s.lam
    second = (math.expm1(h) - h) / h**2
    assert float(got.state) == pytest.approx(t.alpha / s.alpha, rel=1e-6)
    # f = (σ/α) ε: turn weights of f into weights of ε.
    slope = -t.sigma * h * h * second / back
    expected = (-t.sigma * math.expm1(h) - slope, slope)
    assert [float(w) * z.ratio for w, z in zip(got.past, (s, past), strict=True)] == pytest.approx(expected, rel=1e-5)


@SCHEDULES
def test_dpm_v3_first_order_step_is_exact_on_gaussian_data(schedule):
    problem = gaussian()
    fine = LogSNR(to_zero=False)(schedule, 400)
    path = exact_path(problem.denoiser, fine, 16)
    statistics = measure(lambda part: problem.denoiser, path, batch=16)
    for lam, found in zip(statistics.lams.tolist(), statistics.l, strict=True):
        level = schedule.at(lam)
        torch.testing.assert_close(found, 1.0 - level.alpha * problem.denoiser.gain(level), rtol=1e-8, atol=1e-8)
    levels = LogSNR(to_zero=False)(schedule, 3)
    x = path.states[0]
    exact = problem.denoiser.flow(x, levels[0], levels[-1])
    for order, corrector in ((1, False), (3, True)):
        v3 = DPMSolverV3(statistics, levels, order=order, corrector=corrector)
        calls = problem.denoiser.calls
        error = (v3(problem.denoiser, x) - exact).abs().max()
        assert problem.denoiser.calls - calls == 3
        ddim = (sample(problem.denoiser, x, levels, DDIM()).x - exact).abs().max()
        assert error < 0.01 * ddim


@pytest.mark.parametrize("pseudo", [False, True])
def test_dpm_v3_converges_on_a_mixture(pseudo):
    problem, schedule = mixture(), EDM(0.1, 10.0)
    fine = LogSNR(to_zero=False)(schedule, 200)
    x = noise(range(256), (1,), fine[0], FLOAT)
    states = tuple(problem.flow(x, fine[0], level) for level in fine)
    path = Trajectory(fine, states, tuple(problem.denoiser(z, t) for z, t in zip(states, fine[:-1], strict=False)))
    statistics = measure(lambda part: problem.denoiser, path, batch=64)
    errors = []
    for steps in (20, 40):
        levels = LogSNR(to_zero=False)(schedule, steps)
        v3 = DPMSolverV3(statistics, levels, order=2, corrector=False, pseudo=pseudo)
        errors.append(float((v3(problem.denoiser, x) - states[-1]).abs().mean()))
    assert errors[1] < 0.4 * errors[0]
    with pytest.raises(ValueError, match="finite log-SNR"):
        DPMSolverV3(statistics, LogSNR()(schedule, 3))


def test_gain_diagonal_of_a_diagonal_jacobian_is_exact():
    denoiser = gaussian().denoiser
    level = VP().level(0.5)
    x = noise(range(4), (3,), level, FLOAT)
    torch.testing.assert_close(gain_diagonal(denoiser, x, level, probes=1, seed=0), denoiser.gain(level))


# Learned weights


@pytest.mark.parametrize("name", ["ddim", "dpmpp-2m", "dpmpp-3m", "ipndm-4", "unip-bh1-3"])
@SCHEDULES
def test_learned_solver_begins_as_its_host(name, schedule):
    solver = SOLVERS[name]
    levels = LogSNR(to_zero=False)(schedule, 5)
    denoiser = mixture().denoiser
    unit = noise(range(8), (1,), Level(0.0, 1.0, 1.0), FLOAT)
    learned = LearnedSolver(solver, levels)
    x = sample(denoiser, unit * levels[0].sigma, levels, solver).x
    with torch.no_grad():
        y = learned(denoiser, learned.begin(unit))
    torch.testing.assert_close(y * levels[-1].alpha, x, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(history_weights(solver, levels).sum(1), torch.ones(5, dtype=FLOAT))
    with pytest.raises(ValueError, match="once a step"):
        history_weights(SOLVERS["heun"], levels)


def test_learned_gradients_by_levels_are_those_of_differences():
    schedule, problem = EDM(0.05, 10.0), mixture()
    learned = LearnedSolver(SOLVERS["dpmpp-2m"], LogSNR(to_zero=False)(schedule, 4))
    unit = noise(range(16), (1,), Level(0.0, 1.0, 1.0), FLOAT)
    learned(problem.denoiser, learned.begin(unit), slope=True).square().mean().backward()

    def value():
        with torch.no_grad():
            return float(learned(problem.denoiser, learned.begin(unit)).square().mean())

    for parameter in (learned.gaps, learned.start, learned.weight):
        flat, gradient = parameter.data.view(-1), parameter.grad.flatten()
        for k in (0, len(flat) - 1):
            flat[k] += 1e-4
            up = value()
            flat[k] -= 2e-4
            down = value()
            flat[k] += 1e-4
            assert float(gradient[k]) == pytest.approx((up - down) / 2e-4, rel=2e-2, abs=1e-6)


def test_training_comes_nearer_on_seeds_it_did_not_see():
    schedule, problem = EDM(0.05, 10.0), mixture()
    levels = LogSNR(to_zero=False)(schedule, 4)
    learned = LearnedSolver(SOLVERS["dpmpp-2m"], levels)
    unit = noise(range(256), (1,), Level(0.0, 1.0, 1.0), FLOAT)
    goal = problem.flow(unit * levels[0].sigma, levels[0], levels[-1])

    def error():
        with torch.no_grad():
            return float((learned(problem.denoiser, learned.begin(unit[128:])) - goal[128:]).square().mean())

    before = error()
    losses = Training(iterations=80, batch=64)(learned, lambda rows: problem.denoiser, unit[:128], goal[:128])
    assert len(losses) == 80
    assert error() < 0.5 * before
    assert learned.levels().steps == 4


# Restart


def test_restart_without_repetitions_is_the_plain_run_and_counts_what_it_spends():
    denoiser, levels = gaussian().denoiser, Karras(to_zero=True)(EDM(), 9)
    plain = sample(denoiser, noise(range(4), (3,), levels[0]), levels, SOLVERS["heun"])
    restart = Restart(levels, repetitions=0)
    assert torch.equal(restart(denoiser, range(4), (3,), "cpu"), plain.x)
    assert restart.nfe() == plain.nfe
    twice = Restart(levels, steps=3, repetitions=2)
    calls = denoiser.calls
    twice(denoiser, range(4), (3,), "cpu")
    assert denoiser.calls - calls == twice.nfe() == plain.nfe + 2 * 6


@SCHEDULES
def test_restart_keeps_the_marginal(schedule):
    """Forward noise and the exact flow both keep α² c + σ²."""
    c = torch.tensor([0.3], dtype=FLOAT)
    s, t = schedule.at(2.0), schedule.at(0.5)
    unit = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    x = (s.alpha**2 * c + s.sigma**2).sqrt() * torch.randn(
        20_000, 1, generator=torch.Generator().manual_seed(1), dtype=FLOAT
    )
    up = renoise(x, s, t, unit)
    assert float(up.var()) == pytest.approx(float(t.alpha**2 * c + t.sigma**2), rel=0.03)
    down = Gaussian(torch.zeros(1, dtype=FLOAT), c).flow(up, t, s)
    assert float(down.var()) == pytest.approx(float(x.var()), rel=0.03)


def test_restart_refuses_an_interval_below_the_run():
    with pytest.raises(ValueError, match="high must exceed"):
        Restart(Karras(to_zero=True)(EDM(), 4), low=0.06, high=0.05).parts()
