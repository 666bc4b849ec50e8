"""The behaviour diffusers expects of a scheduler, on every corrected class, and equality with our own loop."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from problems import random_calibration
from steindiff import sample
from steindiff.bases import natural_basis
from steindiff.calibration import Calibration
from steindiff.corrections.relaxation import Relaxation
from steindiff.corrections.replay import StepWeights
from steindiff.grids import Karras, LogSNR
from steindiff.levels import Levels
from steindiff.probes.hutchinson import Analytic
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh2

diffusers = pytest.importorskip("diffusers")

from steindiff.integrations import diffusers as ours  # noqa: E402

SHAPE = (3, 8, 8)


@dataclass(frozen=True)
class Host:
    """A corrected class beside its stock class, with the solver it runs."""

    name: str
    solver: Solver
    config: dict[str, Any] = field(default_factory=dict)
    edm: bool = False

    @property
    def stock(self) -> Any:
        return getattr(diffusers, self.name)

    @property
    def stein(self) -> Any:
        return getattr(ours, f"Stein{self.name}")

    def scale(self, scheduler: Any) -> float:
        """Standard deviation of the first state."""
        return float(scheduler.init_noise_sigma)


HOSTS = {
    "dpm": Host("DPMSolverMultistepScheduler", DPMSolverMultistep(2)),
    "dpm3": Host("DPMSolverMultistepScheduler", DPMSolverMultistep(3), {"solver_order": 3}),
    "unipc": Host("UniPCMultistepScheduler", UniPCBh2(2)),
    "unipc3": Host("UniPCMultistepScheduler", UniPCBh2(3), {"solver_order": 3}),
    "heun": Host("HeunDiscreteScheduler", Heun()),
    "edm": Host("EDMDPMSolverMultistepScheduler", DPMSolverMultistep(2), edm=True),
}
FOUR = [HOSTS[name] for name in ("dpm", "unipc", "heun", "edm")]
hosts = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS.keys())
four = pytest.mark.parametrize("host", FOUR, ids=lambda host: host.name)


def network(x: Tensor, t: Any) -> Tensor:
    """A smooth stand-in for a network, cheap and different for every channel and time."""
    time = torch.as_tensor(t).reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype)
    return torch.tanh(x.roll(1, -1) * 0.7 + 0.3 * x.flip(1)) + 0.1 * torch.cos(time / 300)


def start(batch: int = 2, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def loop(scheduler: Any, x: Tensor, model: Any = network, times: Any = None) -> list[Tensor]:
    """What a pipeline does."""
    states = []
    for t in scheduler.timesteps if times is None else times:
        x = scheduler.step(model(scheduler.scale_model_input(x, t), t), t, x, return_dict=False)[0]
        states.append(x)
    return states


TOLD = (1.0, 0.9, 1.1, 0.85, 0.95)
"""Factors of σ/α the network is told at each level."""


def calibration_for(
    scheduler: Any,
    solver: Solver,
    steps: int = 5,
    shape: tuple[int, ...] = SHAPE,
    told: Sequence[float] = (),
) -> Calibration:
    """A random calibration on a grid with fractional times."""
    # A run whose first and last level are those of the schedule, as usual.
    levels = LogSNR(to_zero=True)(ours.family_of(scheduler).schedule, steps)
    return random_calibration(levels.tell(told), solver, shape)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert float((a - b).norm() / b.norm()) < tolerance


# --- without a correction: the stock scheduler, bit for bit -------------------------------------------------------


@hosts
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_uncorrected_is_stock_bitwise(host: Host, steps: int):
    stock, stein = host.stock(**host.config), host.stein(**host.config)
    for scheduler in (stock, stein):
        scheduler.set_timesteps(steps)
    assert torch.equal(stock.timesteps, stein.timesteps)
    assert torch.equal(stock.sigmas, stein.sigmas)
    x = start() * host.scale(stock)
    for a, b in zip(loop(stock, x), loop(stein, x), strict=True):
        assert torch.equal(a, b)


VARIED = [
    ("dpm", {"prediction_type": "v_prediction"}),
    ("dpm", {"prediction_type": "sample"}),
    ("dpm", {"algorithm_type": "sde-dpmsolver++"}),
    ("dpm", {"thresholding": True, "sample_max_value": 1.5}),
    ("dpm", {"use_karras_sigmas": True}),
    ("dpm", {"use_lu_lambdas": True}),
    ("dpm", {"trained_betas": [0.001 * (i + 1) for i in range(100)], "num_train_timesteps": 100}),
    ("dpm", {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1}),
    ("dpm", {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}),
    ("dpm", {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}),
    ("dpm3", {"euler_at_final": True}),
    ("unipc", {"prediction_type": "v_prediction", "thresholding": True}),
    ("unipc", {"disable_corrector": [0, 2]}),
    ("unipc", {"predict_x0": False, "final_sigmas_type": "sigma_min"}),
    ("unipc", {"use_karras_sigmas": True}),
    ("unipc", {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}),
    ("heun", {"prediction_type": "sample", "clip_sample": True}),
    ("heun", {"prediction_type": "v_prediction", "use_karras_sigmas": True}),
    ("heun", {"trained_betas": [0.001 * (i + 1) for i in range(100)], "num_train_timesteps": 100}),
    ("edm", {"prediction_type": "v_prediction", "sigma_schedule": "exponential"}),
    ("edm", {"thresholding": True, "final_sigmas_type": "sigma_min"}),
]


@pytest.mark.parametrize(("name", "config"), VARIED)
def test_uncorrected_is_stock_bitwise_with_settings(name: str, config: dict[str, Any]):
    host = HOSTS[name]
    config = {**host.config, **config}
    stock, stein = host.stock(**config), host.stein(**config)
    results = []
    for scheduler in (stock, stein):
        scheduler.set_timesteps(6)
        torch.manual_seed(0)
        results.append(loop(scheduler, start() * host.scale(scheduler)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
GRIDS = [("dpm", {}), ("unipc", {}), ("heun", {}), ("edm", {}), ("dpm", FLOW), ("unipc", FLOW), ("unipc3", FLOW)]


@pytest.mark.parametrize(("name", "config"), GRIDS)
def test_empty_calibration_is_stock_bitwise_on_its_grid(name: str, config: dict[str, Any]):
    """An empty calibration still brings its grid: here the stock grid, so everything is as if there were none."""
    host = HOSTS[name]
    config = {**host.config, **config}
    stock = host.stock(**config)
    stock.set_timesteps(6)
    levels = ours.family_of(stock).levels(stock)
    stein = host.stein(**config, stein_calibration=Calibration.empty(host.solver, levels, natural_basis(SHAPE)))
    stein.set_timesteps(6)
    assert torch.equal(stein.timesteps, stock.timesteps)
    assert stein.timesteps.dtype == stock.timesteps.dtype
    assert torch.equal(stein.sigmas, stock.sigmas)
    x = start() * host.scale(stock)
    for a, b in zip(loop(stein, x), loop(stock, x), strict=True):
        assert torch.equal(a, b)


# --- with a calibration: our own loop -----------------------------------------------------------------------------


@hosts
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("told", [(), TOLD], ids=["its level", "told"])
def test_replay_equals_our_loop(host: Host, prediction: str, told: tuple[float, ...]):
    """Through `step`, network called by the host, against the engine calling it: same states, same number of calls."""
    bare = host.stein(**host.config, prediction_type=prediction)
    calibration = calibration_for(bare, host.solver, told=told)
    stein = host.stein(**host.config, prediction_type=prediction, stein_calibration=calibration)
    stein.set_timesteps(5)
    calls = []

    def counted(x: Tensor, t: Tensor) -> Tensor:
        calls.append(t)
        return network(x, t)

    levels = calibration.levels
    x = start() * levels[0].sigma
    unit = levels[0].alpha if host.name.startswith("Heun") else 1.0
    theirs = loop(stein, x / unit, counted)[-1]
    assert len(calls) == calibration.nfe
    mine = sample(ours.family_of(stein).denoiser(network), x, levels, host.solver, calibration.replay())
    assert mine.nfe == calibration.nfe
    assert_close(theirs, mine.x)
    plain = sample(ours.family_of(stein).denoiser(network), x, levels, host.solver)
    assert float((plain.x - mine.x).norm() / mine.x.norm()) > 0.01, "the correction must matter for this to be a test"


@pytest.mark.parametrize("name", ["dpm", "dpm3", "unipc", "unipc3"])
@pytest.mark.parametrize("told", [(), TOLD], ids=["its level", "told"])
def test_replay_on_flow_sigmas_equals_our_loop(name: str, told: tuple[float, ...]):
    host = HOSTS[name]
    config = {**host.config, **FLOW}
    calibration = calibration_for(host.stein(**config), host.solver, told=told)
    stein = host.stein(**config, stein_calibration=calibration)
    stein.set_timesteps(5)
    x = start() * calibration.levels[0].sigma
    mine = sample(ours.family_of(stein).denoiser(network), x, calibration.levels, host.solver, calibration.replay())
    assert_close(loop(stein, x)[-1], mine.x)


@hosts
def test_analytical_mode_equals_our_loop(host: Host):
    """No network inside the correction; γ per sample, so an image does not depend on its batch."""
    stein = host.stein(**host.config, stein_analytical=True)
    stein.set_timesteps(6)
    levels = ours.family_of(stein).levels(stein)
    # A state larger than its level allows, so that γ < 1 somewhere.
    x = 1.5 * start() * levels[0].sigma
    unit = levels[0].alpha if host.name.startswith("Heun") else 1.0
    relaxation = Relaxation(probe=Analytic(), per_sample=True, normalised=True)
    mine = sample(ours.family_of(stein).denoiser(network), x, levels, host.solver, relaxation)
    assert_close(loop(stein, x / unit)[-1], mine.x)
    stein.set_timesteps(6)
    assert_close(loop(stein, x[:1] / unit)[-1], mine.x[:1])


@four
def test_corrections_do_not_tie_samples_together(host: Host):
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.set_timesteps(5)
    x = start(3) * host.scale(stein)
    together = loop(stein, x)[-1]
    stein.set_timesteps(5)
    assert_close(loop(stein, x[1:2])[-1], together[1:2], 1e-6)


def test_unipc_trap():
    """Stock UniPC forgets what was done to the state `step` returned; the corrected class does not rely on it."""
    host = HOSTS["unipc"]
    ends = []
    for shift in (0.0, 1.0):
        scheduler = host.stock(prediction_type="sample")
        scheduler.set_timesteps(5)
        x = start()
        for i, t in enumerate(scheduler.timesteps):
            x = scheduler.step(start(seed=i + 10), t, x).prev_sample + shift * (i == 1)
        ends.append(x)
    assert torch.equal(*ends)
    calibration = calibration_for(host.stein(), host.solver)
    bare = [StepWeights()] * 5
    only_second = replace(calibration, steps=(bare[0], calibration.steps[1], *bare[2:]))
    results = []
    for used in (only_second, Calibration.empty(calibration.solver, calibration.levels, calibration.basis)):
        stein = host.stein(stein_calibration=used)
        stein.set_timesteps(5)
        results.append(loop(stein, start())[-1])
    assert float((results[0] - results[1]).norm() / results[1].norm()) > 1e-3


# --- configuration ------------------------------------------------------------------------------------------------


@four
def test_signatures_are_stock(host: Host):
    taken, settable = (list(inspect.signature(cls.set_timesteps).parameters) for cls in (host.stock, host.stein))
    assert settable[: len(taken)] == taken
    assert {"sigmas", "timesteps", "mu"} <= set(settable), "many pipelines pass their own whatever the scheduler"
    stock, stein = (list(inspect.signature(cls.step).parameters.values()) for cls in (host.stock, host.stein))
    assert stein[: len(stock)] == stock
    assert "generator" in {parameter.name for parameter in stein}, "DDPMPipeline passes one whatever the scheduler"
    names = list(inspect.signature(host.stock.__init__).parameters)
    assert list(inspect.signature(host.stein.__init__).parameters) == [*names, "stein_calibration", "stein_analytical"]


@four
def test_compatibles_are_stock(host: Host):
    assert {c.__name__ for c in host.stein().compatibles} >= {c.__name__ for c in host.stock().compatibles} - {"Self"}
    assert host.stock in host.stein().compatibles


@four
def test_config_round_trip(host: Host, tmp_path):
    stein = host.stein.from_config(host.stock(num_train_timesteps=500).config, stein_calibration=None)
    assert stein.config.num_train_timesteps == 500
    stein = host.stein.from_config(stein.config, stein_calibration=calibration_for(stein, host.solver))
    assert isinstance(stein.config.stein_calibration, dict)
    json.loads(stein.to_json_string())
    stein.save_pretrained(tmp_path)
    loaded = host.stein.from_pretrained(tmp_path)
    assert loaded.config.num_train_timesteps == 500
    assert dict(loaded.config)["stein_calibration"] == dict(stein.config)["stein_calibration"]
    results = []
    for scheduler in (stein, loaded):
        scheduler.set_timesteps(5)
        results.append(loop(scheduler, start())[-1])
    assert torch.equal(*results)
    # The escape hatch: the stock class reads our file, keeps what it does not know, and we find it again.
    stock = host.stock.from_pretrained(tmp_path)
    assert type(stock) is host.stock
    again = host.stein.from_config(stock.config)
    assert dict(again.config)["stein_calibration"] == dict(stein.config)["stein_calibration"]


@four
def test_positional_arguments_and_unknown_ones(host: Host):
    first, second = list(inspect.signature(host.stock.__init__).parameters.values())[1:3]
    scheduler = host.stein(first.default, second.default)
    assert scheduler.config[second.name] == second.default
    with pytest.raises(TypeError, match="surprise"):
        host.stein(surprise=1)


@four
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["deepcopy", "pickle"])
def test_copies_in_mid_run(host: Host, copied: Any):
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.set_timesteps(5)
    half = 2 * stein.order
    x = loop(stein, start(), times=stein.timesteps[:half])[-1]
    twin = copied(stein)
    ends = [loop(s, x, times=s.timesteps[half:])[-1] for s in (stein, twin)]
    assert torch.equal(*ends)


# --- running ------------------------------------------------------------------------------------------------------


@four
@pytest.mark.parametrize("mode", [{}, {"stein_analytical": True}, {"stein_calibration": True}])
def test_step_shape_dtype_determinism_and_return_type(host: Host, mode: dict[str, Any]):
    if "stein_calibration" in mode:
        mode = {"stein_calibration": calibration_for(host.stein(), host.solver)}
    x = start() * host.scale(host.stein())
    ends = []
    for _ in range(2):
        stein = host.stein(**mode)
        stein.set_timesteps(5)
        for t in stein.timesteps:
            out = stein.step(network(stein.scale_model_input(x, t), t), t, x)
            assert out.prev_sample.shape == x.shape
            assert out.prev_sample.dtype == x.dtype
        stein.set_timesteps(5)
        ends.append(loop(stein, x)[-1])
    assert torch.equal(*ends)


@four
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_and_close(host: Host, dtype: torch.dtype):
    calibration = calibration_for(host.stein(), host.solver)
    ends = []
    for kind in (torch.float32, dtype):
        stein = host.stein(stein_calibration=calibration)
        stein.set_timesteps(5)
        x = (start() * host.scale(stein)).to(kind)
        # The network runs in its own precision, as a pipeline's does.
        end = loop(stein, x, lambda x, t, kind=kind: network(x.to(kind), t))[-1]
        assert end.isfinite().all()
        ends.append(end)
    assert ends[1].dtype in (dtype, torch.float32)  # Heun and EDM promote, as stock does
    assert_close(ends[1].float(), ends[0], 0.1)


@four
def test_begin_index(host: Host):
    """img2img: a run that starts inside. The corrections of the remaining steps apply, each at its own level."""
    calibration = calibration_for(host.stein(), host.solver)
    stein = host.stein(stein_calibration=calibration)
    stein.set_timesteps(5)
    first = 2
    stein.set_begin_index(first * stein.order)
    times = stein.timesteps[first * stein.order :]
    x = stein.add_noise(0.3 * start(seed=3), start(), times[:1].repeat(2))
    end = loop(stein, x, times=times)[-1]
    levels = calibration.levels
    tail = Levels(levels[first:], levels.schedule)
    rest = replace(calibration, levels=tail, steps=calibration.steps[first:])
    unit = levels[first].alpha if host.name.startswith("Heun") else 1.0
    mine = sample(ours.family_of(stein).denoiser(network), x * unit, tail, host.solver, rest.replay())
    assert_close(end, mine.x)


@four
def test_add_noise_is_stock(host: Host):
    stock, stein = host.stock(), host.stein()
    for scheduler in (stock, stein):
        scheduler.set_timesteps(5)
    for t in stock.timesteps:
        times = t.repeat(2)
        assert torch.equal(*[s.add_noise(start(), start(seed=1), times) for s in (stock, stein)])


@pytest.mark.parametrize("name", ["dpm", "heun"])
def test_custom_timesteps(name: str):
    host = HOSTS[name]
    stock, stein = host.stock(), host.stein()
    for scheduler in (stock, stein):
        scheduler.set_timesteps(timesteps=[900, 600, 300, 100])
    assert torch.equal(loop(stock, start())[-1], loop(stein, start())[-1])


def test_custom_sigmas():
    config = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    stock, stein = HOSTS["unipc"].stock(**config), HOSTS["unipc"].stein(**config)
    for scheduler in (stock, stein):
        scheduler.set_timesteps(sigmas=np.array([1.0, 0.7, 0.4, 0.1]))
    assert torch.equal(loop(stock, start())[-1], loop(stein, start())[-1])


@pytest.mark.parametrize("host", [h for h in HOSTS.values() if not h.edm], ids=lambda h: repr(h.solver))
def test_full_loop_with_a_real_unet(host: Host):
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    ).eval()
    calibration = calibration_for(host.stein(**host.config), host.solver)
    stein = host.stein(**host.config, stein_calibration=calibration)
    stein.set_timesteps(5)
    levels = calibration.levels
    x = start() * levels[0].sigma
    unit = levels[0].alpha if host.name.startswith("Heun") else 1.0
    with torch.no_grad():
        theirs = loop(stein, x / unit, lambda x, t: unet(x, t).sample)[-1]
    denoiser = ours.denoiser(unet, stein)
    mine = sample(denoiser, x, levels, host.solver, calibration.replay())
    assert mine.network_calls == calibration.nfe
    assert_close(theirs, mine.x)


# --- what is refused ----------------------------------------------------------------------------------------------


@four
def test_other_step_counts_are_refused(host: Host):
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    with pytest.raises(ValueError, match="num_inference_steps = 7: the calibration is for 5"):
        stein.set_timesteps(7)


@four
def test_steps_a_pipeline_makes_are_not_used(host: Host, caplog: pytest.LogCaptureFixture):
    """Many pipelines pass their own sigmas; the calibration brings its levels, and one line says so."""
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.set_timesteps(5)
    expected = stein.sigmas
    five = np.linspace(1.0, 0.2, 5)
    for given in ({"sigmas": five}, {"timesteps": [900, 700, 500, 300, 100]}, {"sigmas": five, "timesteps": five}):
        stein.set_timesteps(**given, mu=0.7)
        assert torch.equal(stein.sigmas, expected)
    stein.set_timesteps(sigmas=five)
    assert caplog.text.count("the pipeline's sigmas are not used") == 1
    with pytest.raises(ValueError, match="num_inference_steps = 3: the calibration is for 5"):
        stein.set_timesteps(sigmas=[1.0, 0.5, 0.1])


@pytest.mark.parametrize("name", ["dpm", "unipc"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_steps_a_pipeline_makes_for_flow_matching(name: str, dynamic: bool):
    """Without a calibration they are used where the stock class can use them, else counted; never a traceback."""
    host = HOSTS[name]
    stein = host.stein(**FLOW, use_dynamic_shifting=dynamic, time_shift_type="exponential")
    four = [1.0, 0.7, 0.4, 0.1]
    for given in ({"sigmas": four}, {"sigmas": four, "timesteps": [1000 * s for s in four]}):
        stein.set_timesteps(**given, mu=0.5)
        assert len(stein.timesteps) == 4
        assert loop(stein, start())[-1].isfinite().all()
    if name == "dpm":
        stein.set_timesteps(timesteps=[1000, 700, 400, 100], mu=0.5)
        assert len(stein.timesteps) == 4


def test_unknown_arguments_of_set_timesteps_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"original_inference_steps.*this pipeline needs a scheduler of its own"):
        HOSTS["dpm"].stein().set_timesteps(4, original_inference_steps=50)
    with pytest.raises(ValueError, match="timesteps must be left out"):
        HOSTS["edm"].stein().set_timesteps(timesteps=[900, 600])


def test_eta_is_refused_in_a_sentence():
    stein = HOSTS["dpm"].stein()
    stein.set_timesteps(4)
    with pytest.raises(ValueError, match="eta: only DDIM"):
        stein.step(start(), stein.timesteps[0], start(), eta=0.5)


@four
def test_other_resolutions_are_refused(host: Host):
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.set_timesteps(5)
    with pytest.raises(ValueError, match=r"shape \(3, 16, 16\), but the calibration is for \(3, 8, 8\)"):
        loop(stein, start(shape=(3, 16, 16)))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("dpm", {"solver_order": 3}, r"solver: measured with DPMSolverMultistep\(nominal_order=2"),
        ("dpm", {"lower_order_final": False}, "solver: measured with"),
        (
            "dpm",
            {"algorithm_type": "sde-dpmsolver++"},
            r"algorithm_type = 'sde-dpmsolver\+\+'.*only 'dpm",
        ),
        ("dpm", {"solver_type": "heun"}, "solver_type = 'heun'.*allows only 'midpoint'"),
        ("dpm", {"final_sigmas_type": "sigma_min"}, "final_sigmas_type = 'sigma_min'.*measured with 'zero'"),
        ("dpm", {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}, "but this FlowMatching scheduler"),
        ("dpm", {"beta_schedule": "scaled_linear"}, r"at t = .* but this VariancePreserving scheduler has"),
        ("unipc", {"disable_corrector": [1]}, r"disable_corrector = \[1\].*allows only \[\]"),
        ("unipc", {"solver_type": "bh1"}, "final_sigmas_type = 'zero'.*allows only 'sigma_min'"),
        ("unipc", {"solver_type": "bh1", "final_sigmas_type": "sigma_min"}, "solver: measured with UniPCBh2"),
        ("unipc", {"predict_x0": False}, "predict_x0 = False.*allows only True"),
        ("heun", {"stein_analytical": True}, "stein_analytical = True: not together with stein_calibration"),
    ],
)
def test_calibrations_of_another_solver_or_process_are_refused(name: str, config: dict[str, Any], message: str):
    host = HOSTS[name]
    with pytest.raises(ValueError, match=message):
        host.stein(**config, stein_calibration=calibration_for(host.stein(), host.solver))


def test_a_calibration_of_another_class_is_refused():
    host = HOSTS["dpm"]
    with pytest.raises(ValueError, match="but this EDMFamily scheduler has alpha = 1, sigma = 157"):
        HOSTS["edm"].stein(stein_calibration=calibration_for(host.stein(), host.solver))


@four
def test_a_number_in_a_configuration_takes_no_memory(host: Host):
    """Before, a solver order of 2³¹ took 17 GB: stock schedulers make a list of that length."""
    for key in {"num_train_timesteps", "solver_order"} & set(host.stock().config):
        with pytest.raises(ValueError, match=rf"{key} must be >= .* and <= 1e\+06, got 2147483648"):
            host.stein.from_config({key: 2**31})


def test_a_damaged_configuration_is_refused(tmp_path):
    host = HOSTS["dpm"]
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.save_pretrained(tmp_path)
    file = tmp_path / "scheduler_config.json"
    file.write_text(file.read_text().replace('"nfe": 5', '"nfe": 6'))
    with pytest.raises(ValueError, match="sha256 does not match"):
        host.stein.from_pretrained(tmp_path)


def test_stochastic_variants_are_refused_in_analytical_mode():
    with pytest.raises(ValueError, match="algorithm_type"):
        HOSTS["dpm"].stein(algorithm_type="sde-dpmsolver++", stein_analytical=True)


def test_unknown_schedulers_are_refused():
    with pytest.raises(ValueError, match="scheduler = VQDiffusionScheduler: its time and noise levels are not known"):
        ours.family_of(diffusers.VQDiffusionScheduler(num_vec_classes=8))


def test_clipped_cosine_schedules_start_where_stock_does():
    """DeepFloyd's configuration: without the clip σ/α would start at 20,000."""
    stock = diffusers.DPMSolverMultistepScheduler(beta_schedule="squaredcos_cap_v2", lambda_min_clipped=-5.1)
    stock.set_timesteps(20)
    schedule = ours.family_of(stock).schedule
    assert schedule.level(schedule.t_max).lam == pytest.approx(-5.1, abs=1e-6)
    assert schedule.ratio_max == pytest.approx(float(stock.sigmas[0]), rel=0.05)


