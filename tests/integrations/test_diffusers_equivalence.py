"""Step-for-step equality with the schedulers of the pinned diffusers, on one and the same grid.

Both sides call the same recording network. What is compared is every input the network was given over the whole
trajectory, and the final state: that is independent of where a scheduler draws the boundary of a step (UniPC's
`step` evaluates first and corrects afterwards; ours predicts, evaluates and corrects, the authors' boundary).

diffusers keeps sigmas in float32. Where it lets us put float64 there and keeps the state in float64, the difference
must be below 1e-9; DPMSolverMultistep rounds the state to float32 inside `step`, so there 1e-6 is what it computes.

Conventions that differ on purpose: we refuse a grid whose last two levels coincide (diffusers' Karras and lu grids
with `final_sigmas_type="sigma_min"` end with such a step, which does nothing), and UniPC-bh1 to σ = 0 is finite here
(there −∞ · 0 makes it NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from problems import FLOAT, Nonlinear
from steindiff import sample
from steindiff.denoisers import X0, EDMDenoiser, Epsilon, FlowVelocity, Preconditioned, Velocity
from steindiff.grids import Karras, LogSNR
from steindiff.levels import Level, Levels
from steindiff.schedules import EDM, Discrete, Schedule
from steindiff.solvers import (
    DDIM,
    DEIS,
    DPMSolverMultistep,
    DPMSolverSinglestep,
    Heun,
    Solver,
    UniPCBh1,
    UniPCBh2,
)

diffusers = pytest.importorskip("diffusers")

PREDICTIONS = {"epsilon": Epsilon, "v_prediction": Velocity, "sample": X0}
predictions = pytest.mark.parametrize("prediction", PREDICTIONS)


@dataclass(frozen=True)
class Table(Schedule):
    """The levels a scheduler uses, and nothing between them."""

    levels: tuple[Level, ...]
    t_min: float = 0.0
    t_max: float = 1000.0

    def __post_init__(self) -> None:
        """A table has no range of its own to check."""

    def level(self, t: float) -> Level:
        return min(self.levels, key=lambda level: abs(level.t - t))

    def time(self, lam: float) -> float:
        return min(self.levels[:-1], key=lambda level: abs(level.lam - lam)).t


class Recorder:
    """A network that remembers what it was asked."""

    def __init__(self) -> None:
        self.network = Nonlinear()
        self.inputs: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.network(x, t)


def start() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(7), dtype=FLOAT)


def in_double(scheduler) -> None:
    """Recompute a VP scheduler's sigmas in float64: same grid, no float32 rounding in its coefficients."""
    scheduler.sigmas = scheduler.sigmas.double()


def vp_levels(scheduler, every: int = 1) -> Levels:
    """The levels of a VP scheduler from its sigmas σ/α and timesteps."""
    times = [*scheduler.timesteps.tolist(), 0.0]
    sigmas = scheduler.sigmas.double().tolist()
    table = [Level(t, (1 + s * s) ** -0.5, s * (1 + s * s) ** -0.5) for t, s in zip(times, sigmas, strict=True)]
    return Levels(tuple(table[::every]), Table(tuple(table)))


def theirs(scheduler, x: Tensor) -> list[Tensor]:
    recorder = Recorder()
    for t in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, t)
        # Index-keyed schedulers are handed the tensor itself, as pipelines do.
        x = scheduler.step(recorder(scaled, t.expand(len(x))), t, x).prev_sample
    return [*recorder.inputs, x]


def ours(denoiser_class: type, solver: Solver, levels: Levels, x: Tensor) -> list[Tensor]:
    recorder = Recorder()
    out = sample(denoiser_class(recorder), x, levels, solver)
    return [*recorder.inputs, out.x]


def assert_equal(a: list[Tensor], b: list[Tensor], tolerance: float) -> None:
    assert len(a) == len(b)
    for mine, other in zip(a, b, strict=True):
        assert float((mine - other).norm() / other.norm()) < tolerance


