"""The sampler with k-diffusion's signature: same results as our loop, under inference mode, in any host's dtype."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from problems import random_calibration
from steindiff import sample
from steindiff.calibrating import Recipe
from steindiff.corrections.replay import Replay
from steindiff.denoisers import Gaussian
from steindiff.grids import Karras, LogSNR
from steindiff.integrations.kdiffusion import calibrate_steindiff, levels_of, sample_steindiff, sigmas_of
from steindiff.levels import Level
from steindiff.schedules import EDM, Discrete, Flow
from steindiff.solvers import DDIM, SOLVERS, DPMSolverMultistep, Heun, UniPCBh2

SHAPE = (3, 8, 8)


class Host(nn.Module):
    """A denoiser as hosts hand it out: EDM coordinates, or flow, one convolution, extra arguments."""

    def __init__(self, *, flow: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.flow = flow
        self.calls: list[tuple[int, torch.dtype]] = []

    def forward(self, x: Tensor, sigma: Tensor, gain: float = 1.0) -> Tensor:
        assert sigma.shape == x.shape[:1]
        self.calls.append((len(x), x.dtype))
        s = sigma.reshape(-1, 1, 1, 1)
        alpha = 1 - s if self.flow else torch.ones_like(s)
        kept = alpha / (alpha**2 + 4 * s**2)
        return kept * x + gain * 0.3 * torch.tanh(self.conv(x / (alpha**2 + s**2).sqrt()))


def sigmas(steps: int = 6, *, flow: bool = False) -> Tensor:
    grid = LogSNR()(Flow(0.01, 0.99), steps) if flow else Karras()(EDM(0.02, 20.0), steps)
    return torch.tensor([level.sigma for level in grid])


def start(level: float, dtype: torch.dtype = torch.float32, batch: int = 2) -> Tensor:
    return (level * torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(0))).to(dtype)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return float((a - b).norm() / b.norm()) < tolerance


def test_signature_is_k_diffusions():
    names = list(inspect.signature(sample_steindiff).parameters)
    assert names[:6] == ["model", "x", "sigmas", "extra_args", "callback", "disable"]


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_equals_our_loop(name: str, flow: bool):
    host, given = Host(flow=flow), sigmas(flow=flow)
    with torch.inference_mode():
        out = sample_steindiff(host, start(float(given[0])), given, solver=SOLVERS[name], flow=flow)

    class Same(Gaussian):
        def denoise(self, x: Tensor, level: Level) -> Tensor:
            return host(x, torch.full(x.shape[:1], level.sigma))

    mine = sample(
        Same(torch.zeros(SHAPE), torch.ones(SHAPE)), start(float(given[0])), levels_of(given, flow=flow), SOLVERS[name]
    )
    assert close(out, mine.x)


def reference_euler(model: Any, x: Tensor, given: Tensor) -> Tensor:
    """Euler's method as k-diffusion writes it."""
    for i in range(len(given) - 1):
        denoised = model(x, given[i] * x.new_ones(len(x)))
        x = x + (x - denoised) / given[i] * (given[i + 1] - given[i])
    return x


def reference_heun(model: Any, x: Tensor, given: Tensor) -> Tensor:
    """Heun's method as k-diffusion writes it."""
    for i in range(len(given) - 1):
        d = (x - model(x, given[i] * x.new_ones(len(x)))) / given[i]
        ahead = x + d * (given[i + 1] - given[i])
        if given[i + 1] > 0:
            d = (d + (ahead - model(ahead, given[i + 1] * x.new_ones(len(x)))) / given[i + 1]) / 2
        x = x + d * (given[i + 1] - given[i])
    return x


@pytest.mark.parametrize(("solver", "reference"), [(DDIM(), reference_euler), (Heun(), reference_heun)])
def test_equals_the_textbook_loops(solver: Any, reference: Any):
    host, given = Host(), sigmas()
    with torch.inference_mode():
        assert close(
            sample_steindiff(host, start(20.0), given, solver=solver), reference(host, start(20.0), given), 2e-5
        )