def test_karras_grid_of_the_family_is_the_stock_grid():
    """Our EDM grid on the family's schedule is what `use_karras_sigmas` gives."""
    stock = diffusers.HeunDiscreteScheduler(use_karras_sigmas=True)
    stock.set_timesteps(6)
    mine = Karras()(ours.family_of(stock).schedule, 6)
    assert [level.ratio for level in mine] == pytest.approx(
        [level.ratio for level in ours.family_of(stock).levels(stock)], rel=1e-4
    )


# --- configurations of other families ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpm", "unipc"])
def test_the_configuration_of_a_flow_scheduler_gives_flow_matching(name: str, tmp_path):
    host, flow = HOSTS[name], diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    flow.save_pretrained(tmp_path)
    for stein in (host.stein.from_config(flow.config), host.stein.from_pretrained(tmp_path)):
        assert stein.config.use_flow_sigmas
        assert stein.config.prediction_type == "flow_prediction"
        assert stein.config.flow_shift == 3.0
    calibration = calibration_for(stein, host.solver)
    again = host.stein.from_config(flow.config, stein_calibration=calibration)
    again.set_timesteps(5)
    assert again.timesteps.tolist() == pytest.approx([1000 * level.t for level in calibration.levels[:-1]])


@pytest.mark.parametrize("name", ["heun", "edm"])
def test_the_configuration_of_a_flow_scheduler_is_refused_where_there_is_no_flow_matching(name: str):
    with pytest.raises(ValueError, match="config must not be a FlowMatch one"):
        HOSTS[name].stein.from_config(diffusers.FlowMatchEulerDiscreteScheduler().config)