@predictions
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("steps", [5, 8, 20])
@pytest.mark.parametrize(
    "config",
    [{}, {"final_sigmas_type": "sigma_min"}, {"use_karras_sigmas": True}, {"use_lu_lambdas": True}],
    ids=["linspace", "sigma_min", "karras", "lu"],
)
def test_dpm_solver_multistep(prediction: str, order: int, steps: int, config: dict):
    scheduler = diffusers.DPMSolverMultistepScheduler(solver_order=order, prediction_type=prediction, **config)
    scheduler.set_timesteps(steps)
    in_double(scheduler)
    mine = ours(PREDICTIONS[prediction], DPMSolverMultistep(order), vp_levels(scheduler), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-6)


def test_dpm_solver_multistep_in_their_own_precision():
    scheduler = diffusers.DPMSolverMultistepScheduler(solver_order=3)
    scheduler.set_timesteps(9)
    mine = ours(Epsilon, DPMSolverMultistep(3), vp_levels(scheduler), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-5)


def test_dpm_solver_multistep_without_lowered_order():
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=3, lower_order_final=False, final_sigmas_type="sigma_min"
    )
    scheduler.set_timesteps(7)
    in_double(scheduler)
    mine = ours(Epsilon, DPMSolverMultistep(3, lower_order_final=False), vp_levels(scheduler), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-6)


def test_dpm_solver_multistep_flow():
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=2, prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.set_timesteps(8)
    in_double(scheduler)
    sigmas, times = scheduler.sigmas.tolist(), [*scheduler.timesteps.tolist(), 0.0]
    table = tuple(Level(t, 1.0 - s, s) for t, s in zip(times, sigmas, strict=True))
    mine = ours(FlowVelocity, DPMSolverMultistep(2), Levels(table, Table(table)), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-6)


@predictions
@pytest.mark.parametrize("steps", [5, 10, 50])
def test_ddim(prediction: str, steps: int):
    scheduler = diffusers.DDIMScheduler(prediction_type=prediction, clip_sample=False)
    scheduler.set_timesteps(steps)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    bars = scheduler.alphas_cumprod.tolist()
    table = tuple(Level(float(t), bars[t] ** 0.5, (1 - bars[t]) ** 0.5) for t in scheduler.timesteps.tolist())
    levels = Levels((*table, Level(0.0, 1.0, 0.0)), Table(table))
    assert_equal(ours(PREDICTIONS[prediction], DDIM(), levels, start()), theirs(scheduler, start()), 1e-9)


@predictions
@pytest.mark.parametrize(("order", "steps"), [(2, 8), (2, 12), (3, 9), (3, 12)])
def test_dpm_solver_singlestep(prediction: str, order: int, steps: int):
    """diffusers spreads one singlestep over `order` entries of its grid; even in λ these are our inner stages."""
    scheduler = diffusers.DPMSolverSinglestepScheduler(
        solver_order=order,
        prediction_type=prediction,
        final_sigmas_type="sigma_min",
        lower_order_final=False,
    )
    scheduler.set_timesteps(steps)
    lams = torch.linspace(-4.0, 4.0, steps + 1, dtype=FLOAT)
    scheduler.sigmas = torch.exp(-lams)
    levels = vp_levels(scheduler, every=order)
    mine = ours(PREDICTIONS[prediction], DPMSolverSinglestep(order), levels, start())
    assert_equal(mine, theirs(scheduler, start()), 1e-9)


