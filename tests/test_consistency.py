"""Self-consistency (Algorithm 2): against the algorithm written out, and what its two weights do."""

from __future__ import annotations

import math

import pytest
import torch

from paper_only.probes import Exact
from problems import FLOAT, PROBLEMS, Nonlinear
from steindiff import GRIDS, SOLVERS, noise, sample
from steindiff.corrections import Plain, Relaxation
from steindiff.corrections.consistency import Consistency, Likelihood, LogSigma, Matched, PerDimension
from steindiff.denoisers import X0, Gaussian
from steindiff.levels import Levels
from steindiff.schedules import EDM, VP
from steindiff.solvers import DDIM, Heun
from steindiff.tableau import Step
from stepping import digits_denoiser, step_at


@pytest.mark.parametrize("schedule", [EDM(0.05, 10.0), VP()], ids=["edm", "vp"])
@pytest.mark.parametrize(("weight", "share"), [(Likelihood(), 1.0), (PerDimension(), 1.0 / 6.0)])
def test_one_step_is_algorithm_2(schedule, weight, share: float):
    denoiser = X0(Nonlinear())
    levels = GRIDS["logsnr-to-zero"](schedule, 5)
    s, m, t = levels[1], levels[2], levels[3]
    x = noise(range(7), (6,), s, FLOAT)
    step = Step(DDIM().tableau(levels, 1), denoiser)
    out = Consistency(Relaxation(Exact()), weight=weight)(step, x, levels, 1)

    proposed = Relaxation(Exact())(step, x, levels, 1).x
    two = t.sigma / s.sigma * x + (t.alpha - t.sigma / s.sigma * s.alpha) * denoiser(x, s)
    w = math.log(m.sigma / s.sigma) / math.log(t.sigma / s.sigma)
    alternative = (1 - w) * x + w * two
    rho = torch.exp(-share * (proposed - alternative).square().sum(1) / (2 * m.sigma**2))
    torch.testing.assert_close(out.statistics["rho"], rho)
    torch.testing.assert_close(out.x, rho[:, None] * proposed + (1 - rho[:, None]) * alternative)
    assert out.backward_passes == 6


def test_literal_weight_is_zero_or_one_in_many_dimensions():
    """The same discrepancy per pixel: 0.3 σ. In 6 dimensions it is graded, in 3,072 it is refused outright."""
    for d, expected in ((6, math.exp(-0.27)), (3072, math.exp(-0.045 * 3072))):
        gap = torch.full((2, d), 0.3, dtype=FLOAT)
        torch.testing.assert_close(Likelihood()(gap, 1.0), torch.full((2,), expected, dtype=FLOAT))
        torch.testing.assert_close(PerDimension()(gap, 1.0), torch.full((2,), math.exp(-0.045), dtype=FLOAT))
    assert math.exp(-0.045 * 3072) < 1e-60


def test_literal_weight_discards_the_solver_on_digits():
    """On 64 dimensions already: where the look-ahead disagrees, nearly every sample's proposal is thrown away."""
    levels = GRIDS["edm-to-zero"](EDM(), 8)
    x = noise(range(64), (64,), levels[0], FLOAT)
    weights = {}
    for name, weight in (("literal", Likelihood()), ("normalised", PerDimension())):
        out = sample(digits_denoiser(), x, levels, SOLVERS["dpmpp-2m"], Consistency(Plain(), weight=weight))
        weights[name] = torch.stack([row["rho"] for row in out.statistics if "rho" in row])
    assert float((weights["literal"] < 0.01).double().mean()) > 0.8
    assert 0.3 < float(weights["normalised"].median()) < 1.0