@pytest.mark.parametrize("solver", [DPMSolverMultistep(2), UniPCBh2(2), Heun()], ids=lambda s: type(s).__name__)
def test_a_vp_calibration_replays_in_the_hosts_coordinates(solver: Any):
    """Measured on x = α x* + σ ε, replayed on x/α: same samples, same number of calls."""
    levels = LogSNR()(Discrete.linear(), 5)
    calibration = random_calibration(levels, solver, SHAPE)
    host = Host()

    class VP(Gaussian):
        def denoise(self, x: Tensor, level: Level) -> Tensor:
            return host(x / level.alpha, torch.full(x.shape[:1], level.ratio))

    x = start(levels[0].sigma)
    mine = sample(VP(torch.zeros(SHAPE), torch.ones(SHAPE)), x, levels, solver, Replay(calibration))
    host.calls.clear()
    with torch.inference_mode():
        out = sample_steindiff(host, x / levels[0].alpha, sigmas_of(calibration), calibration=calibration)
    assert close(out, mine.x)
    assert len(host.calls) == calibration.nfe
    plain = sample(VP(torch.zeros(SHAPE), torch.ones(SHAPE)), x, levels, solver)
    assert not close(out, plain.x, 0.01)


def test_callback_extra_arguments_and_dtype():
    host, given, seen = Host().half(), sigmas(), []
    with torch.inference_mode():
        out = sample_steindiff(
            host, start(20.0, torch.float16), given, {"gain": 0.5}, callback=seen.append, disable=True
        )
        assert close(out.float(), sample_steindiff(host.float(), start(20.0), given, {"gain": 0.5}), 0.02)
    assert out.dtype == torch.float16
    assert [call["i"] for call in seen] == list(range(6))
    assert all({"x", "i", "sigma", "sigma_hat", "denoised"} == set(call) for call in seen)
    assert [float(call["sigma"]) for call in seen] == given[:-1].tolist()
    assert all(call["x"].dtype == torch.float16 for call in seen)
    assert {dtype for _, dtype in host.calls[:6]} == {torch.float16}


@pytest.mark.parametrize("flow", [False, True])
def test_calibrate_under_inference_mode(flow: bool):
    """Weights made in inference mode, as ComfyUI's are: derivatives by torch.func, and the result helps."""
    with torch.inference_mode():
        host = Host(flow=flow)
        low, high = (0.01, 0.99) if flow else (0.02, 20.0)
        recipe = Recipe(steps=8, probe_levels=3, probe_samples=4)
        calibration = calibrate_steindiff(
            host, SHAPE, 4, low, high, flow=flow, recipe=recipe, seeds=range(8), settings={"cfg": 3.0}
        )
        assert calibration.settings["backward_passes"] > 0
        given = sigmas_of(calibration)
        x = start(float(given[0]))
        host.calls.clear()
        out = sample_steindiff(host, x, given, calibration=calibration, flow=flow, settings={"cfg": 3.0})
        assert len(host.calls) == 4
        plain = sample_steindiff(host, x, given, flow=flow)
    assert out.isfinite().all()
    assert not torch.equal(out, plain)


def test_a_given_grid_needs_no_derivatives():
    recipe = Recipe(steps=4, grid=Karras())
    calibration = calibrate_steindiff(Host(), SHAPE, 4, 0.02, 20.0, recipe=recipe, seeds=range(4))
    assert calibration.settings["backward_passes"] == 0


def test_misuse_is_refused():
    levels = Karras()(EDM(0.02, 20.0), 5)
    calibration = random_calibration(levels, DPMSolverMultistep(2), SHAPE)
    host, given, x = Host(), sigmas_of(calibration), start(20.0)
    run = {"calibration": calibration}
    with pytest.raises(ValueError, match="solver: measured with DPMSolverMultistep"):
        sample_steindiff(host, x, given, solver=DDIM(), **run)
    with pytest.raises(ValueError, match=r"sigmas: 6 steps, .*the calibration is for 5 steps"):
        sample_steindiff(host, x, sigmas(6), **run)
    with pytest.raises(ValueError, match=r"shape: measured for \(3, 8, 8\), asked for \(3, 4, 4\)"):
        sample_steindiff(host, x[..., :4, :4], given, **run)
    with pytest.raises(ValueError, match="flow = True: the calibration was measured on EDM"):
        sample_steindiff(host, x, given / 100, flow=True, **run)
    with pytest.raises(ValueError, match=r"cfg: measured with None, asked for 7\.5"):
        sample_steindiff(host, x, given, settings={"cfg": 7.5}, **run)
    with pytest.raises(ValueError, match=r"levels\[1\].*noise must strictly decrease"):
        sample_steindiff(host, x, given.flip(0))
    with pytest.raises(ValueError, match=r"sigmas: shape \(1, 6\)"):
        sample_steindiff(host, x, given[None])
    with pytest.raises(ValueError, match="need 0 < sigma_min < sigma_max"):
        calibrate_steindiff(host, SHAPE, 4, 1.0, 0.5)