@predictions
@pytest.mark.parametrize("solver_type", ["bh1", "bh2"])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("steps", [2, 5, 8, 20])
@pytest.mark.parametrize("corrector", [True, False])
@pytest.mark.parametrize("final", ["zero", "sigma_min"])
def test_unipc(prediction: str, solver_type: str, order: int, steps: int, corrector: bool, final: str):
    scheduler = diffusers.UniPCMultistepScheduler(
        solver_order=order,
        solver_type=solver_type,
        prediction_type=prediction,
        final_sigmas_type=final,
        disable_corrector=[] if corrector else list(range(steps)),
    )
    scheduler.set_timesteps(steps)
    in_double(scheduler)
    if solver_type == "bh1" and final == "zero":
        scheduler.sigmas[-1] = 1e-7  # theirs is NaN at 0
    solver = {"bh1": UniPCBh1, "bh2": UniPCBh2}[solver_type](order, corrector=corrector)
    mine = ours(PREDICTIONS[prediction], solver, vp_levels(scheduler), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-9)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("steps", [4, 9])
def test_heun(prediction: str, steps: int):
    """HeunDiscrete works on x/α; our Heun works on x and must give α times that. It knows no x0 prediction."""
    scheduler = diffusers.HeunDiscreteScheduler(prediction_type=prediction)
    scheduler.set_timesteps(steps)
    scheduler.sigmas = scheduler.sigmas.double()
    sigmas = [*scheduler.sigmas[::2].tolist()]
    times = [*scheduler.timesteps[::2].tolist()]
    if len(sigmas) == len(times):
        sigmas.append(0.0)
    table = [Level(t, (1 + s * s) ** -0.5, s * (1 + s * s) ** -0.5) for t, s in zip([*times, 0.0], sigmas, strict=True)]
    levels = Levels(tuple(table), Table(tuple(table)))
    x = start() * sigmas[0]
    mine = ours(PREDICTIONS[prediction], Heun(), levels, x * levels[0].alpha)
    assert_equal(mine, theirs(scheduler, x), 1e-9)


@predictions
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("steps", [5, 8, 20])
def test_deis(prediction: str, order: int, steps: int):
    scheduler = diffusers.DEISMultistepScheduler(solver_order=order, prediction_type=prediction)
    scheduler.set_timesteps(steps)
    in_double(scheduler)
    mine = ours(PREDICTIONS[prediction], DEIS(order), vp_levels(scheduler), start())
    assert_equal(mine, theirs(scheduler, start()), 1e-9)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("steps", [5, 8, 20])
@pytest.mark.parametrize("spacing", ["karras", "exponential"])
def test_edm_dpm_solver_multistep(order: int, steps: int, spacing: str):
    """Here the grid is ours too: EDM's ρ = 7 and the log-SNR grid, and so is the preconditioning."""
    scheduler = diffusers.EDMDPMSolverMultistepScheduler(solver_order=order, sigma_schedule=spacing)
    scheduler.set_timesteps(steps)
    grid = {"karras": Karras(to_zero=True), "exponential": LogSNR(to_zero=True)}[spacing]
    levels = grid(EDM(0.002, 80.0), steps)
    assert [level.sigma for level in levels] == pytest.approx(scheduler.sigmas.tolist(), rel=1e-5)
    scheduler.sigmas = torch.tensor([level.sigma for level in levels], dtype=FLOAT)
    scheduler.timesteps = scheduler.precondition_noise(scheduler.sigmas[:-1])
    x = start() * 80.0
    recorder = Recorder()
    denoiser = EDMDenoiser(Preconditioned(recorder, 0.5, dtype=FLOAT))
    out = sample(denoiser, x, levels, DPMSolverMultistep(order)).x
    mine = [*recorder.inputs, out]
    # EDMDenoiser hands σ to networks in float32, as EDM networks expect it.
    assert_equal(mine, theirs(scheduler, x), 1e-6)


def test_discrete_schedule_is_theirs():
    scheduler = diffusers.DPMSolverMultistepScheduler()
    schedule = Discrete(tuple(scheduler.alphas_cumprod.double().tolist()))
    scheduler.set_timesteps(6)
    for t, sigma in zip(scheduler.timesteps.tolist(), scheduler.sigmas.tolist(), strict=False):
        assert schedule.level(t).ratio == pytest.approx(sigma, rel=1e-5)
