"""The paper's relaxation: the identity it rests on, its theorems in numbers, its failure, its options."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from networks.mixture import Empirical, Mixture
from paper_only.activation import Expansion, OnlySteps, TopK
from paper_only.coefficients import couple, coupled_gammas, decay, gammas, ideal_gammas, ideal_step
from paper_only.probes import Exact
from problems import FLOAT, PROBLEMS, Nonlinear
from steindiff import GRIDS, SCHEDULES, SOLVERS, load, noise, sample
from steindiff.averages import mean
from steindiff.comparison import default_methods
from steindiff.corrections import (
    Clamped,
    EveryStep,
    FirstSteps,
    Plain,
    Relaxation,
    Unclamped,
)
from steindiff.denoisers import X0, Denoiser, Gaussian
from steindiff.grids import LogSNR, UniformTime
from steindiff.levels import Level, Levels
from steindiff.probes import VJP, Adaptive, Analytic, FiniteDifference, pushforward
from steindiff.probes.base import dot
from steindiff.sampler import levels_for
from steindiff.schedules import EDM, VP, Schedule
from steindiff.solvers import DDIM, DPMSolverMultistep, Solver
from steindiff.tableau import Evaluation, Step
from stepping import PAPER_SOLVERS, digits, digits_denoiser

solvers = pytest.mark.parametrize("solver", PAPER_SOLVERS.values(), ids=PAPER_SOLVERS.keys())


def gaussian_data() -> Gaussian:
    mean = torch.linspace(-0.5, 0.8, 8, dtype=FLOAT)
    return Gaussian(mean, torch.logspace(-3, 0.5, 8, dtype=FLOAT))


def mixture_data() -> Mixture:
    means = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    return Mixture(means, torch.linspace(0.01, 0.3, 5, dtype=FLOAT), torch.arange(1.0, 6.0, dtype=FLOAT))


def problem(name: str, batch: int) -> tuple[Denoiser, torch.Tensor]:
    """A denoiser and clean data of its own distribution."""
    generator = torch.Generator().manual_seed(7)
    if name == "digits":
        return digits_denoiser(), digits()[torch.randperm(len(digits()), generator=generator)[:batch]]
    denoiser = gaussian_data() if name == "gaussian" else mixture_data()
    return denoiser, denoiser.sample(batch, generator)


def still(x: torch.Tensor, s: Level, t: Level) -> torch.Tensor:
    """A flow for tests that do not look at the oracle."""
    return x


@solvers
@pytest.mark.parametrize("schedule", [EDM(0.02, 20.0), VP(t_max=0.7)], ids=["ve", "vp"])
@pytest.mark.parametrize(("data", "batch"), [("gaussian", 2000), ("mixture", 2000), ("digits", 300)])
def test_stein_gamma_equals_direct_gamma_within_monte_carlo_error(
    data: str, batch: int, schedule: Schedule, solver: Solver
):
    """Theorem 4.7, at every step of a run, states and history from the forward coupling."""
    denoiser, clean = problem(data, batch)
    levels = LogSNR(to_zero=False)(schedule, 5)
    rows = ideal_gammas(denoiser, clean, levels, solver, torch.Generator().manual_seed(3), probe=VJP(2), flow=still)
    assert len(rows) == 5
    for row in rows:
        assert abs(row.difference) < 4.0 * row.difference_error, row
    # The comparison has teeth: on most steps the error is a small share of gamma.
    assert sorted(row.difference_error / abs(row.direct) for row in rows)[2] < 0.12


@pytest.mark.parametrize("name", ["dpmpp-2m", "dpmpp-3m"])
def test_stein_gamma_is_biased_where_the_history_shares_the_noise_and_the_bias_is_the_missing_derivative(name: str):
    """In a run the past states carry the same noise; then the divergence must also go through the history."""
    solver, denoiser = SOLVERS[name], mixture_data()
    levels = LogSNR(to_zero=False)(EDM(0.1, 5.0), 5)
    i, generator = 2, torch.Generator().manual_seed(0)
    clean = denoiser.sample(20000, generator)
    x = couple(clean, levels[i], generator)
    past = [levels[i - 1 - k] for k in range(solver.memory)]

    def history(z: torch.Tensor) -> tuple[Evaluation, ...]:
        states = [clean + level.sigma / levels[i].sigma * (z - clean) for level in past]
        return tuple(Evaluation(y, denoiser(y, level), level) for y, level in zip(states, past, strict=True))

    step = Step(solver.tableau(levels, i), denoiser, history(x))
    row = gammas(step, x, clean, levels, i, still, generator, VJP(2))
    assert abs(row.difference) > 20.0 * row.difference_error  # frozen history: wrong, and not by chance

    def residual(z: torch.Tensor) -> torch.Tensor:
        return z - Step(step.tableau, denoiser, history(z))(z).candidate

    v = torch.randint(0, 2, x.shape, generator=generator).to(FLOAT) * 2 - 1
    gap = levels[i].sigma ** 2 * dot(v, pushforward(residual, x, v)) - dot(residual(x), x - clean)
    assert abs(float(gap.mean())) < 4.0 * float(gap.std() / len(gap) ** 0.5)  # with it: right


def test_on_a_samplers_own_states_stein_gamma_leaves_that_of_ideal_states():
    """γ̃ against γ*, both reference-free: equal at the first step, which starts at the coupling, and not later."""
    denoiser, clean = problem("digits", 500)
    levels = GRIDS["logsnr-to-zero"](EDM(), 6)
    run = (denoiser, clean, levels, SOLVERS["dpmpp-2m"])
    sampled = coupled_gammas(*run, torch.Generator().manual_seed(0), probe=VJP(2))
    ideal = ideal_gammas(*run, torch.Generator().manual_seed(0), probe=VJP(2), flow=still)
    assert [row.sigma for row in sampled] == [row.sigma for row in ideal]
    apart = [
        abs(a.gamma - b.stein) / (a.error**2 + b.stein_error**2) ** 0.5 for a, b in zip(sampled, ideal, strict=True)
    ]
    assert apart[0] < 4.0
    assert apart[4] > 10.0
    assert sampled[4].gamma < 0.2 < 1.0 < ideal[4].stein


def test_direct_gamma_on_sampled_states_is_no_truth():
    """The exact flow does not return to the image it started from, so E⟨u, x − x*⟩ there measures something else."""
    denoiser = mixture_data()
    start, s, t = EDM().level(20.0), EDM().level(1.0), EDM().level(0.3)
    generator = torch.Generator().manual_seed(0)
    clean = denoiser.sample(4000, generator)
    fine = Levels(tuple(EDM().level(20.0 * (1.0 / 20.0) ** (k / 40)) for k in range(41)), EDM())
    levels = Levels((s, t), EDM())
    step = Step(DDIM().tableau(levels, 0), denoiser)
    x = sample(denoiser, couple(clean, start, generator), fine, SOLVERS["heun"]).x
    row = gammas(step, x, clean, levels, 0, still, generator, VJP(2))
    ideal = 1.0 / (1.0 - 0.3)
    assert abs(row.stein - ideal) < 0.02 * ideal  # Stein is right: the fine flow keeps the marginal
    assert row.direct > 1.2 * ideal  # the old image is not the one these states are noisy versions of


@pytest.mark.parametrize(("s", "t"), [(0.9, 0.5), (0.7, 0.3)])
def test_one_over_one_minus_r_needs_alpha_one(s: float, t: float):
    """On a VP schedule the optimum of DDIM is another one, and the reference-free form follows it."""
    denoiser, clean = problem("mixture", 40000)
    levels = Levels.from_times(VP(), [s, t])
    generator = torch.Generator().manual_seed(0)
    x = couple(clean, levels[0], generator)
    row = gammas(Step(DDIM().tableau(levels, 0), denoiser), x, clean, levels, 0, still, generator, VJP(2))
    wrong = 1.0 / (1.0 - levels[1].sigma / levels[0].sigma)
    assert abs(row.difference) < 4.0 * row.difference_error
    assert row.direct < 0.7 * wrong


@pytest.mark.parametrize("data", ["gaussian", "mixture", "digits"])
@pytest.mark.parametrize("r", [0.9, 0.5, 0.1])
def test_ddim_with_an_exact_denoiser_has_gamma_one_over_one_minus_r(data: str, r: float):
    """So the optimally relaxed DDIM step is the posterior mean, whatever level it was meant for."""
    denoiser, clean = problem(data, 1000)
    levels = Levels.from_times(EDM(), [1.0, r])
    generator = torch.Generator().manual_seed(0)
    x = couple(clean, levels[0], generator)
    step = Step(DDIM().tableau(levels, 0), denoiser)
    row = gammas(step, x, clean, levels, 0, still, generator, VJP(2))
    for value, error in ((row.direct, row.direct_error), (row.stein, row.stein_error)):
        assert abs(value - 1.0 / (1.0 - r)) < 4.0 * error
    with pytest.warns(UserWarning, match="posterior mean"):
        literal = Relaxation(bounds=Unclamped())
    relaxed = literal(step, x, levels, 0).x
    distance = float((relaxed - denoiser(x, levels[0])).square().mean() / (x - denoiser(x, levels[0])).square().mean())
    assert distance < 0.01


def mean_square(x: torch.Tensor, clean: torch.Tensor) -> float:
    return float(mean(dot(x - clean, x - clean)))


@solvers
@pytest.mark.parametrize("schedule", [EDM(0.02, 20.0), VP(t_max=0.7)], ids=["ve", "vp"])
def test_theorem_4_4_the_reference_free_step_beats_the_plain_one_by_the_gap(schedule: Schedule, solver: Solver):
    """Gamma from one half of the data without looking at x*, errors measured on the other half."""
    denoiser, clean = problem("mixture", 8000)
    levels = LogSNR(to_zero=False)(schedule, 5)
    generator = torch.Generator().manual_seed(5)
    for i in (0, 2, 4):
        halves = []
        for half in clean.chunk(2):
            step = ideal_step(denoiser, half, levels, i, solver, generator)
            x = couple(half, levels[i], generator)
            halves.append((half, x, step(x).candidate, gammas(step, x, half, levels, i, still, generator, VJP(2))))
        gamma, (half, x, candidate, row) = halves[0][3].stein, halves[1]
        plain, relaxed = mean_square(candidate, half), mean_square(torch.lerp(x, candidate, gamma), half)
        # Gained as promised, less what the error of the estimate costs.
        slack = 9.0 * row.gap / (row.direct - 1.0) ** 2 * (halves[0][3].stein_error + row.direct_error) ** 2
        assert plain - relaxed == pytest.approx(row.gap, rel=1e-6, abs=slack)
        others = [mean_square(torch.lerp(x, candidate, gamma + shift), half) for shift in (-1.0, -0.3, 0.3, 1.0)]
        assert relaxed < min(others) + slack


def test_theorem_4_8_the_error_decays_by_the_product_along_the_run():
    """E at the end, measured on the final states, against the product of what each step said it would take away."""
    for data in ("gaussian", "mixture", "digits"):
        denoiser, clean = problem(data, 400)
        for solver in PAPER_SOLVERS.values():
            found = decay(
                denoiser, clean, GRIDS["edm-to-zero"](EDM(0.02, 20.0), 5), solver, torch.Generator().manual_seed(1)
            )
            assert all(0.0 <= rho <= 1.0 + 1e-12 for rho in found.rho)
            assert found.error[-1] == pytest.approx(found.product, rel=1e-6)
            assert found.error[-1] <= found.bound * (1.0 + 1e-9)
            assert all(
                later <= before * (1.0 + 1e-12) for before, later in zip(found.error, found.error[1:], strict=False)
            )


def test_theorem_4_8_fails_for_the_estimator_beyond_the_first_step():
    """The product needs b/c with x* known: the reference-free coefficient does not follow it along a run."""
    denoiser, clean = problem("digits", 400)
    levels = GRIDS["edm-to-zero"](EDM(0.02, 20.0), 5)
    generator = torch.Generator().manual_seed(1)
    exact = decay(denoiser, clean, levels, DDIM(), generator)
    with pytest.warns(UserWarning, match="Unclamped"):
        literal = Relaxation(bounds=Unclamped())
    first = decay(denoiser, clean, Levels(levels[:2], levels.schedule), DDIM(), generator, literal)
    assert first.error[-1] == pytest.approx(exact.error[1], rel=0.02)
    with pytest.raises(RuntimeError, match=r"step 2 of 5, .*diverged"):
        decay(denoiser, clean, levels, DDIM(), generator, literal)


@solvers
def test_corollary_4_9_the_relaxed_step_stays_within_the_plain_steps_error(solver: Solver):
    denoiser, clean = problem("digits", 400)
    for schedule in (EDM(0.02, 20.0), VP(t_max=0.7)):
        found = decay(denoiser, clean, LogSNR(to_zero=True)(schedule, 6), solver, torch.Generator().manual_seed(2))
        for deviation, plain in zip(found.deviation, found.plain, strict=True):
            assert deviation <= plain * (1.0 + 1e-9)


def test_corollary_4_9_promises_nothing_at_a_noisy_target_level():
    """Finer steps do not bring the relaxed step to the solver's: the candidate is noisy, so its error to x* stays."""
    denoiser, clean = problem("mixture", 4000)
    generator = torch.Generator().manual_seed(0)
    x = couple(clean, Level(1.0, 1.0, 1.0), generator)
    coefficients, ratios = [], []
    for fine in (4, 16, 64):
        levels = Levels.from_times(EDM(), [1.0, 1.0 - 1.0 / fine])
        step = Step(DDIM().tableau(levels, 0), denoiser)
        row = gammas(step, x, clean, levels, 0, still, generator, VJP(1))
        candidate = step(x).candidate
        u = x - candidate
        coefficients.append(row.direct)
        ratios.append(float(mean(dot(u, u))) * (1.0 - row.direct) ** 2 / float(mean(dot(u, u))))
    assert coefficients == pytest.approx([4.0, 16.0, 64.0], rel=0.05)  # → ∞, not → 1
    assert ratios == sorted(ratios)  # in units of the step, the relaxed one moves ever further from the plain one