SOURCES = [
    diffusers.DDPMScheduler(),
    diffusers.PNDMScheduler(1000, 0.00085, 0.012, "scaled_linear"),
    diffusers.EulerDiscreteScheduler(1000, 0.00085, 0.012, "scaled_linear"),
    diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2"),
    diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
@pytest.mark.parametrize("solver", [DPMSolverMultistep(2), UniPCBh2(2), Heun()], ids=lambda s: type(s).__name__)
def test_a_scheduler_for_a_solver_keeps_the_forward_process(source: Any, solver: Solver):
    """`from_config` drops what was a default or positional in the source; the process must not change with it."""
    stein = ours.scheduler_for(source, solver)
    expected = source.alphas_cumprod.double()[:-1]
    assert torch.allclose(stein.alphas_cumprod.double()[:-1], expected, rtol=1e-2, atol=1e-6)


# --- sets of calibrations ------------------------------------------------------------------------------------------


@four
def test_a_set_is_chosen_from_by_the_number_of_steps(host: Host, tmp_path):
    made = [calibration_for(host.stein(), host.solver, steps) for steps in (4, 6)]
    ours.CalibrationSet(tuple(made)).save(tmp_path / "set.json")
    stein = host.stein(stein_calibration=ours.CalibrationSet.load(tmp_path / "set.json"))
    stein.save_pretrained(tmp_path)
    again = host.stein.from_pretrained(tmp_path)
    for steps, calibration in zip((6, 4, 6), (made[1], made[0], made[1]), strict=True):
        ends = []
        for scheduler in (host.stein(stein_calibration=calibration), stein, again):
            scheduler.set_timesteps(steps)
            ends.append(loop(scheduler, start())[-1])
        assert torch.equal(ends[0], ends[1])
        assert torch.equal(ends[0], ends[2])
    with pytest.raises(ValueError, match="num_inference_steps = 5: the calibration is for 4 or 6"):
        stein.set_timesteps(5)


def test_what_a_set_must_be():
    host = HOSTS["dpm"]
    one, other = calibration_for(host.stein(), host.solver), calibration_for(host.stein(), DPMSolverMultistep(3))
    with pytest.raises(ValueError, match="calibrations must hold at least one"):
        ours.CalibrationSet(())
    with pytest.raises(ValueError, match="must share solver and shape: solver: measured with"):
        ours.CalibrationSet((one, other))
    guided = [replace(one, conditions={"guidance": scale}) for scale in (2.0, 5.0)]
    both = ours.CalibrationSet(tuple(guided))
    assert both.choose(nfe=5, guidance=5.0) == guided[1]
    with pytest.raises(ValueError, match="guidance must be one of 2, 5, got 3"):
        both.choose(guidance=3.0)
    with pytest.raises(ValueError, match=r"several fit \(nfe 5 at guidance 2, nfe 5 at guidance 5\)"):
        both.choose(nfe=5)
    with pytest.raises(ValueError, match="nfe must be one of 5, got 8"):
        both.choose(nfe=8)
    damaged = both.to_dict()
    damaged["calibrations"] = damaged["calibrations"][:1]
    with pytest.raises(ValueError, match="sha256 does not match"):
        ours.CalibrationSet.from_dict(damaged)
    assert ours.CalibrationSet.from_dict(one.to_dict()).calibrations[0].to_dict() == one.to_dict()


# --- runs that begin inside, as img2img ----------------------------------------------------------------------------


def with_random_restarts(calibration: Calibration) -> Calibration:
    """Weights of its own for every later start, with no more differences than such a run has images for."""

    def restarted(i: int, weights: StepWeights) -> StepWeights:
        starts = [replace(weights, tau=weights.tau[: i - j], gamma=0.7 + 0.02 * j) for j in range(1, i + 1)]
        return replace(weights, restarted=tuple(starts))

    return replace(calibration, steps=tuple(restarted(i, weights) for i, weights in enumerate(calibration.steps)))


@four
@pytest.mark.parametrize("first", [1, 3, 4])
def test_restarts_equal_our_loop(host: Host, first: int):
    """The steps of a run that begins inside have weights of their own."""
    calibration = with_random_restarts(calibration_for(host.stein(), host.solver, told=TOLD))
    calibration = Calibration.from_dict(calibration.to_dict())
    stein = host.stein(stein_calibration=calibration)
    stein.set_timesteps(5)
    stein.set_begin_index(first * stein.order)
    times = stein.timesteps[first * stein.order :]
    x = stein.add_noise(0.3 * start(seed=3), start(), times[:1].repeat(2))
    end = loop(stein, x, times=times)[-1]
    levels = calibration.levels
    tail = Levels(levels[first:], levels.schedule)
    rest = replace(
        calibration, levels=tail, steps=tuple(step.restarted[first - 1] for step in calibration.steps[first:])
    )
    unit = levels[first].alpha if host.name.startswith("Heun") else 1.0
    mine = sample(ours.family_of(stein).denoiser(network), x * unit, tail, host.solver, rest.replay())
    assert_close(end, mine.x)


# --- what is shown -------------------------------------------------------------------------------------------------


@four
def test_the_description_is_short(host: Host):
    betas = {} if host.edm else {"trained_betas": [0.001 * (i + 1) for i in range(100)], "num_train_timesteps": 100}
    stein = host.stein(**betas, stein_calibration=calibration_for(host.stein(**betas), host.solver))
    assert len(repr(stein).splitlines()) < 60
    assert f"for 5 steps of {type(host.solver).__name__}" in repr(stein)
    assert len(str(host.stein()).splitlines()) < 60


def test_pushed_to_the_hub_and_back(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """What would be uploaded is what `from_pretrained` reads."""
    from diffusers.utils import hub_utils

    sent: dict[str, bytes] = {}

    def upload(self: Any, working_dir: Any, repo_id: str, **_: Any) -> None:
        sent.update({file.name: file.read_bytes() for file in Path(working_dir).iterdir()})

    monkeypatch.setattr(hub_utils, "create_repo", lambda repo_id, **_: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(hub_utils.PushToHubMixin, "_upload_folder", upload)
    card = SimpleNamespace(save=lambda path: None)  # the real one is asked for over the network, again and again
    monkeypatch.setattr(hub_utils, "load_or_create_model_card", lambda *_, **__: card)
    monkeypatch.setattr(hub_utils, "populate_model_card", lambda card: card)
    host = HOSTS["dpm"]
    stein = host.stein(stein_calibration=calibration_for(host.stein(), host.solver))
    stein.push_to_hub("somebody/scheduler", token="none")
    (tmp_path / "scheduler_config.json").write_bytes(sent["scheduler_config.json"])
    ends = []
    for scheduler in (stein, host.stein.from_pretrained(tmp_path)):
        scheduler.set_timesteps(5)
        ends.append(loop(scheduler, start())[-1])
    assert torch.equal(*ends)
