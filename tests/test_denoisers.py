"""Denoisers against what they must be: exact conditional means, and each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from networks.mixture import Empirical, Mixture
from problems import FLOAT, Nonlinear, gaussian, mixture
from steindiff.denoisers import (
    X0,
    CountingDenoiser,
    DynamicThreshold,
    EDMDenoiser,
    Epsilon,
    FlowVelocity,
    Gaussian,
    Guided,
    Preconditioned,
    Score,
    StaticThreshold,
    Velocity,
)
from steindiff.levels import Level
from steindiff.schedules import EDM, VP, Cosine, Flow, SubVP

LEVELS = [EDM().level(0.7), VP().level(0.4), SubVP().level(0.3), Cosine().level(0.6), Flow().level(0.35)]
levels = pytest.mark.parametrize("level", LEVELS, ids=["edm", "vp", "sub-vp", "cosine", "flow"])


def states(dim: int, num: int = 5) -> torch.Tensor:
    return torch.randn(num, dim, generator=torch.Generator().manual_seed(1), dtype=FLOAT)


@levels
@pytest.mark.parametrize(
    ("wrapper", "output"),
    [
        (X0, lambda x, d, a, s: d),
        (Epsilon, lambda x, d, a, s: (x - a * d) / s),
        (Velocity, lambda x, d, a, s: a * (x - a * d) / s - s * d),
        (FlowVelocity, lambda x, d, a, s: (x - a * d) / s - d),
        (Score, lambda x, d, a, s: -(x - a * d) / s**2),
    ],
)
def test_predictions_turn_into_the_same_denoised_image(level: Level, wrapper: type, output):
    """A network that outputs noise, velocity or score of a known D must give back that D."""
    exact, x = gaussian().denoiser, states(3)
    d = exact(x, level)
    denoiser = wrapper(lambda z, t: output(z, d, level.alpha, level.sigma))
    torch.testing.assert_close(denoiser(x, level), d, rtol=1e-10, atol=1e-10)
    assert denoiser.calls == 1


@levels
def test_edm_networks_serve_every_schedule(level: Level):
    exact, x = mixture().denoiser, states(1)
    denoiser = EDMDenoiser(lambda z, sigma: exact(z, Level(0.0, 1.0, float(sigma[0]))))
    torch.testing.assert_close(denoiser(x, level), exact(x, level), rtol=1e-5, atol=1e-6)


def test_preconditioning_of_a_zero_network_is_the_linear_posterior_mean():
    """F = 0 leaves c_skip x, which is the exact denoiser of N(0, σ_data²)."""
    exact = Gaussian(torch.zeros(4, dtype=FLOAT), torch.full((4,), 0.25, dtype=FLOAT))
    denoiser = Preconditioned(lambda z, c: torch.zeros_like(z), 0.5, dtype=FLOAT)
    x = states(4)
    for sigma in (0.01, 1.0, 80.0):
        torch.testing.assert_close(
            denoiser(x, torch.full((5,), sigma, dtype=FLOAT)), exact(x, EDM().level(sigma)), rtol=1e-12, atol=1e-12
        )


@levels
@pytest.mark.parametrize(
    "build", [lambda: gaussian().denoiser, lambda: mixture().denoiser, lambda: Empirical(states(3, 7))]
)
def test_closed_forms_divergence_is_the_trace_of_the_jacobian(level: Level, build):
    denoiser = build()
    dim = denoiser.mean.numel() if isinstance(denoiser, Gaussian) else denoiser.flat.shape[1]
    x = states(dim)
    traces = [torch.autograd.functional.jacobian(lambda z: denoiser(z[None], level)[0], row).trace() for row in x]
    torch.testing.assert_close(denoiser.divergence(x, level), torch.stack(traces), rtol=1e-10, atol=1e-10)


@levels
def test_closed_forms_are_conditional_means(level: Level):
    """E⟨f(x), x* − D(x)⟩ = 0 for every f: checked by regressing x* on x within Monte Carlo error."""
    generator = torch.Generator().manual_seed(3)
    for denoiser in (gaussian().denoiser, mixture().denoiser):
        clean = denoiser.sample(200_000, generator)
        x = level.alpha * clean + level.sigma * torch.randn(clean.shape, generator=generator, dtype=FLOAT)
        gap = clean - denoiser(x, level)
        for f in (torch.ones_like(x), x, x.tanh(), x**2):
            products = (f * gap).mean(1)
            error = float(products.std() / len(products) ** 0.5)
            assert abs(float(products.mean())) < 4.5 * error


def test_a_mixture_of_one_is_the_gaussian():
    one = Mixture(
        torch.tensor([[0.3, -0.2]], dtype=FLOAT), torch.tensor([0.5], dtype=FLOAT), torch.ones(1, dtype=FLOAT)
    )
    same = Gaussian(torch.tensor([0.3, -0.2], dtype=FLOAT), torch.full((2,), 0.5, dtype=FLOAT))
    for level in LEVELS:
        torch.testing.assert_close(one(states(2), level), same(states(2), level))


def test_empirical_at_low_noise_returns_the_nearest_point():
    data = states(3, 6)
    torch.testing.assert_close(Empirical(data)(data + 1e-4, EDM().level(1e-3)), data)


@pytest.mark.parametrize("denoiser", [gaussian().denoiser, mixture().denoiser])
def test_closed_forms_at_zero_noise_are_the_identity(denoiser):
    x = states(3 if isinstance(denoiser, Gaussian) else 1)
    torch.testing.assert_close(denoiser(x, EDM().clean()), x)


class Constant(CountingDenoiser):
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def denoise(self, x, level):
        return self.value.expand_as(x)


@given(scale=st.floats(0.0, 20.0))
def test_guidance_is_linear_and_counts_both_networks(scale: float):
    c, u = Constant(torch.tensor([1.0, 2.0])), Constant(torch.tensor([0.5, -1.0]))
    guided = Guided(c, u, scale)
    out = guided(torch.zeros(3, 2), LEVELS[0])
    torch.testing.assert_close(out, (u.value + scale * (c.value - u.value)).expand(3, 2))
    assert guided.calls == (1 if scale == 1.0 else 2)


def test_guidance_rescale_restores_the_spread():
    c, u = Constant(torch.tensor([1.0, 2.0, -1.0])), Constant(torch.tensor([0.5, -1.0, 0.0]))
    out = Guided(c, u, 5.0, rescale=1.0)(torch.zeros(2, 3), LEVELS[0])
    torch.testing.assert_close(out.std(1), c.value.std().expand(2))


def test_static_threshold():
    inner = Constant(torch.tensor([-3.0, 0.5, 2.0]))
    clipped = StaticThreshold(inner)
    assert clipped(torch.zeros(1, 3), LEVELS[0]).tolist() == [[-1.0, 0.5, 1.0]]
    assert clipped.calls == inner.calls == 1


@given(quantile=st.floats(0.05, 1.0), seed=st.integers(0, 100))
def test_dynamic_threshold_agrees_with_torch_quantile(quantile: float, seed: int):
    d = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
    out = DynamicThreshold(X0(lambda z, t: d), quantile)(torch.zeros(4, 50, dtype=FLOAT), LEVELS[0])
    s = d.abs().quantile(quantile, dim=1, keepdim=True).clamp(min=1.0)
    torch.testing.assert_close(out, d.clamp(-s, s) / s)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Guided(None, None, -1.0), "scale must be >= 0, got -1.0"),
        (lambda: Guided(None, None, 2.0, rescale=1.5), "rescale must be >= 0 and <= 1, got 1.5"),
        (lambda: StaticThreshold(None, 0), "bound must be > 0, got 0"),
        (lambda: DynamicThreshold(None, 0.0), "quantile must be > 0"),
        (lambda: DynamicThreshold(None, 0.9, 0.5), "maximum must be >= 1, got 0.5"),
        (lambda: Preconditioned(None, 0.0), "sigma_data must be > 0, got 0.0"),
        (lambda: Gaussian(torch.zeros(2), torch.tensor([1.0, -1.0])), "variance must be >= 0"),
        (lambda: Mixture(torch.zeros(2, 3), torch.ones(3), torch.ones(2)), "first dimension of means"),
        (lambda: Mixture(torch.zeros(2, 3), torch.ones(2), torch.zeros(2)), "weights > 0"),
    ],
)
def test_bad_settings_are_named(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_schedules_meet_networks_through_time():
    """The network is conditioned on the level's own time, or on what the caller says."""
    seen = []

    def network(x, t):
        seen.append(t.tolist())
        return Nonlinear(dim=2)(x, t)

    level = VP().level(0.5)
    Epsilon(network)(states(2, 1), level)
    Epsilon(network, time=lambda level: 1000 * level.t)(states(2, 1), level)
    assert seen == [[0.5], [500.0]]