@solvers
def test_theorem_4_11_errors_of_a_perturbed_coefficient_and_the_gap_condition(solver: Solver):
    """Measured errors of perturbed steps lie on the parabola, and the condition says exactly who beats the plain."""
    denoiser, clean = problem("digits", 400)
    levels = LogSNR(to_zero=False)(EDM(0.1, 10.0), 4)
    generator = torch.Generator().manual_seed(4)
    for i in (1, 3):
        step = ideal_step(denoiser, clean, levels, i, solver, generator)
        x = couple(clean, levels[i], generator)
        candidate = step(x).candidate
        row = gammas(step, x, clean, levels, i, still, generator, VJP(1))
        best, plain = (mean_square(torch.lerp(x, candidate, g), clean) for g in (row.direct, 1.0))
        c = float(mean(dot(x - candidate, x - candidate)))
        radius = abs(row.direct - 1.0)
        for share in (-1.5, -1.01, -0.99, -0.5, 0.3, 0.99, 1.01, 2.0):
            gamma = row.direct + share * radius
            measured = mean_square(torch.lerp(x, candidate, gamma), clean)
            assert measured - best == pytest.approx(c * (gamma - row.direct) ** 2, rel=1e-6, abs=1e-9 * plain)
            assert (measured <= plain) == (abs(share) < 1.0)
        assert row.improves(row.stein) == (mean_square(torch.lerp(x, candidate, row.stein), clean) <= plain)


