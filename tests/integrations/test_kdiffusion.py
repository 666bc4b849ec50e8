"""The sampler with k-diffusion's signature: same results as our loop, under inference mode, in any host's dtype."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from problems import random_calibration
from steindiff import sample
from steindiff.calibrating import Recipe, calibrate
from steindiff.denoisers import EDMDenoiser, Epsilon, FlowVelocity, Gaussian
from steindiff.grids import Karras, LogSNR
from steindiff.integrations.kdiffusion import HostDenoiser, hosted, levels_of, sample_steindiff, sigmas_of
from steindiff.levels import Level
from steindiff.schedules import EDM, VP, Discrete, Flow
from steindiff.search import Search
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
    mine = sample(VP(torch.zeros(SHAPE), torch.ones(SHAPE)), x, levels, solver, calibration.replay())
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
@pytest.mark.parametrize("name", SOLVERS)
def test_callback_pairs_a_state_with_its_denoised_image(name: str, flow: bool):
    """`x` is the state before step i, at sigma[i], and `denoised` the model's answer to it: also for Heun."""
    host, given, seen = Host(flow=flow), sigmas(flow=flow), []
    x = start(float(given[0]))
    with torch.inference_mode():
        out = sample_steindiff(host, x, given, callback=seen.append, solver=name, flow=flow)
        assert torch.equal(seen[0]["x"], x)
        for call in seen:
            assert close(call["denoised"], host(call["x"], call["sigma"].expand(2)))
        if name in ("heun", "ddim"):  # the last step is Euler's to σ = 0: the denoised image itself
            assert close(out, seen[-1]["denoised"])
    assert [call["i"] for call in seen] == list(range(6))


TOLD = (0.9, 0.95, 1.1, 0.8, 1.0)


class Net(nn.Module):
    """A network f(x, t) that hears its time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(self.conv(x) + (1 + t).log().reshape(-1, 1, 1, 1)) + 0.2 * x


def host_of(kind: str, net: Net) -> Any:
    """What a host makes of the network: model(x, sigma), its own idea of the time behind sigma included."""

    def edm(x: Tensor, sigma: Tensor) -> Tensor:
        return net(x, sigma)

    def flow(x: Tensor, sigma: Tensor) -> Tensor:
        return x - sigma.reshape(-1, 1, 1, 1) * net(x, sigma)

    def vp(x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.reshape(-1, 1, 1, 1)
        t = torch.tensor([VP().time(-math.log(float(v))) for v in sigma])
        return x - s * net(x / (1 + s**2).sqrt(), t)

    return {"edm": edm, "flow": flow, "vp": vp}[kind]


@pytest.mark.parametrize("solver", [DPMSolverMultistep(2), Heun(), SOLVERS["dpmpp-2s"]], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("kind", ["edm", "flow", "vp"])
def test_told_levels_mean_what_they_mean_in_our_loop(kind: str, solver: Any):
    net = Net()
    schedule = {"edm": EDM(0.02, 20.0), "flow": Flow(0.01, 0.98), "vp": VP()}[kind]
    denoiser = {"edm": EDMDenoiser, "flow": FlowVelocity, "vp": Epsilon}[kind](net)
    levels = LogSNR()(schedule, 5)
    told = levels.tell(TOLD)
    calibration = replace(random_calibration(told, solver, SHAPE), conditions={"prediction": "epsilon"})
    unit = 1.0 if kind == "flow" else levels[0].alpha
    x = start(levels[0].sigma)
    with torch.inference_mode():
        mine = sample(denoiser, x, told, solver, calibration.replay())
        given = sigmas_of(calibration)
        out = sample_steindiff(host_of(kind, net), x / unit, given, calibration=calibration, flow=kind == "flow")
        untold = random_calibration(levels, solver, SHAPE)
        other = sample_steindiff(host_of(kind, net), x / unit, given, calibration=untold, flow=kind == "flow")
    end = 1.0 if kind == "flow" else levels[-1].alpha
    assert close(out * end, mine.x)
    assert not close(out, other, 1e-3)


def test_told_levels_of_an_unknown_prediction_are_refused():
    """A v-prediction told another level cannot be expressed by its denoised image without its input scale."""
    levels = LogSNR()(VP(), 5).tell(TOLD)
    calibration = random_calibration(levels, DDIM(), SHAPE)
    with pytest.raises(ValueError, match="conditions do not say prediction = 'epsilon'"):
        sample_steindiff(Host(), start(20.0), sigmas_of(calibration), calibration=calibration)


QUICK = Recipe(seeds=range(6), steps=6, search=Search(iterations=1), rivals=(), to_zero=True)


@pytest.mark.parametrize("flow", [False, True])
def test_calibrate_under_inference_mode(flow: bool):
    """Weights made in inference mode, as ComfyUI's are, and a network that overwrites its input and its output."""
    with torch.inference_mode():
        host = Host(flow=flow)
        buffer = torch.empty(4, *SHAPE)

        def inplace(x: Tensor, sigma: Tensor) -> Tensor:
            found = buffer[: len(x)].copy_(host(x, sigma))
            x.zero_()
            return found

        low, high = (0.01, 1.0) if flow else (0.02, 20.0)
        model = hosted(HostDenoiser(inplace, flow=flow, conditions={"cfg": 3.0}), SHAPE, low, high)
        calibration = calibrate(model, 4, recipe=QUICK, batch=4)
        assert calibration.provenance["backward_passes"] == 0
        assert max(n for n, _ in host.calls) <= 4
        given = sigmas_of(calibration)
        x = start(float(given[0]))
        host.calls.clear()
        out = sample_steindiff(inplace, x, given, calibration=calibration, flow=flow, conditions={"cfg": 3.0})
        assert len(host.calls) == 4
        assert close(out, sample_steindiff(host, x, given, calibration=calibration, flow=flow))
        plain = sample_steindiff(host, x, given, flow=flow)
    assert out.isfinite().all()
    assert not torch.equal(out, plain)


