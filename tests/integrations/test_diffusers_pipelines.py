"""Real pipelines with random weights: calibrate, save, load, sample; equal to our loop, and checked against misuse."""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from steindiff import sample
from steindiff.calibrating import ByEnergy, Recipe, SteinEnergy
from steindiff.calibration import Calibration
from steindiff.corrections.replay import Replay
from steindiff.grids import LogSNR
from steindiff.solvers import DDIM, DPMSolverMultistep, Heun, UniPCBh1, UniPCBh2

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import hosts  # noqa: E402
from diffusers.configuration_utils import register_to_config  # noqa: E402
from diffusers.models.unets.unet_2d import UNet2DOutput  # noqa: E402

from steindiff.integrations import diffusers as ours  # noqa: E402
from steindiff.integrations.diffusers import tiny  # noqa: E402
from steindiff.integrations.diffusers.capture import capture, network_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

BRIEF = Recipe(steps=6, probe_levels=2, probe_samples=2, tolerance=0)
QUICK = {"seeds": range(6), "recipe": BRIEF, "batch": 3}
SIZE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Case:
    """A pipeline, how to call it, and how often a step calls the network."""

    make: Callable[[], Any]
    call: dict[str, Any]
    calls: int = 1
    guidance: dict[str, Any] = field(default_factory=dict)