def test_theorem_4_10_gamma_moves_in_proportion_to_a_small_score_deviation():
    """Gaussian data, states from a shifted law whose score deviation is known in closed form."""
    denoiser = gaussian_data()
    level = Level(1.0, 1.0, 1.0)
    levels = Levels((level, EDM().level(0.4)), EDM())
    step = Step(DDIM().tableau(levels, 0), denoiser)
    marginal = denoiser.variance + 1.0

    def gamma(stretch: float) -> float:
        """The coefficient under N(mean, stretch² marginal), exactly: u is linear."""
        weight = step.tableau.output.x + step.tableau.output.d[0] * denoiser.gain(level)
        variance = marginal * stretch**2
        return float((1.0 - weight).sum() / (((1.0 - weight) ** 2) * variance).sum())

    def deviation(stretch: float) -> float:
        """S: the scores differ by (1/stretch² − 1)/marginal · (x − mean), averaged over the stretched law."""
        return float((((1.0 / stretch**2 - 1.0) ** 2 / marginal * stretch**2).sum()).sqrt())

    x = denoiser.mean + marginal.sqrt() * torch.randn(40000, 8, generator=torch.Generator().manual_seed(0), dtype=FLOAT)
    measured = Relaxation(Exact(), bounds=Clamped(1e-6))(step, x, levels, 0).statistics["optimum"]
    assert float(measured) == pytest.approx(gamma(1.0), rel=0.01)  # the closed form is the estimator's
    slopes = [abs(gamma(1.0 + e) - gamma(1.0)) / deviation(1.0 + e) for e in (0.2, 0.1, 0.05, 0.025)]
    assert slopes[-1] == pytest.approx(slopes[-2], rel=0.1)  # a finite constant C
    assert max(slopes) < 1.5 * slopes[-1]