def test_one_level_or_none_returns_the_state():
    x = start(1.0)
    assert sample_steindiff(Host(), x, torch.tensor([1.0])) is x
    assert sample_steindiff(Host(), x, torch.tensor([])) is x


def test_misuse_is_refused():
    levels = Karras()(EDM(0.02, 20.0), 5)
    calibration = random_calibration(levels, DPMSolverMultistep(2), SHAPE)
    host, given, x = Host(), sigmas_of(calibration), start(20.0)
    run = {"calibration": calibration}
    with pytest.raises(ValueError, match="solver: measured with DPMSolverMultistep"):
        sample_steindiff(host, x, given, solver="ddim", **run)
    with pytest.raises(ValueError, match=r"sigmas: 6 steps, .*the calibration is for 5 steps"):
        sample_steindiff(host, x, sigmas(6), **run)
    with pytest.raises(ValueError, match=r"shape: measured for \(3, 8, 8\), asked for \(3, 4, 4\)"):
        sample_steindiff(host, x[..., :4, :4], given, **run)
    with pytest.raises(ValueError, match="flow = True: the calibration was measured on EDM"):
        sample_steindiff(host, x, given / 100, flow=True, **run)
    with pytest.raises(ValueError, match=r"cfg: measured with None, asked for 7\.5"):
        sample_steindiff(host, x, given, conditions={"cfg": 7.5}, **run)
    with pytest.raises(ValueError, match=r"levels\[1\].*noise must strictly decrease"):
        sample_steindiff(host, x, given.flip(0))
    for bad in (math.nan, math.inf, -1.0):  # before, NaN and negative levels were taken for 0
        with pytest.raises(ValueError, match=rf"sigmas must be finite and >= 0, got \[20\.0, {bad}\]"):
            sample_steindiff(host, x, torch.tensor([20.0, bad]))
    with pytest.raises(ValueError, match=r"sigmas must be a list of noise levels \(n,\), got shape \(1, 6\)"):
        sample_steindiff(host, x, given[None])
    with pytest.raises(ValueError, match="sigma_min must be > 0 and below sigma_max"):
        hosted(HostDenoiser(host), SHAPE, 1.0, 0.5)