CASES = {
    "ddpm": Case(tiny.ddpm, {"batch_size": 2}, 1, {"copies": 1}),
    "ldm": Case(lambda: hosts.latent_diffusion()[0], {"batch_size": 2}, 1, {"copies": 1}),
    "sd": Case(
        tiny.stable_diffusion,
        {**tiny.embeddings(), **SIZE, "guidance_scale": 4.0},
        1,
        {"copies": 2, "conditional": 1, "weight": 4.0, "rescale": 0.0},
    ),
    "sd-rescaled": Case(
        tiny.stable_diffusion,
        {**tiny.embeddings(), **SIZE, "guidance_scale": 4.0, "guidance_rescale": 0.7},
        1,
        {"copies": 2, "weight": 4.0, "rescale": 0.7},
    ),
    "sd-unguided": Case(
        tiny.stable_diffusion, {**tiny.embeddings(), **SIZE, "guidance_scale": 1.0}, 1, {"copies": 1, "weight": 1.0}
    ),
    "sdxl": Case(
        tiny.stable_diffusion_xl,
        {**tiny.embeddings(pooled=True), **SIZE, "guidance_scale": 5.0},
        1,
        {"copies": 2, "conditional": 1, "weight": 5.0},
    ),
    "sd3": Case(
        lambda: hosts.stable_diffusion_3()[0],
        hosts.stable_diffusion_3()[1],
        1,
        {"copies": 2, "conditional": 1, "weight": 4.0},
    ),
    "dit": Case(
        tiny.dit, {"class_labels": [1, 2], "guidance_scale": 4.0}, 1, {"copies": 2, "conditional": 0, "weight": 4.0}
    ),
    "flux": Case(
        tiny.flux, {**tiny.embeddings(pooled=True, negative=False), **SIZE}, 1, {"copies": 1, "embedded": 3.5}
    ),
    "flux-cfg": Case(
        tiny.flux,
        {**tiny.embeddings(pooled=True), **SIZE, "true_cfg_scale": 2.5},
        2,
        {"copies": 2, "conditional": 0, "weight": 2.5},
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@functools.cache
def calibrated(name: str, nfe: int = 5) -> Calibration:
    """One calibration a pipeline, shared by the tests."""
    case = CASES[name]
    return ours.calibrate(case.make(), nfe=nfe, **QUICK, **case.call)


def run(pipe: Any, steps: int = 5, **call: Any) -> tuple[Tensor, Tensor, int]:
    """Run a pipeline; its first state, its last one, and how often it called its network."""
    states, calls = [], []
    scheduler, plain = pipe.scheduler, pipe.scheduler.step

    @functools.wraps(plain)
    def step(model_output, timestep, sample, *args, **kwargs):
        out = plain(model_output, timestep, sample, *args, **kwargs)
        states.extend([sample, out[0] if isinstance(out, tuple) else out.prev_sample])
        return out

    scheduler.step = step
    hook = network_of(pipe).register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        pipe(**{"num_inference_steps": steps, "generator": torch.Generator().manual_seed(3), **call})
    finally:
        hook.remove()
        del scheduler.step
    return states[0], states[-1], len(calls)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    assert float((a - b).norm() / b.norm()) < tolerance


# --- calibrate, save, load, sample --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_calibrate_save_load_sample(name: str, tmp_path):
    """The file goes round, sampling costs no call more than plain, and the result is that of our own loop."""
    case = CASES[name]
    calibrated(name).save(tmp_path / "calibration.json")
    calibration = Calibration.load(tmp_path / "calibration.json")
    assert {key: calibration.settings["guidance"][key] for key in case.guidance} == case.guidance
    assert any(calibration.rho), "random networks lose energy too: something must have been corrected"
    pipe = case.make()
    with ours.stabilize(pipe, calibration):
        first, last, calls = run(pipe, **case.call)
        assert calls == 5 * case.calls
        captured = capture(pipe, ours.scheduler_for(pipe.scheduler, calibration.solver), **case.call)
    # Some pipelines keep every state twice, some as tokens.
    layout = captured.network.layout
    x, end = layout.unpack(first[:2]), layout.unpack(last[:2])
    mine = sample(captured.denoiser(range(2)), x, calibration.levels, calibration.solver, Replay(calibration))
    assert mine.nfe == 5
    assert_close(end, mine.x)
    plain = sample(captured.denoiser(range(2)), x, calibration.levels, calibration.solver)
    assert float((plain.x - mine.x).norm() / mine.x.norm()) > 1e-3


@pytest.mark.parametrize("solver", [DPMSolverMultistep(3), UniPCBh2(2), Heun()], ids=lambda s: type(s).__name__)
def test_other_solvers(solver: Any):
    case = CASES["sd"]
    pipe = case.make()
    calibration = ours.calibrate(pipe, nfe=5, solver=solver, **QUICK, **case.call)
    with ours.stabilize(pipe, calibration):
        first, last, calls = run(pipe, calibration.levels.steps, **case.call)
    assert calls == calibration.nfe == 5
    captured = capture(pipe, ours.scheduler_for(pipe.scheduler, solver), **case.call)
    level = calibration.levels[0]
    x = first * level.alpha if isinstance(solver, Heun) else first
    mine = sample(captured.denoiser(range(2)), x, calibration.levels, solver, Replay(calibration))
    assert_close(last, mine.x)


def test_flux_with_unipc():
    case = CASES["flux"]
    pipe = case.make()
    calibration = ours.calibrate(pipe, nfe=4, solver=UniPCBh2(2), **QUICK, **case.call)
    with ours.stabilize(pipe, calibration):
        first, last, _ = run(pipe, 4, **case.call)
    captured = capture(pipe, ours.scheduler_for(pipe.scheduler, calibration.solver), **case.call)
    layout = captured.network.layout
    mine = sample(
        captured.denoiser(range(2)), layout.unpack(first), calibration.levels, calibration.solver, Replay(calibration)
    )
    assert_close(layout.unpack(last), mine.x)


def test_prompts(tmp_path):
    """Words in, through a real tokenizer and text encoder; other prompts afterwards; the whole pipeline saved."""
    pipe = tiny.stable_diffusion(prompts=True)
    prompts = ["a cat", "two dogs"]
    calibration = ours.calibrate(pipe, prompts, nfe=4, guidance_scale=3.0, **SIZE, **QUICK)
    assert calibration.settings["guidance"]["weight"] == 3.0
    ours.stabilize(pipe, calibration)
    call = {"prompt": "a red house", "guidance_scale": 3.0, **SIZE}
    _, last, calls = run(pipe, 4, **call)
    assert calls == 4
    pipe.save_pretrained(tmp_path)
    again = tiny.quiet(diffusers.StableDiffusionPipeline.from_pretrained(tmp_path))
    assert torch.equal(run(again, 4, **call)[1], last)
    # What a file cannot carry, the checks of network and guidance, comes back with one call.
    with ours.stabilize(again):
        assert torch.equal(run(again, 4, **call)[1], last)
        with pytest.raises(ValueError, match="guidance: measured with"):
            run(again, 4, **{**call, "guidance_scale": 9.0})
    again.unet = tiny.stable_diffusion(seed=1).unet
    with pytest.raises(ValueError, match="network: its weights differ by"):
        ours.stabilize(again)


def test_a_scheduler_alone_says_what_it_cannot_check(caplog):
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")):
        pipe.scheduler.set_timesteps(5)
        config = pipe.scheduler.config
    assert "cannot be checked" not in caplog.text
    alone = ours.SteinDPMSolverMultistepScheduler.from_config(config)
    alone.set_timesteps(5)
    alone.set_timesteps(5)
    assert caplog.text.count("cannot be checked by a scheduler alone") == 1


def test_nothing_to_install_is_refused():
    with pytest.raises(ValueError, match="calibration = None: the pipeline's scheduler carries none either"):
        ours.stabilize(tiny.ddpm())


def test_calibrate_leaves_the_pipeline_as_it_was():
    case = CASES["sd"]
    pipe = case.make()
    scheduler, config = pipe.scheduler, dict(pipe.config)
    state = torch.get_rng_state()
    ours.calibrate(pipe, nfe=4, **QUICK, **case.call)
    assert torch.equal(state, torch.get_rng_state())
    assert pipe.scheduler is scheduler
    assert dict(pipe.config) == config
    assert "step" not in vars(scheduler)
    assert all(parameter.requires_grad for parameter in pipe.unet.parameters())
    assert not network_of(pipe)._forward_hooks


def test_a_given_grid_needs_no_derivatives():
    case = CASES["sd"]
    calibration = ours.calibrate(case.make(), nfe=4, **{**QUICK, "recipe": replace(BRIEF, grid=LogSNR())}, **case.call)
    assert calibration.settings["backward_passes"] == 0
    assert calibration.levels.steps == 4


def test_reference_free_energy_without_guidance():
    calibration = ours.calibrate(
        tiny.ddpm(), nfe=4, batch_size=2, **{**QUICK, "recipe": replace(BRIEF, fit=ByEnergy(SteinEnergy()))}
    )
    assert any(calibration.rho)


def test_the_default_solver_is_the_pipelines_own():
    pipe = tiny.ddpm()
    pipe.scheduler = diffusers.UniPCMultistepScheduler.from_config(pipe.scheduler.config, solver_order=3)
    calibration = ours.calibrate(pipe, nfe=4, batch_size=1, **QUICK)
    assert calibration.solver == UniPCBh2(3)
    pipe.scheduler = diffusers.DPMSolverMultistepScheduler.from_config(
        pipe.scheduler.config, algorithm_type="sde-dpmsolver++"
    )
    assert ours.calibrate(pipe, nfe=4, batch_size=1, **QUICK).solver == DPMSolverMultistep(2)


def test_images_do_not_depend_on_their_batch():
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")):
        first, together, _ = run(pipe, **case.call)
        one = {name: value[1:] for name, value in case.call.items() if isinstance(value, Tensor)}
        _, alone, _ = run(pipe, **{**case.call, **one}, latents=first[1:])
    assert_close(alone, together[1:])


def test_img2img():
    """The calibrated steps that remain are corrected; strength decides how many."""
    case = CASES["sd"]
    text = case.make()
    pipe = tiny.quiet(diffusers.StableDiffusionImg2ImgPipeline(**text.components, requires_safety_checker=False))
    with ours.stabilize(pipe, calibrated("sd")):
        call = {name: value for name, value in case.call.items() if name not in SIZE}
        image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        _, last, calls = run(pipe, **call, image=image, strength=0.6)
    assert calls == 3
    assert last.isfinite().all()


# --- hosts --------------------------------------------------------------------------------------------------------


def test_offloaded_network():
    """Weights that come to the device for each call: the network is still recognised, called and calibrated."""
    accelerate = pytest.importorskip("accelerate")
    case = CASES["sd"]
    pipe = case.make()
    for module in (pipe.unet, pipe.vae):
        accelerate.cpu_offload(module, execution_device=torch.device("cpu"))
    assert next(pipe.unet.parameters()).is_meta
    calibration = ours.calibrate(pipe, nfe=5, **QUICK, **case.call)
    with ours.stabilize(pipe, calibration):
        offloaded = run(pipe, **case.call)[1]
    pipe = case.make()
    with ours.stabilize(pipe, calibration):
        assert_close(run(pipe, **case.call)[1], offloaded)


class Small(diffusers.ModelMixin, diffusers.ConfigMixin):
    """A network that is quickly compiled."""

    @register_to_config
    def __init__(self, sample_size: int = 8, in_channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(in_channels, in_channels, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, return_dict: bool = True) -> Any:
        out = torch.tanh(self.conv(sample)) * torch.cos(timestep / 1000).reshape(-1, 1, 1, 1)
        return UNet2DOutput(out) if return_dict else (out,)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_network():
    pipe = tiny.quiet(diffusers.DDPMPipeline(Small(), diffusers.DDPMScheduler()))
    call = {"batch_size": 2, **QUICK}
    expected = ours.calibrate(pipe, nfe=3, **call)
    with ours.stabilize(pipe, expected):
        plain = run(pipe, 3, batch_size=2)[1]
    pipe.unet = torch.compile(pipe.unet, backend="eager", dynamic=False)
    calibration = ours.calibrate(pipe, nfe=3, **call)
    for row, known in zip(calibration.rho, expected.rho, strict=True):
        assert row == pytest.approx(known, rel=1e-3)
    with ours.stabilize(pipe, expected):
        assert_close(run(pipe, 3, batch_size=2)[1], plain)


def test_half_precision_network():
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")):
        full = run(pipe, **case.call)[1]
    pipe = case.make().to(torch.bfloat16)
    call = {k: v.bfloat16() if isinstance(v, Tensor) else v for k, v in case.call.items()}
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    with ours.stabilize(pipe, calibrated("sd")):
        half = run(pipe, **call, latents=latents)[1]
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), full, 0.2)


@pytest.mark.parametrize("name", ["sd", "flux-cfg"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calibrate_in_half_precision(name: str, dtype: torch.dtype):
    """Guidance is still told apart, and the step still rebuilt, where rounding blurs both."""
    case = CASES[name]
    call = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in case.call.items()}
    pipe = case.make().to(dtype)
    calibration = ours.calibrate(pipe, nfe=4, **QUICK, **call)
    assert {key: calibration.settings["guidance"][key] for key in case.guidance} == case.guidance
    scale = "true_cfg_scale" if name == "flux-cfg" else "guidance_scale"
    with ours.stabilize(pipe, calibration):
        assert run(pipe, 4, **call)[1].isfinite().all()
        with pytest.raises(ValueError, match="guidance: measured with"):
            run(pipe, 4, **{**call, scale: 9.0})


# --- installing, saving, loading ----------------------------------------------------------------------------------


def test_stabilize_can_be_undone():
    pipe = CASES["ddpm"].make()
    before = pipe.scheduler
    plain = run(pipe, 20, batch_size=2)[1]
    installed = ours.stabilize(pipe, calibrated("ddpm"))
    assert pipe.scheduler is installed.scheduler
    assert pipe.scheduler is not before
    installed.undo()
    assert pipe.scheduler is before
    assert not network_of(pipe)._forward_hooks
    assert torch.equal(run(pipe, 20, batch_size=2)[1], plain)
    # Somebody else's scheduler is not touched.
    with ours.stabilize(pipe, calibrated("ddpm")):
        pipe.scheduler = other = diffusers.DDIMScheduler()
    assert pipe.scheduler is other


def test_a_copied_scheduler_still_checks_guidance():
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")):
        pipe.scheduler = copy.deepcopy(pipe.scheduler)
        with pytest.raises(ValueError, match="guidance"):
            run(pipe, **{**case.call, "guidance_scale": 9.0})


def test_save_and_load_a_whole_pipeline(tmp_path, monkeypatch):
    case = CASES["sd"]
    pipe = case.make()
    ours.stabilize(pipe, calibrated("sd"))
    expected = run(pipe, **case.call)[1]
    pipe.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["scheduler"] == ["steindiff.integrations.diffusers", "SteinDPMSolverMultistepScheduler"]
    parts = {"text_encoder": None, "tokenizer": None, "safety_checker": None, "feature_extractor": None}
    loaded = tiny.quiet(diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, **parts, image_encoder=None))
    assert type(loaded.scheduler) is ours.SteinDPMSolverMultistepScheduler
    assert torch.equal(run(loaded, **case.call)[1], expected)
    # The escape hatch for somebody without this library.
    stock = diffusers.DPMSolverMultistepScheduler.from_pretrained(tmp_path, subfolder="scheduler")
    stock.set_timesteps(5)
    # Without the import diffusers says what to do.
    monkeypatch.delitem(sys.modules, "steindiff.integrations.diffusers")
    with pytest.raises(ValueError, match=r"import steindiff\.integrations\.diffusers before"):
        diffusers.StableDiffusionPipeline.from_pretrained(tmp_path, **parts)


# --- misuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sd", "sd-rescaled", "sdxl", "dit", "flux-cfg"])
def test_another_guidance_is_refused(name: str):
    case = CASES[name]
    scale = "true_cfg_scale" if name == "flux-cfg" else "guidance_scale"
    pipe = case.make()
    with ours.stabilize(pipe, calibrated(name)):
        with pytest.raises(ValueError, match=r"guidance: measured with .*weight=.*this run is closest to weight = 9"):
            run(pipe, **{**case.call, scale: 9.0, **({"guidance_rescale": 0.0} if name == "sd-rescaled" else {})})
        with pytest.raises(ValueError, match="guidance: measured with"):
            run(pipe, **{**case.call, scale: 1.0})
        run(pipe, **case.call)


def test_another_rescaling_is_refused():
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")), pytest.raises(ValueError, match="guidance: measured with"):
        run(pipe, **case.call, guidance_rescale=0.5)


def test_guidance_where_there_was_none_is_refused():
    case = CASES["sd-unguided"]
    pipe = case.make()
    with (
        ours.stabilize(pipe, calibrated("sd-unguided")),
        pytest.raises(ValueError, match="measured with 1 conditions a sample, this run has 2"),
    ):
        run(pipe, **{**case.call, "guidance_scale": 4.0})


def test_another_embedded_guidance_is_refused():
    case = CASES["flux"]
    pipe = case.make()
    with (
        ours.stabilize(pipe, calibrated("flux")),
        pytest.raises(ValueError, match=r"guidance: measured with 3\.5 as an input, this run has 7\.0"),
    ):
        run(pipe, **case.call, guidance_scale=7.0)


@cases
def test_another_network_is_refused(case: Case):
    name = next(key for key, value in CASES.items() if value is case)
    other = case.make(seed=1)
    with pytest.raises(ValueError, match="network: its weights differ by"):
        ours.stabilize(other, calibrated(name))
    with pytest.raises(ValueError, match="network: the calibration was measured on"):
        ours.stabilize(tiny.dit() if name != "dit" else tiny.ddpm(), calibrated(name))


def test_a_network_swapped_afterwards_is_refused():
    case = CASES["sd"]
    pipe = case.make()
    ours.stabilize(pipe, calibrated("sd"))
    pipe.unet = case.make(seed=1).unet
    with pytest.raises(ValueError, match="network: not the one the calibration was installed for"):
        run(pipe, **case.call)


@pytest.mark.parametrize("name", ["ddpm", "sd", "flux"])
def test_another_number_of_steps_is_refused(name: str):
    case = CASES[name]
    pipe = case.make()
    with (
        ours.stabilize(pipe, calibrated(name)),
        pytest.raises(ValueError, match="num_inference_steps = 6: the calibration is for 5"),
    ):
        run(pipe, 6, **case.call)


@pytest.mark.parametrize("name", ["sd", "sdxl", "flux"])
def test_another_resolution_is_refused(name: str):
    case = CASES[name]
    pipe = case.make()
    with (
        ours.stabilize(pipe, calibrated(name)),
        pytest.raises(ValueError, match=r"the calibration is for \(4, 8, 8\) \(another resolution or model\)"),
    ):
        run(pipe, **{**case.call, "height": 32})


def test_calibrations_from_elsewhere_are_refused():
    calibration = calibrated("ddpm")
    bare = Calibration(calibration.solver, calibration.levels, calibration.basis, calibration.rho, calibration.gamma)
    with pytest.raises(ValueError, match="does not record its network and guidance"):
        ours.stabilize(tiny.ddpm(), bare)


@pytest.mark.parametrize("solver", [DDIM(), UniPCBh2(2, corrector=False)])
def test_solvers_without_a_scheduler_are_refused(solver: Any):
    with pytest.raises(ValueError, match=r"solver = .*allowed are DPMSolverMultistep"):
        ours.calibrate(tiny.ddpm(), nfe=4, solver=solver, **QUICK)


def test_heun_on_flow_is_refused():
    with pytest.raises(ValueError, match="Heun knows no flow matching"):
        ours.calibrate(tiny.flux(), nfe=5, solver=Heun(), **QUICK, **CASES["flux"].call)


def test_a_late_start_where_the_host_can_begin_there():
    effort = {**QUICK, "recipe": replace(BRIEF, start=0.03)}  # the samples of random networks are large
    with pytest.raises(ValueError, match=r"recipe.start = 0.03: allowed is None"):
        ours.calibrate(tiny.flux(), nfe=4, **effort, **CASES["flux"].call)
    pipe = tiny.ddpm()
    with ours.stabilize(pipe, ours.calibrate(pipe, nfe=4, batch_size=1, **effort)):
        pipe.scheduler.set_timesteps(4)
        assert pipe.scheduler.init_noise_sigma == pipe.scheduler._stein_levels[0].sigma < 1.0
    effort["recipe"] = replace(BRIEF, start=1e-4)
    early = ours.calibrate(pipe, nfe=4, batch_size=1, **effort)
    with pytest.raises(ValueError, match=r"it begins at sigma = .*, but pipelines begin with unit noise"):
        ours.stabilize(pipe, early)


def test_unipc_bh1_to_zero_is_refused():
    """diffusers' bh1 is NaN at σ = 0."""
    with pytest.raises(ValueError, match="final_sigmas_type"):
        ours.stabilize(tiny.ddpm(), ours.calibrate(tiny.ddpm(), nfe=4, solver=UniPCBh1(2), batch_size=1, **QUICK))


def test_pipelines_without_a_network_are_refused():
    class Empty:
        components: dict[str, Any] = {}  # noqa: RUF012
        scheduler = diffusers.DDPMScheduler()

    with pytest.raises(ValueError, match=r"pipe = Empty: has the networks \[\], need exactly one of unet, transformer"):
        ours.calibrate(Empty(), nfe=4)


class Loop(diffusers.DDPMPipeline):
    """A pipeline that does something of its own with the network."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 4, batch_size: int = 1):
        x = torch.randn(batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.predict(x, t), t, x).prev_sample


class Doubling(Loop):
    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return 2.0 * self.unet(x, t).sample


class Drifting(Loop):
    """A condition that depends on the time, as the residuals of a ControlNet do; as wide as the time embedding."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(x, t, class_labels=t.expand(len(x), 4 * 8) / 100).sample


class Inpainting(Loop):
    """More channels than the state has."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(torch.cat([x, torch.ones_like(x[:, :1])], 1), t).sample


@pytest.mark.parametrize(
    ("kind", "unet", "message"),
    [
        (Doubling, {}, "its step cannot be rebuilt from 1 network calls"),
        (Drifting, {"class_embed_type": "identity"}, "its network is off by .* in the second"),
        (Inpainting, {"in_channels": 4}, r"its network is given \(4, 8, 8\) for a state of \(3, 8, 8\)"),
    ],
)
def test_steps_that_cannot_be_rebuilt_are_refused(kind: type, unet: dict[str, Any], message: str):
    """A pipeline that does something else is never calibrated for the wrong thing."""
    pipe = tiny.quiet(kind(tiny.unet_unconditional(**unet), diffusers.DDPMScheduler()))
    with pytest.raises(ValueError, match=message):
        ours.calibrate(pipe, nfe=4, **QUICK)


def test_networks_that_take_turns_are_refused():
    parts = {"unet": tiny.unet_unconditional(), "unet_2": tiny.unet_unconditional()}
    pipe = SimpleNamespace(components=parts, scheduler=diffusers.DDPMScheduler())
    with pytest.raises(ValueError, match=r"has the networks \['unet', 'unet_2'\], need exactly one"):
        ours.calibrate(pipe, nfe=4, **QUICK)


def test_networks_in_training_mode_are_refused():
    pipe = tiny.dit()
    pipe.transformer.train()  # drops labels at random
    pipe.transformer.transformer_blocks[0].norm1.emb.class_embedder.dropout_prob = 1.0
    pipe.transformer.transformer_blocks[1].norm1.emb.class_embedder.dropout_prob = 0.5
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"cannot be rebuilt|in evaluation mode"):
        ours.calibrate(pipe, nfe=4, class_labels=[1, 2, 3, 4, 5, 6, 7, 8], guidance_scale=4.0, **QUICK)