@pytest.mark.parametrize("grid", ["edm-to-zero", "logsnr-to-zero"])
@pytest.mark.parametrize("name", ["ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-2", "heun"])
def test_literal_form_diverges_on_digits_and_the_guard_says_where_and_why(name: str, grid: str):
    levels = GRIDS[grid](EDM(), 8)
    x = noise(range(32), (64,), levels[0], FLOAT)
    with pytest.warns(UserWarning, match=r"Unclamped\(\): .* gamma explodes; Clamped\(\) keeps gamma <= 1"):
        literal = Relaxation(VJP(1), bounds=Unclamped())
    with pytest.raises(
        RuntimeError,
        match=r"step \d of 8, sigma [\d.e+-]+ to [\d.e+-]+: the literal relaxation diverged: gamma = [\d.e+]+ because "
        r"the residual is small for its noise \(s_uu = [\d.e+-]+, sigma\^2 d = [\d.e+-]+\)",
    ):
        sample(digits_denoiser(), x, levels, SOLVERS[name], literal)


@pytest.mark.parametrize("name", ["ddim", "dpmpp-2m", "heun"])
def test_without_the_guard_the_literal_form_runs_to_its_end(name: str):
    """The error is the guard's: unguarded, runs on digits end finite, and it is their samples that are judged."""
    levels = GRIDS["edm-to-zero"](EDM(), 6)
    x = noise(range(32), (64,), levels[0], FLOAT)
    with pytest.warns(UserWarning, match="Unclamped"):
        literal = Relaxation(VJP(1), bounds=Unclamped(growth=None))
    out = sample(digits_denoiser(), x, levels, SOLVERS[name], literal)
    assert bool(out.x.isfinite().all())
    assert max(float(row["gamma"]) for row in out.statistics if row["active"]) > 3.0