def test_interpolation_in_log_sigma_carries_too_much_noise_and_matching_does_not():
    """On Dirac data the flow is a straight line in σ, so the truth is known: x_m = x* + σ_m ε."""
    s, m, t = (EDM().level(sigma) for sigma in (4.0, 1.0, 0.25))
    noise_of = [a * s.sigma + b * t.sigma for a, b in (LogSigma()(s, m, t), Matched()(s, m, t))]
    assert noise_of == pytest.approx([2.125, 1.0])  # the first is twice the level it stands for
    for levels in (GRIDS["logsnr-to-zero"](VP(), 5), GRIDS["uniform"](VP(), 5)):
        s, m, t = levels[1:4]
        a, b = Matched()(s, m, t)
        assert a * s.alpha + b * t.alpha == pytest.approx(m.alpha)
        assert a * s.sigma + b * t.sigma == pytest.approx(m.sigma)


@pytest.mark.parametrize("weight", [Likelihood(), PerDimension()])
def test_on_dirac_data_matched_interpolation_agrees_with_the_solver_and_log_sigma_pulls_it_off(weight):
    dirac = Gaussian(torch.tensor([0.3, -0.7, 0.1], dtype=FLOAT), torch.zeros(3, dtype=FLOAT))
    levels = GRIDS["edm-to-zero"](EDM(), 6)
    x = noise(range(20), (3,), levels[0], FLOAT)
    exact = sample(dirac, x, levels, DDIM(), capture=True)
    matched = sample(
        dirac, x, levels, DDIM(), Consistency(Plain(), interpolation=Matched(), weight=weight), capture=True
    )
    for a, b in zip(matched.trajectory, exact.trajectory, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    paper = sample(dirac, x, levels, DDIM(), Consistency(Plain(), weight=weight), capture=True)
    for kept, right in zip(paper.trajectory[1:-2], exact.trajectory[1:-2], strict=True):
        assert float((kept - dirac.mean).norm()) > 1.02 * float((right - dirac.mean).norm())


@pytest.mark.parametrize("name", ["ddim", "dpmpp-3m", "unipc-bh2-2", "heun"])
def test_a_first_order_look_ahead_costs_nothing_and_a_better_one_is_counted(name: str):
    exact = PROBLEMS["mixture"]()
    levels = GRIDS["edm-to-zero"](EDM(), 6)
    x = noise(range(5), (1,), levels[0], FLOAT)
    free = sample(exact.denoiser, x, levels, SOLVERS[name], Consistency(Plain()))
    assert free.network_calls == free.nfe == SOLVERS[name].calls(levels)
    paid = sample(exact.denoiser, x, levels, SOLVERS[name], Consistency(Plain(), lookahead=Heun()))
    blended = sum("rho" in row for row in paid.statistics)
    assert blended == 4  # no look-ahead from the last step, and none past σ = 0
    assert paid.network_calls == paid.nfe + blended


def test_without_a_level_after_next_the_proposal_stands():
    denoiser = X0(Nonlinear())
    levels = GRIDS["logsnr-to-zero"](EDM(0.05, 10.0), 4)
    for i in (2, 3):  # two steps from σ = 0, and the step to it
        step, x = step_at(DDIM(), denoiser, levels, i, noise(range(3), (6,), levels[0], FLOAT))
        assert torch.equal(Consistency(Plain())(step, x, levels, i).x, step(x).candidate)
    step, x = step_at(DDIM(), denoiser, levels, 2, noise(range(3), (6,), levels[0], FLOAT))
    assert "rho" in Consistency(Plain(), interpolation=Matched())(step, x, levels, 2).statistics


def test_agreement_returns_the_proposal_itself():
    """ρ = 1 exactly: nothing may be rounded."""
    exact = Gaussian(torch.zeros(2, dtype=FLOAT), torch.zeros(2, dtype=FLOAT))
    levels = Levels.from_times(EDM(), [4.0, 2.0, 1.0])
    x = noise(range(3), (2,), levels[0], FLOAT)
    step = Step(DDIM().tableau(levels, 0), exact)
    out = Consistency(Plain(), interpolation=Matched())(step, x, levels, 0)
    assert torch.equal(out.x, step(x).candidate)
