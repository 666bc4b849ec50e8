"""Diagnostics: measured numbers against closed forms, and the plots."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from networks.mixture import Mixture
from paper_only.coefficients import (
    couple,
    coupled_gammas,
    decay,
    fine_flow,
    ideal_gammas,
    plot_comparison,
    plot_decay,
)
from paper_only.oscillation import oscillation, plot_oscillation
from problems import FLOAT, PROBLEMS, Nonlinear
from steindiff import GRIDS, SCHEDULES, SOLVERS, noise, sample
from steindiff.corrections import Plain
from steindiff.denoisers import X0, Gaussian
from steindiff.diagnostics import (
    candidate,
    certificate,
    difference,
    lipschitz,
    operator_norm,
    plot_certificate,
    plot_lipschitz,
)
from steindiff.levels import Level, Levels
from steindiff.probes import VJP
from steindiff.schedules import EDM, VP
from steindiff.solvers import DDIM
from steindiff.tableau import Step
from stepping import digits, digits_denoiser


def spread_gaussian() -> Gaussian:
    return Gaussian(torch.zeros(6, dtype=FLOAT), torch.logspace(-3, 1, 6, dtype=FLOAT))


def two_modes() -> Mixture:
    means = torch.zeros(2, 6, dtype=FLOAT)
    means[0, 0], means[1, 0] = -1.0, 1.0
    return Mixture(means, torch.full((2,), 0.01, dtype=FLOAT), torch.ones(2, dtype=FLOAT))


@pytest.mark.parametrize("push", [None, difference])
def test_operator_norm_is_the_largest_singular_value(push):
    network = Nonlinear()
    options = {key: value for key, value in (("push", push),) if value is not None}

    def function(z: torch.Tensor) -> torch.Tensor:
        return network(z, torch.zeros(len(z), dtype=FLOAT))

    x = noise(range(5), (6,), Level(1.0, 1.0, 1.0), FLOAT)
    found = operator_norm(function, x, torch.Generator().manual_seed(0), iterations=500, tolerance=1e-9, **options)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: function(z[None])[0]))(x)
    torch.testing.assert_close(found, torch.linalg.svdvals(jacobian)[:, 0], rtol=1e-4, atol=0)
    pairs = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    random = (function(x + 1e-6 * pairs) - function(x)).norm(dim=1) / (1e-6 * pairs).norm(dim=1)
    assert float((random / found).mean()) < 0.7  # what random pairs of points would have said


@pytest.mark.parametrize("schedule", [EDM(0.05, 20.0), VP(t_max=0.8)], ids=["edm", "vp"])
def test_prop_4_1_the_bound_is_attained_by_exact_denoisers(schedule):
    """∂D/∂x of an exact denoiser is symmetric and positive, so for DDIM the certificate is the Lipschitz constant."""
    denoiser = two_modes()
    levels = GRIDS["logsnr-to-zero"](schedule, 6)
    found = lipschitz(
        denoiser, noise(range(4), (6,), levels[0], FLOAT), levels, DDIM(), torch.Generator().manual_seed(0),
        iterations=40, tolerance=1e-5,
    )  # fmt: skip
    for k in range(4):
        rows = certificate(levels, found.denoiser[:, k].tolist(), found.noise[:, k].tolist())
        assert found.transition[:, k].tolist() == pytest.approx(rows.bound, rel=0.02)
        for bound, threshold, value, holds in zip(
            rows.bound, rows.threshold, found.denoiser[:, k].tolist(), rows.holds, strict=True
        ):
            assert holds == (bound < 1.0)
            if abs(bound - 1.0) > 1e-6:
                assert holds == (value < threshold)


def test_prop_4_1_between_two_modes_the_certificate_is_lost():
    """The trap is real: halfway between two modes the exact denoiser's step expands."""
    levels = Levels.from_times(EDM(), [0.4, 0.1])
    found = lipschitz(
        two_modes(), torch.zeros(1, 6, dtype=FLOAT) + 1e-3, levels, DDIM(), torch.Generator().manual_seed(0)
    )
    slope = 1.0 / (0.4**2 + 0.01)  # the posterior swings from one mode to the other
    assert float(found.denoiser) == pytest.approx((0.01 + slope * 0.4**2) / (0.4**2 + 0.01), rel=0.05)
    rows = certificate(levels, found.denoiser[:, 0].tolist(), found.noise[:, 0].tolist())
    assert rows.holds == (False,)
    assert float(found.transition) > 3.0