@pytest.mark.parametrize("maximum", [1.0, 1.1, 1.3])
def test_a_maximum_bounds_gamma_and_nothing_else(maximum: float):
    levels = GRIDS["edm-to-zero"](EDM(), 6)
    x = noise(range(32), (64,), levels[0], FLOAT)
    out = sample(digits_denoiser(), x, levels, DDIM(), Relaxation(VJP(1), bounds=Clamped(maximum=maximum)))
    first = out.statistics[0]
    assert float(first["optimum"]) > 1.35  # 1/(1 − r): the bound is what decides
    assert float(first["gamma"]) == maximum
    assert all(float(row["gamma"]) <= maximum for row in out.statistics if row["active"])


def test_the_relaxation_before_unipcs_step_to_zero_has_no_effect():
    """The next evaluation was made at the unrelaxed prediction, and the step to σ = 0 returns it."""
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    x = noise(range(8), (64,), levels[0], FLOAT)
    solver = SOLVERS["unipc-bh1-2"]
    halved = Relaxation(Analytic(), OnlySteps((3,)), Clamped(1e-6, 0.5))
    plain, out = (sample(digits_denoiser(), x, levels, solver, c, capture=True) for c in (None, halved))
    assert not torch.allclose(out.trajectory[4], plain.trajectory[4])
    assert torch.equal(out.x, plain.x)
    bare = GRIDS["edm"](EDM(), 5)  # without a step to zero it has one
    plain, out = (sample(digits_denoiser(), x, bare, solver, c) for c in (None, halved))
    assert not torch.equal(out.x, plain.x)


def test_without_the_guard_the_literal_form_ends_far_from_any_noise_level():
    """What the guard spares: the same run by hand. The state should have the size of its level, √(σ² + E x*²)."""
    denoiser, levels = digits_denoiser(), GRIDS["edm-to-zero"](EDM(), 10)
    x = noise(range(32), (64,), levels[0], FLOAT)
    excess = []
    for i in range(9):
        step = Step(DDIM().tableau(levels, i), denoiser)
        probed = VJP(5)(step, x, levels[i], torch.Generator().manual_seed(i))
        u = x - probed.candidate
        gamma = levels[i].sigma ** 2 * mean(64 - probed.divergence) / mean(dot(u, u))
        x = x - gamma * u
        expected = (levels[i + 1].sigma ** 2 + float(digits().square().mean())) ** 0.5
        excess.append(float(x.square().mean().sqrt()) / expected)
    assert excess[0] < 0.1  # at the posterior mean: far too little noise
    assert max(excess) > 100.0  # and then far too much


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
def test_clamped_form_stays_finite_for_every_grid_and_budget(solver: Solver):
    """Every grid of the folder, and every budget from 3 to 20 with some of the grids."""
    denoiser = Empirical(digits()[::30])
    for place, grid in enumerate(GRIDS.values()):
        for nfe in range(3 + place % 5, 21, 5):
            try:
                levels = levels_for(solver, grid, EDM(), nfe)
            except ValueError:
                continue  # a solver of several stages cannot spend every budget
            x = noise(range(4), (64,), levels[0], FLOAT)
            out = sample(denoiser, x, levels, solver, Relaxation(VJP(1)))
            assert bool(out.x.isfinite().all())
            for row in out.statistics[:-1]:
                assert 0.0 < float(row["gamma"]) <= 1.0
            assert float(out.x.abs().max()) < float(x.abs().max())


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
@pytest.mark.parametrize("probe", [VJP(1), Analytic(), FiniteDifference(2)], ids=lambda p: type(p).__name__)
def test_gamma_one_is_the_plain_solver_bit_for_bit(solver: Solver, probe):
    levels = GRIDS["logsnr-to-zero"](VP(), 5)
    for dtype, per_sample in ((torch.float32, False), (FLOAT, True)):
        network = X0(Nonlinear(dtype=dtype))
        x = noise(range(4), (6,), levels[0], dtype)
        plain = sample(network, x, levels, solver, capture=True)
        fixed = Relaxation(probe, EveryStep(to_zero=True), Clamped(minimum=1.0), per_sample)
        out = sample(network, x, levels, solver, fixed, capture=True)
        for a, b in zip(out.trajectory, plain.trajectory, strict=True):
            assert torch.equal(a, b)


def test_statistics_are_those_of_algorithm_1():
    """Against the algorithm written out for a run in VP coordinates."""
    denoiser = mixture_data()
    levels = GRIDS["logsnr-to-zero"](VP(t_max=0.6), 4)
    x = noise(range(50), (8,), levels[0], FLOAT)
    step = Step(DDIM().tableau(levels, 0), denoiser)
    out = Relaxation(Exact())(step, x, levels, 0)
    alpha, sigma = levels[0].alpha, levels[0].sigma
    t = step(x).candidate
    r, weight = step.tableau.output.x, step.tableau.output.d[0]
    s_xu, s_uu = ((x - t) * x).sum(1).mean(), ((x - t) ** 2).sum(1).mean()
    s_div = (8 - 8 * r - weight * denoiser.divergence(x, levels[0])).mean()
    gamma = min(max(((1 - 1 / alpha) * s_xu + sigma**2 / alpha * s_div) / s_uu, 1e-6), 1.0)
    assert float(out.statistics["s_xu"]) == pytest.approx(float(s_xu))
    assert float(out.statistics["s_uu"]) == pytest.approx(float(s_uu))
    assert float(out.statistics["s_div"]) == pytest.approx(float(s_div))
    assert float(out.statistics["gamma"]) == pytest.approx(float(gamma))
    torch.testing.assert_close(out.x, (1 - gamma) * x + gamma * t)


def test_per_sample_gamma_does_not_depend_on_the_batch():
    denoiser, levels = mixture_data(), GRIDS["edm-to-zero"](EDM(0.02, 20.0), 5)
    x = noise(range(6), (8,), levels[0], FLOAT)
    alone = Relaxation(Exact(), per_sample=True)
    together = sample(denoiser, x, levels, DPMSolverMultistep(2), alone)
    single = [sample(denoiser, x[k : k + 1], levels, DPMSolverMultistep(2), alone).x for k in range(6)]
    torch.testing.assert_close(together.x, torch.cat(single), atol=1e-12, rtol=0)
    assert together.statistics[0]["gamma"].shape == (6,)
    batch = Relaxation(Exact())
    mixed = sample(denoiser, x, levels, DPMSolverMultistep(2), batch).x
    lone = sample(denoiser, x[:1], levels, DPMSolverMultistep(2), batch).x
    assert float((mixed[:1] - lone).abs().max()) > 1e-4  # the paper's batch statistics do tie a sample to its batch