def test_prop_4_1_losing_the_certificate_is_not_losing_contraction():
    """The appendix says 'violates': a denoiser that falls where x rises has no certificate and yet contracts."""
    levels = Levels.from_times(EDM(), [1.0, 0.5])
    denoiser = X0(lambda x, t: -1.2 * x)
    found = lipschitz(denoiser, torch.ones(1, 4, dtype=FLOAT), levels, DDIM(), torch.Generator().manual_seed(0))
    rows = certificate(levels, found.denoiser[:, 0].tolist(), found.noise[:, 0].tolist())
    assert rows.holds == (False,)
    assert float(found.transition) == pytest.approx(abs(0.5 - 0.5 * 1.2))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_prop_4_1_the_ceiling_is_strict_only_where_alpha_grows(schedule):
    """The paper: 1/α_t > threshold 'for noise schedules'. For VE and EDM the two are equal."""
    levels = GRIDS["uniform"](schedule, 8)
    rows = certificate(levels, [1.0] * 8, [1.0] * 8)
    for i, (ceiling, threshold) in enumerate(zip(rows.ceiling, rows.threshold, strict=True)):
        if levels[i].alpha == levels[i + 1].alpha or levels[i + 1].sigma == 0.0:
            assert ceiling == pytest.approx(threshold, rel=1e-12)
        else:
            assert ceiling > threshold * (1.0 + 1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("constant", [0.0, 0.1, 1.0, 10.0])
def test_the_noise_predictors_bound_certifies_no_step_of_any_schedule(schedule, constant: float):
    """(1 + σ_s L_ε) α_t/α_s − σ_t L_ε >= α_t/α_s >= 1: it cannot fall below 1 while α does not fall."""
    rows = certificate(GRIDS["uniform"](schedule, 8), [0.0] * 8, [constant] * 8)
    assert min(rows.noise_bound) >= 1.0 - 1e-12


def test_lipschitz_can_skip_steps():
    levels = GRIDS["edm-to-zero"](EDM(), 5)
    start = noise(range(2), (6,), levels[0], FLOAT)
    whole, some = (
        lipschitz(spread_gaussian(), start, levels, DDIM(), torch.Generator().manual_seed(0), every=every)
        for every in (1, 2)
    )
    assert some.sigma == whole.sigma[::2]
    torch.testing.assert_close(some.transition, whole.transition[::2], rtol=0.01, atol=0)
    with pytest.raises(ValueError, match=r"every must be a whole number >= 1, got 0"):
        lipschitz(spread_gaussian(), start, levels, DDIM(), torch.Generator(), every=0)


def test_lipschitz_refuses_a_network_without_a_gradient_and_takes_a_step_without_a_network():
    levels = GRIDS["edm-to-zero"](EDM(), 4)
    start = noise(range(2), (6,), levels[0], FLOAT)
    found = lipschitz(spread_gaussian(), start, levels, SOLVERS["unipc-bh1-2"], torch.Generator().manual_seed(0))
    assert torch.equal(found.transition[-1], torch.zeros(2, dtype=FLOAT))  # the last step returns an old evaluation
    silent = X0(lambda x, t: torch.tanh(x).detach())
    with pytest.raises(RuntimeError, match="network gives no gradient"):
        lipschitz(silent, start, levels, DDIM(), torch.Generator())
    step = Step(DDIM().tableau(levels, 0), silent)
    with pytest.raises(RuntimeError, match="network gives no gradient"):
        operator_norm(functools.partial(candidate, step), start, torch.Generator())


def test_certificate_refuses_a_wrong_number_of_constants():
    with pytest.raises(ValueError, match=r"noise must have one constant a step \(4\), got 3"):
        certificate(GRIDS["edm-to-zero"](EDM(), 4), [1.0] * 4, [1.0] * 3)


def test_appendix_c_special_cases():
    """EDM: the threshold is 1. VP, α = cos φ, σ = sin φ: it grows to 1 as noise falls, and 1/α_t falls to 1."""
    edm = certificate(GRIDS["edm-to-zero"](EDM(), 8), [0.0] * 8, [0.0] * 8)
    assert edm.threshold == pytest.approx([1.0] * 8)
    levels = GRIDS["uniform"](VP(), 8)
    vp = certificate(levels, [0.0] * 8, [0.0] * 8)
    angles = [math.atan2(level.sigma, level.alpha) for level in levels]
    closed = [math.cos((s + t) / 2) / math.cos((s - t) / 2) for s, t in itertools.pairwise(angles)]
    assert vp.threshold == pytest.approx(closed)
    assert list(vp.threshold) == sorted(vp.threshold)
    assert list(vp.ceiling) == sorted(vp.ceiling, reverse=True)
    assert vp.ceiling[-1] - vp.threshold[-1] < vp.ceiling[0] - vp.threshold[0]


@pytest.mark.parametrize("grid", ["edm-to-zero", "logsnr-to-zero"])
def test_figure_4_steps_expand_at_few_steps_and_still_at_many(grid: str):
    """On digits with DPM-Solver++: step refinement alone does not remove local expansion."""
    peaks = {}
    for steps in (6, 24):
        levels = GRIDS[grid](EDM(), steps)
        found = lipschitz(
            digits_denoiser(), noise(range(2), (64,), levels[0], FLOAT), levels, SOLVERS["dpmpp-2m"],
            torch.Generator().manual_seed(0), iterations=8, tolerance=0.05,
        )  # fmt: skip
        peaks[steps] = float(found.transition.max())
        assert found.transition.shape == found.denoiser.shape == found.noise.shape == (steps, 2)
    assert peaks[6] > 1.5
    assert peaks[24] > 1.0


@pytest.mark.parametrize("schedule", ["edm", "vp", "flow"])
def test_fine_flow_follows_the_exact_one(schedule: str):
    denoiser = spread_gaussian()
    process = SCHEDULES[schedule]
    flow = fine_flow(denoiser, process, 200)
    x = noise(range(3), (6,), process.level(process.t_max), FLOAT)
    start = process.level(process.t_max)
    ends = [process.level(0.4), process.clean()] if schedule != "edm" else [process.level(3.0), process.clean()]
    for end in ends:
        torch.testing.assert_close(flow(x, start, end), denoiser.flow(x, start, end), atol=2e-2, rtol=2e-2)


def test_oracle_gamma_is_near_one_where_stein_gamma_is_not():
    """The flow asks for the plain step; the clean target asks for the posterior mean, 1/(1 − r)."""
    denoiser = spread_gaussian()
    levels = Levels.from_times(EDM(), [2.0, 1.6, 1.28])
    clean = denoiser.sample(4000, torch.Generator().manual_seed(0))
    rows = ideal_gammas(
        denoiser, clean, levels, DDIM(), torch.Generator().manual_seed(1), probe=VJP(2), flow=denoiser.flow
    )
    for row in rows:
        assert row.direct == pytest.approx(5.0, rel=0.02)
        assert row.stein == pytest.approx(5.0, rel=0.1)
        assert row.oracle == pytest.approx(1.0, abs=0.03)
        assert row.improves(row.stein)
    fine = ideal_gammas(denoiser, clean, levels, DDIM(), torch.Generator().manual_seed(1), probe=VJP(2))
    for a, b in zip(fine, rows, strict=True):
        assert a.oracle == pytest.approx(b.oracle, abs=1e-3)


def test_sampled_gammas_skip_pure_noise_and_follow_the_run():
    denoiser = spread_gaussian()
    levels = GRIDS["uniform"](SCHEDULES["flow"], 4)
    clean = denoiser.sample(50, torch.Generator().manual_seed(0))
    for compare in (coupled_gammas, ideal_gammas):
        rows = compare(denoiser, clean, levels, SOLVERS["dpmpp-2m"], torch.Generator().manual_seed(0))
        assert [row.sigma for row in rows] == [level.sigma for level in levels[1:-1]]


def test_decay_of_a_plain_run_measures_the_solver():
    exact = PROBLEMS["gaussian"]()
    levels = GRIDS["edm-to-zero"](EDM(0.02, 20.0), 5)
    clean = exact.denoiser.sample(200, torch.Generator().manual_seed(0))
    found = decay(exact.denoiser, clean, levels, DDIM(), torch.Generator().manual_seed(1), Plain())
    x = couple(clean, levels[0], torch.Generator().manual_seed(1))
    end = sample(exact.denoiser, x, levels, DDIM()).x
    assert found.error[-1] == pytest.approx(float((end - clean).square().sum(1).mean()))
    assert found.error[1:] == pytest.approx(found.plain)
    assert found.deviation == (0.0,) * 5
    assert found.sigma == tuple(level.sigma for level in levels)


def test_minus_identity_oscillates_and_half_of_it_converges_at_once():
    found = oscillation(torch.tensor([1.0, -2.0], dtype=FLOAT), 6, 3.0, torch.Generator().manual_seed(0))
    assert torch.equal(found.plain[1::2], -found.plain[::2][:3])
    assert torch.equal(found.plain[0], found.plain[-1])
    assert found.gamma == pytest.approx(0.5, abs=0.02)
    assert float(found.relaxed[-1].abs().max()) < 1e-6
    with pytest.raises(ValueError, match=r"steps must be >= 1, got 0"):
        oscillation(torch.ones(1), 0, 1.0, torch.Generator())


def draw(plot, *data) -> Figure:
    figure = Figure()
    axes = figure.add_subplot()
    plot(*data, axes)
    FigureCanvasAgg(figure).draw()
    return figure


def test_plots_show_the_data():
    denoiser, levels = spread_gaussian(), GRIDS["edm-to-zero"](EDM(), 4)
    generator = torch.Generator().manual_seed(0)
    clean = denoiser.sample(30, generator)
    constants = lipschitz(denoiser, noise(range(3), (6,), levels[0], FLOAT), levels, DDIM(), generator)
    rows = certificate(levels, constants.denoiser.amax(1).tolist(), constants.noise.amax(1).tolist())
    coefficients = ideal_gammas(denoiser, clean, levels, DDIM(), generator)
    errors = decay(denoiser, clean, levels, DDIM(), generator)
    turns = oscillation(torch.ones(2, dtype=FLOAT), 5, 1.0, generator)
    expected = {
        plot_lipschitz: (constants, constants.transition.median(1).values.tolist()),
        plot_certificate: (rows, list(rows.bound)),
        plot_comparison: (coefficients, [row.direct for row in coefficients]),
        plot_decay: (errors, list(errors.error)),
        plot_oscillation: (turns, turns.plain[:, 0].tolist()),
    }
    for plot, (data, values) in expected.items():
        (axes,) = draw(plot, data).axes
        assert list(axes.lines[0].get_ydata()) == pytest.approx(values)
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        assert axes.get_legend() is not None
    axes = Figure().add_subplot()
    own = coupled_gammas(denoiser, clean, levels, DDIM(), generator)
    plot_comparison(coefficients, axes, own)
    assert [container.get_label() for container in axes.containers] == ["Stein, ideal states", "Stein, sampled states"]
    axes = Figure().add_subplot()
    for label in ("EDM", "log-SNR"):
        plot_lipschitz(constants, axes, label)
    assert axes.xaxis_inverted()  # once, not once per curve


def test_digits_are_what_the_benchmarks_say_they_are():
    assert digits().shape == (1797, 64)
    assert float(digits().min()) == -1.0
    assert float(digits().max()) == 1.0
    assert math.isclose(float(digits_denoiser().weights.sum()), 1.0)


def test_a_network_with_channels_last_is_told_what_to_do():
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 3, 1)
    )
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    wanted = operator_norm(network, x, torch.Generator().manual_seed(1), iterations=3)
    assert bool((wanted > 0).all())
    network.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"channels last; lay it out with .*, or leave Lipschitz constants out"):
        operator_norm(network, x, torch.Generator().manual_seed(1), iterations=3)