@pytest.mark.parametrize("schedule", ["vp", "cosine", "sub-vp", "flow"])
@solvers
def test_normalised_coordinates_make_every_schedule_the_edm_one(schedule: str, solver: Solver):
    """The same ratios σ/α visited on any schedule give the same samples, up to rounding."""
    denoiser = mixture_data()
    edm = GRIDS["edm-to-zero"](EDM(0.05, 10.0), 5)
    process = SCHEDULES[schedule]
    levels = Levels(tuple(process.at(level.lam) if level.sigma else process.clean() for level in edm), process)
    x = noise(range(20), (8,), edm[0], FLOAT)
    relaxation = Relaxation(Exact(), per_sample=True, normalised=True)
    expected = sample(denoiser, x, edm, solver, relaxation)
    found = sample(denoiser, x * levels[0].alpha, levels, solver, relaxation)
    torch.testing.assert_close(found.x, expected.x, atol=1e-7, rtol=0)
    assert any(bool((row["gamma"] < 1.0).any()) for row in expected.statistics[:-1])
    for a, b in zip(found.statistics[:-1], expected.statistics[:-1], strict=True):
        torch.testing.assert_close(a["optimum"], b["optimum"], rtol=1e-6, atol=0)
    given = sample(denoiser, x, edm, solver, Relaxation(Exact(), per_sample=True))
    assert torch.equal(given.x, expected.x)


def test_small_alpha_drowns_gamma_in_the_batchs_noise_and_more_probes_do_not_help():
    """1/α multiplies the sampling noise of ⟨u, x⟩ − σ² div u. In coordinates x/α there is no such term."""
    denoiser = mixture_data()
    levels = GRIDS["logsnr-to-zero"](VP(), 6)
    clean = denoiser.sample(1000, torch.Generator().manual_seed(0))
    x = couple(clean, levels[0], torch.Generator().manual_seed(1))
    step = Step(DDIM().tableau(levels, 0), denoiser)
    probed, exact = (
        gammas(step, x, clean, levels, 0, still, torch.Generator().manual_seed(2), probe) for probe in (VJP(1), Exact())
    )
    assert exact.stein_error > 0.3 * abs(exact.direct)
    assert exact.stein_error == pytest.approx(probed.stein_error, rel=0.02)
    scaled = Levels((Level(0.0, 1.0, levels[0].ratio), Level(0.0, 1.0, levels[1].ratio)), EDM())
    y = x / levels[0].alpha
    edm = gammas(
        Step(DDIM().tableau(scaled, 0), denoiser), y, clean, scaled, 0, still, torch.Generator().manual_seed(2), VJP(1)
    )
    assert edm.stein_error < 0.05 * abs(edm.direct)


def test_leaves_pure_noise_and_the_last_step_alone():
    denoiser = mixture_data()
    levels = UniformTime(to_zero=True)(SCHEDULES["flow"], 4)
    assert levels[0].alpha == 0.0
    out = sample(denoiser, noise(range(9), (8,), levels[0], FLOAT), levels, DDIM(), Relaxation(VJP(3)))
    assert [row["active"] for row in out.statistics] == [False, True, True, False]
    assert out.backward_passes == 2 * 3
    last = sample(
        denoiser, noise(range(9), (8,), levels[0], FLOAT), levels, DDIM(), Relaxation(VJP(3), EveryStep(to_zero=True))
    )
    assert [row["active"] for row in last.statistics] == [False, True, True, True]


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (OnlySteps((0, 2)), [True, False, True, False, False]),
        (OnlySteps((-2,)), [False, False, False, True, False]),
        (OnlySteps(()), [False] * 5),
        (FirstSteps(1), [True, False, False, False, False]),
        (FirstSteps(3), [True, True, True, False, False]),
        (FirstSteps(9), [True, True, True, True, False]),
        (TopK(1), [False, False, False, True, False]),  # the EDM grid's longest step in log-SNR
        (TopK(2), [False, False, True, True, False]),
        (TopK(9), [True, True, True, True, False]),
        (TopK(1, Expansion((0.1, 0.9, 5.0, 0.3, 0.1))), [False, False, True, False, False]),
    ],
    ids=[
        "two",
        "from the end",
        "none",
        "first",
        "first three",
        "first all",
        "neediest",
        "two neediest",
        "all",
        "certificate",
    ],
)
def test_sparse_activation(activation, expected: list[bool]):
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    denoiser = mixture_data()
    x = noise(range(4), (8,), levels[0], FLOAT)
    out = sample(denoiser, x, levels, DDIM(), Relaxation(VJP(2), activation))
    assert [row["active"] for row in out.statistics] == expected
    assert out.backward_passes == 2 * sum(expected)


def test_equally_long_steps_go_to_the_earliest():
    levels = GRIDS["logsnr-to-zero"](EDM(), 8)
    assert [TopK(3)(levels, i) for i in range(8)] == [True] * 3 + [False] * 5


def test_adaptive_mode_pays_only_below_its_threshold():
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    x = noise(range(4), (8,), levels[0], FLOAT)
    costs = {
        mode: sample(mixture_data(), x, levels, DDIM(), Relaxation(probe)).backward_passes
        for mode, probe in {"full": VJP(), "analytical": Analytic(), "adaptive": Adaptive(threshold=1.0)}.items()
    }
    low = sum(level.sigma < 1.0 for level in levels[:-2])
    assert costs == {"full": 4 * 5, "analytical": 0, "adaptive": low * 5}


def test_analytical_mode_is_right_at_high_noise_only():
    denoiser, clean = problem("digits", 100)
    levels = Levels.from_times(EDM(), [80.0, 40.0, 0.5, 0.25])
    for i, tolerance in ((0, 1e-3), (2, None)):
        x = couple(clean, levels[i], torch.Generator().manual_seed(0))
        step = Step(DDIM().tableau(levels, i), denoiser)
        found = [float(Relaxation(p)(step, x, levels, i).statistics["optimum"]) for p in (Analytic(), Exact())]
        if tolerance:
            assert found[0] == pytest.approx(found[1], rel=tolerance)
        else:
            assert found[0] > 1.01 * found[1]


def test_seed_decides_the_probes():
    levels = GRIDS["edm-to-zero"](EDM(0.02, 20.0), 5)
    denoiser = mixture_data()
    step = Step(DDIM().tableau(levels, 3), denoiser)
    x = couple(denoiser.sample(9, torch.Generator().manual_seed(0)), levels[3], torch.Generator().manual_seed(1))
    optima = [float(Relaxation(VJP(1), seed=seed)(step, x, levels, 3).statistics["optimum"]) for seed in (0, 0, 1)]
    assert optima[0] == optima[1] != optima[2]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Relaxation(epsilon=-1.0), r"epsilon must be >= 0, got -1.0"),
        (lambda: Relaxation(seed=-1), r"seed must be a whole number >= 0, got -1"),
        (lambda: Clamped(0.0), r"minimum must be > 0 and <= 1, got 0.0"),
        (lambda: Unclamped(1.5), r"minimum must be > 0 and <= 1, got 1.5"),
        (lambda: TopK(0), r"k must be a whole number >= 1, got 0"),
        (lambda: FirstSteps(0), r"k must be a whole number >= 1, got 0"),
        (lambda: Clamped(0.5, 0.1), r"maximum must be >= 0.5, got 0.1"),
        (lambda: Unclamped(growth=0.0), r"growth must be > 0, got 0.0"),
        (lambda: OnlySteps((7,))(GRIDS["edm-to-zero"](EDM(), 5), 0), r"steps must lie within a run of 5 steps, got 7"),
        (
            lambda: Expansion((1.0,))(GRIDS["edm-to-zero"](EDM(), 5), 0),
            r"lipschitz must have one value a step \(5\), got 1",
        ),
    ],
)
def test_refuses_bad_arguments(build, message: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message):
            build()


def test_a_vanishing_residual_is_safeguarded():
    """On Dirac data at the mean the residual is 0: ε keeps γ a number, and the state stays."""
    exact = PROBLEMS["gaussian"]()
    exact.denoiser.variance = torch.zeros(3, dtype=FLOAT)
    levels = GRIDS["edm-to-zero"](EDM(), 4)
    x = exact.denoiser.mean.expand(5, 3).clone()
    out = sample(exact.denoiser, x, levels, DDIM(), Relaxation(Exact()))
    torch.testing.assert_close(out.x, x)
    assert replace(Relaxation(), seed=3) != Relaxation()
    assert sample(exact.denoiser, x, levels, DDIM(), Plain()).backward_passes == 0


def test_the_demo_shows_it_where_it_acts():
    """On DPM-Solver++(2M) γ stays near 1; the row beside it is UniPC-3 on the EDM grid, whose last step is relaxed."""
    model, plain = load("cifar10"), SOLVERS["dpmpp-2m"]
    rows = default_methods(plain)
    assert list(rows).index("unipc") < list(rows).index("relaxation")
    sampler = rows["relaxation"].sampler(model, plain, 5)
    assert sampler.solver == rows["unipc"].sampler(model, plain, 5).solver
    assert min(float(step.get("gamma", 1.0)) for step in sampler(model, seeds=range(2)).statistics) < 0.9
    assert default_methods(SOLVERS["heun"])["relaxation"].sampler(model, SOLVERS["heun"], 5).solver == SOLVERS["heun"]
