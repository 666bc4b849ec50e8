"""Real pipelines with random weights: calibrate, save, load, sample; equal to our loop, and checked against misuse."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from steindiff import sample
from steindiff.calibrating import FEW_CALLS, Progress, Recipe
from steindiff.calibration import Calibration
from steindiff.corrections.replay import Replay
from steindiff.grids import LogSNR
from steindiff.levels import Levels
from steindiff.search import Search
from steindiff.solvers import DDIM, DPMSolverMultistep, Heun, UniPCBh1, UniPCBh2
from steindiff.stein import ByEnergy, SteinEnergy

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import hosts  # noqa: E402
import tiny  # noqa: E402
from diffusers.configuration_utils import register_to_config  # noqa: E402
from diffusers.models.unets.unet_2d import UNet2DOutput  # noqa: E402

from steindiff.integrations import diffusers as ours  # noqa: E402
from steindiff.integrations.diffusers import pipelines  # noqa: E402
from steindiff.integrations.diffusers.capture import capture, network_of  # noqa: E402
from steindiff.integrations.diffusers.pipelines import own_grid  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

BRIEF = Recipe(seeds=range(6), steps=6, search=None, rivals=())
QUICK = {"recipe": BRIEF, "batch": 3, "progress": False}
SIZE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Case:
    """A pipeline, how to call it, and how often a step calls the network."""

    make: Callable[[], Any]
    call: dict[str, Any]
    calls: int = 1
    guidance: dict[str, Any] = field(default_factory=dict)


def seeded(build: Callable[[], tuple[Any, Any]]) -> Callable[..., Any]:
    """A pipeline of the support matrix, with weights of a seed."""

    def make(seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return build()[0]

    return make


CASES = {
    "ddpm": Case(tiny.ddpm, {"batch_size": 2}, 1, {"copies": 1}),
    "ldm": Case(seeded(hosts.latent_diffusion), {"batch_size": 2}, 1, {"copies": 1}),
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
        seeded(hosts.stable_diffusion_3),
        {**hosts.stable_diffusion_3()[1], "output_type": "latent"},
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
CASES["controlnet"] = Case(
    seeded(hosts.stable_diffusion_xl_controlnet),
    {**hosts.stable_diffusion_xl_controlnet()[1], "output_type": "latent"},
    1,
    {"copies": 2, "weight": 5.0},
)
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
    assert {key: calibration.conditions["guidance"][key] for key in case.guidance} == case.guidance
    assert calibration.corrects, "random networks lose energy too: something must have been corrected"
    pipe = case.make()
    with ours.stabilize(pipe, calibration):
        first, last, calls = run(pipe, **case.call)
        assert calls == 5 * case.calls
        captured = capture(pipe, ours.scheduler_for(pipe.scheduler, calibration.solver), **case.call)
    # Some pipelines keep every state twice, some as tokens.
    layout = captured.network.layout
    x, end = layout.unpack(first[:2]), layout.unpack(last[:2])
    mine = sample(captured.denoiser(range(2)), x, calibration.levels, calibration.solver, calibration.replay())
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
    mine = sample(captured.denoiser(range(2)), x, calibration.levels, solver, calibration.replay())
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
        captured.denoiser(range(2)), layout.unpack(first), calibration.levels, calibration.solver, calibration.replay()
    )
    assert_close(layout.unpack(last), mine.x)


def test_prompts(tmp_path):
    """Words in, through a real tokenizer and text encoder; other prompts afterwards; the whole pipeline saved."""
    pipe = tiny.stable_diffusion(prompts=True)
    prompts = ["a cat", "two dogs"]
    calibration = ours.calibrate(pipe, prompts, nfe=4, guidance_scale=3.0, **SIZE, **QUICK)
    assert calibration.conditions["guidance"]["weight"] == 3.0
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
    with pytest.raises(ValueError, match="calibration = None: the pipeline's scheduler carries none"):
        ours.stabilize(tiny.ddpm())


@pytest.mark.parametrize("check", [True, False])
def test_the_path_of_a_calibration_is_not_a_calibration(check: bool):
    with pytest.raises(
        TypeError, match=r"must be a Calibration, got 'mine.json'; of a file write Calibration.load\(path\)"
    ):
        ours.stabilize(tiny.ddpm(), "mine.json", check=check)


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


def test_calibration_takes_no_derivatives():
    case = CASES["sd"]
    calibration = ours.calibrate(case.make(), nfe=4, **{**QUICK, "recipe": replace(BRIEF, grid=LogSNR())}, **case.call)
    assert calibration.provenance["backward_passes"] == 0
    assert calibration.levels.steps == 4


def test_reference_free_energy_without_guidance():
    recipe = replace(BRIEF, fit=ByEnergy(SteinEnergy()))
    assert ours.calibrate(tiny.ddpm(), nfe=4, batch_size=2, **{**QUICK, "recipe": recipe}).corrects


SEARCHED = Recipe(seeds=range(6), steps=6, search=Search(iterations=1), rivals=(LogSNR(),))


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_the_pipelines_own_levels_must_be_beaten(name: str):
    """The grid of the pipeline's own scheduler, its shift included, is among the rivals; what wins is kept."""
    case = CASES[name]
    pipe = case.make()
    calibration = ours.calibrate(pipe, nfe=4, **{**QUICK, "recipe": SEARCHED}, **case.call)
    mismatch = calibration.provenance["mismatch"]
    assert {"plain, LogSNR", "plain, Explicit", "searched"} <= set(mismatch)
    assert mismatch[calibration.provenance["kept"]] <= mismatch["plain, Explicit"]
    with ours.stabilize(pipe, calibration):
        first, last, calls = run(pipe, 4, **case.call)
    assert calls == 4
    captured = capture(pipe, ours.scheduler_for(pipe.scheduler, calibration.solver), **case.call)
    layout = captured.network.layout
    mine = sample(
        captured.denoiser(range(2)), layout.unpack(first), calibration.levels, calibration.solver, calibration.replay()
    )
    assert_close(layout.unpack(last), mine.x)


def test_own_levels_are_those_of_the_pipeline():
    case = CASES["flux"]
    pipe = case.make()
    (grid,) = own_grid(pipe, 4, case.call)
    pipe(**case.call, num_inference_steps=4)
    assert grid.points[1:] == pytest.approx(pipe.scheduler.sigmas[1:-1].tolist(), abs=1e-6)
    assert grid.points[0] == 0.999
    assert own_grid(pipe, 4, {}) == (), "a pipeline that does not run says nothing"


def test_progress_is_told_and_stopping_keeps_the_best():
    case, seen = CASES["sd"], []

    def told(progress: Progress) -> bool | None:
        seen.append(progress)
        return progress.stage == "reference" or progress.done < 4

    calibration = ours.calibrate(case.make(), nfe=4, **{**QUICK, "recipe": SEARCHED, "progress": told}, **case.call)
    assert calibration.provenance["stopped"]
    assert not any(step.restarted for step in calibration.steps)
    assert [p.stage for p in seen[:6]] == ["reference"] * 6
    assert seen[5].done == seen[5].total == 6


def test_the_bar_reaches_its_end(monkeypatch: pytest.MonkeyPatch):
    drawn: list[float] = []
    totals: list[float] = []

    @contextmanager
    def bar(title: str, total: float, *, shown: bool) -> Any:
        assert (title, shown) == ("calibrating", True)
        totals.append(total)
        yield drawn.append

    monkeypatch.setattr(pipelines, "bar", bar)
    for nfe in (4, [3, 4]):
        drawn.clear()
        ours.calibrate(tiny.ddpm(), nfe=nfe, **{**QUICK, "progress": True}, batch_size=2)
        assert min(drawn) >= 0.0
        assert sum(drawn) == pytest.approx(totals[-1])


def test_a_large_trajectory_is_announced(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    case = CASES["sd"]
    monkeypatch.setattr(pipelines, "SAID", 1000)
    ours.calibrate(case.make(), nfe=4, **QUICK, **case.call)
    assert "the fine trajectory of 6 samples takes" in caplog.text


def test_no_call_has_more_samples_than_the_batch():
    case, rows = CASES["sd"], []
    pipe = case.make()
    four = {k: torch.cat([v, v]) if isinstance(v, Tensor) else v for k, v in case.call.items()}
    pipe.unet.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["sample"])), with_kwargs=True
    )
    ours.calibrate(pipe, nfe=4, **{**QUICK, "batch": 2}, **four)
    assert max(rows) == 2 * 2, "two conditions a sample"


def test_samples_are_compared_within_their_prompt():
    """Prompts are dealt out by seed, so a prompt is the condition within which samples vary."""
    case, made = CASES["sd"], []
    original = pipelines.reference_run

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(original(model, *args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "reference_run", watched)
        ours.calibrate(case.make(), nfe=4, **QUICK, **case.call)
    assert made[0].groups().index.tolist() == [0, 1, 0, 1, 0, 1]


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


@functools.cache
def eight_steps() -> Calibration:
    case = CASES["sd"]
    made = ours.calibrate(case.make(), nfe=8, **QUICK, **case.call)
    return Calibration.from_dict(made.to_dict())  # rounded, as a scheduler keeps it


@pytest.mark.parametrize(("strength", "remaining"), [(0.25, 2), (0.5, 4), (0.9, 7)])
def test_img2img_corrects_every_step_that_remains(strength: float, remaining: int, monkeypatch: pytest.MonkeyPatch):
    case, calibration = CASES["sd"], eight_steps()
    text = case.make()
    pipe = tiny.quiet(diffusers.StableDiffusionImg2ImgPipeline(**text.components, requires_safety_checker=False))
    call = {name: value for name, value in case.call.items() if name not in SIZE}
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    corrected, apply = [], Replay.apply

    def watched(self: Replay, i: int, x: Tensor, candidate: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = apply(self, i, x, candidate, *args, **kwargs)
        corrected.append(made is not candidate)
        return made

    monkeypatch.setattr(Replay, "apply", watched)
    with ours.stabilize(pipe, calibration):
        first, last, calls = run(pipe, 8, **call, image=image, strength=strength)
    assert calls == remaining
    assert corrected == [True] * remaining
    # The same steps in our own loop: the first ones with the weights of a run that begins there.
    start = 8 - remaining
    tail = Levels(calibration.levels[start:], calibration.levels.schedule)
    steps = tuple(step.restarted[start - 1] for step in calibration.steps[start:])
    rest = replace(calibration, levels=tail, steps=steps)
    captured = capture(text, ours.scheduler_for(text.scheduler, calibration.solver), **case.call)
    mine = sample(captured.denoiser(range(2)), first, tail, calibration.solver, rest.replay())
    assert_close(last, mine.x, 5e-5)  # weights fitted to six samples of a random network enlarge rounding


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
    for row, known in zip(calibration.steps, expected.steps, strict=True):
        assert row.rho == pytest.approx(known.rho, rel=1e-3)
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
    assert {key: calibration.conditions["guidance"][key] for key in case.guidance} == case.guidance
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


def test_copies_of_a_scheduler_have_guards_of_their_own():
    """As servers make them, one for each request: runs in several threads, on one network, do not mix."""
    case = CASES["sd"]
    pipe = case.make()
    with ours.stabilize(pipe, calibrated("sd")):
        pipes = [copy.copy(pipe) for _ in range(2)]
        for twin in pipes:
            twin.scheduler = copy.deepcopy(pipe.scheduler)
        assert len({id(p.scheduler._stein_guard) for p in (pipe, *pipes)}) == 3
        ends, errors = [], []
        turn = threading.Barrier(2)

        def together(*_: Any) -> dict[str, Any]:
            turn.wait()
            return {}

        def request(twin: Any, call: dict[str, Any]) -> None:
            try:
                twin(**call, num_inference_steps=5, callback_on_step_end=together)
                ends.append(1)
            except Exception as error:
                turn.abort()
                errors.append(str(error))

        threads = [threading.Thread(target=request, args=(twin, case.call)) for twin in pipes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(ends), errors) == (2, [])
        # One after the other, step by step, in one thread.
        for twin in pipes:
            twin.scheduler.set_timesteps(5)
        x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        states = [x, x]
        for k in range(5):
            for j, twin in enumerate(pipes):
                t = twin.scheduler.timesteps[k]
                words = torch.cat([case.call["negative_prompt_embeds"], case.call["prompt_embeds"]])
                with torch.no_grad():
                    u, c = pipe.unet(torch.cat([states[j]] * 2), t, words).sample.chunk(2)
                states[j] = twin.scheduler.step(u + 4.0 * (c - u), t, states[j]).prev_sample
        assert torch.equal(*states)
    hooks = len(network_of(pipe)._forward_hooks)
    del pipes, twin
    gc.collect()
    assert hooks == 2
    assert not network_of(pipe)._forward_hooks, "a guard goes with its scheduler"


def test_a_stabilized_scheduler_can_be_pickled():
    pipe = CASES["sd"].make()
    with ours.stabilize(pipe, calibrated("sd")):
        twin = pickle.loads(pickle.dumps(pipe.scheduler))
    assert twin._stein_guard is None
    twin.set_timesteps(5)


def test_a_weight_changed_in_the_middle_of_a_run_is_noticed():
    case = CASES["sd"]
    pipe = case.make()

    def change(pipe: Any, i: int, t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 4.0 if i < 2 else 1.5
        return {}

    with (
        ours.stabilize(pipe, calibrated("sd")),
        pytest.raises(ValueError, match=r"guidance: measured with .*closest to weight = 1\.5"),
    ):
        pipe(**case.call, num_inference_steps=5, callback_on_step_end=change)


def test_unchecked_at_ones_own_risk():
    case = CASES["sd"]
    other = case.make(seed=1)
    message = "network: its weights differ by .*; a LoRA, quantisation or fine-tuning makes another network: calibrate"
    with pytest.raises(ValueError, match=message):
        ours.stabilize(other, calibrated("sd"))
    with ours.stabilize(other, calibrated("sd"), check=False):
        assert run(other, **{**case.call, "guidance_scale": 9.0})[1].isfinite().all()
    assert not network_of(other)._forward_hooks


def test_one_file_for_several_budgets_and_guidance_scales(tmp_path):
    case = CASES["sd"]
    pipe = case.make()
    budgets = ours.calibrate(pipe, nfe=[4, 6], **QUICK, **case.call)
    assert [c.nfe for c in budgets.calibrations] == [4, 6]
    stronger = ours.calibrate(pipe, nfe=4, **QUICK, **{**case.call, "guidance_scale": 7.0})
    ours.CalibrationSet((*budgets.calibrations, stronger)).save(tmp_path / "all.json")
    loaded = ours.CalibrationSet.load(tmp_path / "all.json")
    ends = {}
    with ours.stabilize(pipe, loaded):
        for steps, scale in ((4, 4.0), (6, 4.0), (4, 7.0)):
            ends[steps, scale] = run(pipe, steps, **{**case.call, "guidance_scale": scale})[1]
        with pytest.raises(ValueError, match="guidance must be one of 4, 7, got 5"):
            run(pipe, 4, **{**case.call, "guidance_scale": 5.0})
        with pytest.raises(ValueError, match="num_inference_steps = 5: the calibration is for 4 or 6"):
            run(pipe, 5, **case.call)
    for (steps, scale), end in ends.items():
        with ours.stabilize(pipe, loaded.choose(nfe=steps, guidance=scale)):
            assert torch.equal(run(pipe, steps, **{**case.call, "guidance_scale": scale})[1], end)


@pytest.mark.parametrize("guidance", [{"copies": 1, "surprise": 2}, {"copies": 0}, {"weight": "4"}])
def test_a_guidance_that_cannot_be_read_is_refused_in_a_sentence(guidance: dict[str, Any]):
    calibration = calibrated("sd")
    damaged = replace(calibration, conditions={**calibration.conditions, "guidance": guidance})
    pipe = CASES["sd"].make()
    with pytest.raises(ValueError, match="guidance"), ours.stabilize(pipe, damaged):
        run(pipe, **CASES["sd"].call)


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


class TestControlNets:
    """A ControlNet is part of the network: it is recognised, and so is its strength."""

    def test_another_strength_is_refused(self):
        case, calibration = CASES["controlnet"], calibrated("controlnet")
        pipe = case.make()
        with (
            ours.stabilize(pipe, calibration),
            pytest.raises(ValueError, match=r"controlnet_conditioning_scale: measured with \[0.8\], this run has"),
        ):
            run(pipe, **{**case.call, "controlnet_conditioning_scale": 0.5})

    def test_one_that_stops_is_refused(self):
        case, calibration = CASES["controlnet"], calibrated("controlnet")
        pipe = case.make()
        with (
            ours.stabilize(pipe, calibration),
            pytest.raises(ValueError, match=r"measured with \[0.8\], this run has \[0.0\]"),
        ):
            run(pipe, **{**case.call, "control_guidance_end": 0.5})

    def test_another_one_is_refused(self):
        pipe = CASES["controlnet"].make()
        torch.nn.init.normal_(pipe.controlnet.conv_in.weight)
        for weight in pipe.controlnet.parameters():
            weight.data.mul_(-1.0)
        with pytest.raises(ValueError, match="weights differ by"):
            ours.stabilize(pipe, calibrated("controlnet"))

    def test_with_and_without_one_are_told_apart(self):
        pipe = CASES["controlnet"].make()
        parts = {name: part for name, part in pipe.components.items() if name != "controlnet"}
        plain = hosts.make(diffusers.StableDiffusionXLPipeline, **parts)
        with pytest.raises(ValueError, match="controlnet: the calibration was measured with one"):
            ours.stabilize(plain, calibrated("controlnet"))
        without = dict(calibrated("controlnet").conditions)
        del without["controlnet"], without["controlnet_scale"]
        with pytest.raises(ValueError, match="controlnet: the calibration was measured without one"):
            ours.stabilize(pipe, replace(calibrated("controlnet"), conditions=without))


class TestNetworksThatTakeTurns:
    """Wan2.2-A14B: the timestep decides which network is asked, and with which weight."""

    CALL: ClassVar = {**hosts.wan_22_a14b()[1], "output_type": "latent"}

    @staticmethod
    @functools.cache
    def made() -> tuple[Any, Calibration]:
        pipe = seeded(hosts.wan_22_a14b)()
        return pipe, ours.calibrate(pipe, nfe=5, **QUICK, **TestNetworksThatTakeTurns.CALL)

    def test_both_are_asked_as_in_our_loop(self):
        pipe, calibration = self.made()
        assert calibration.conditions["guidance"]["weight"] == 4.0
        assert calibration.conditions["guidance_later"]["weight"] == 3.0
        asked = []
        hook = pipe.transformer_2.register_forward_pre_hook(lambda *_: asked.append(1))
        with ours.stabilize(pipe, calibration):
            first, last, calls = run(pipe, **self.CALL)
            hook.remove()
            assert calls + len(asked) == 2 * 5
            assert calls, "the first network is asked"
            assert asked, "and so is the second"
            captured = capture(pipe, ours.scheduler_for(pipe.scheduler, calibration.solver), **self.CALL)
        mine = sample(captured.denoiser(range(2)), first, calibration.levels, calibration.solver, calibration.replay())
        assert_close(last, mine.x)

    def test_another_weight_of_the_second_is_refused(self):
        pipe, calibration = self.made()
        with (
            ours.stabilize(pipe, calibration),
            pytest.raises(ValueError, match=r"guidance: measured with .*weight=3\.0"),
        ):
            run(pipe, **{**self.CALL, "guidance_scale_2": 2.0})

    def test_another_boundary_or_order_is_refused(self):
        pipe, calibration = self.made()
        single = {name: part for name, part in pipe.components.items() if name != "transformer_2"}
        other = seeded(hosts.wan_22_a14b)()
        other.register_to_config(boundary_ratio=0.5)
        with pytest.raises(ValueError, match=r"boundary_ratio: measured with 0.875, the pipeline has 0.5"):
            ours.stabilize(other, calibration)
        other.transformer, other.transformer_2 = other.transformer_2, other.transformer
        with pytest.raises(ValueError, match="its weights differ by"):
            ours.stabilize(other, calibration)
        with pytest.raises(ValueError, match="network_later: the calibration was measured with one"):
            ours.stabilize(hosts.make(diffusers.WanPipeline, **single), calibration)

    def test_a_boundary_that_four_steps_do_not_show_is_refused(self):
        pipe = seeded(hosts.wan_22_a14b)()
        pipe.register_to_config(boundary_ratio=0.9999)
        with pytest.raises(ValueError, match="one of its networks is asked in 0 recorded steps, need 2"):
            ours.calibrate(pipe, nfe=5, **QUICK, **self.CALL)


def test_calibrations_from_elsewhere_are_refused():
    calibration = calibrated("ddpm")
    bare = replace(calibration, conditions={})
    with pytest.raises(ValueError, match="does not record its network and guidance"):
        ours.stabilize(tiny.ddpm(), bare)


@pytest.mark.parametrize("solver", [DDIM(), UniPCBh2(2, corrector=False)])
def test_solvers_without_a_scheduler_are_refused(solver: Any):
    with pytest.raises(ValueError, match="solver must be one of DPMSolverMultistep"):
        ours.calibrate(tiny.ddpm(), nfe=4, solver=solver, **QUICK)


def test_heun_on_flow_is_refused():
    with pytest.raises(ValueError, match="Heun knows no flow matching"):
        ours.calibrate(tiny.flux(), nfe=5, solver=Heun(), **QUICK, **CASES["flux"].call)


def test_a_calibration_begins_where_the_host_can_begin():
    """Pipelines begin with unit noise: no search may begin later, where that would not be the noise of the level."""
    for case, solver in ((CASES["flux"], None), (CASES["ddpm"], None), (CASES["sd"], Heun())):
        calibration = ours.calibrate(case.make(), nfe=5, solver=solver, **{**QUICK, "recipe": SEARCHED}, **case.call)
        ours.stabilize(case.make(), calibration)
        if solver is None:
            assert calibration.levels[0].sigma > 0.99


def test_a_late_start_where_the_host_begins_with_unit_noise_is_refused():
    pipe, known = tiny.ddpm(), calibrated("ddpm")
    levels = LogSNR(to_zero=True)(known.levels.schedule.starting_at(0.5), 5)
    with pytest.raises(ValueError, match=r"it begins at sigma = .*, but pipelines begin with unit noise"):
        ours.stabilize(pipe, replace(known, levels=levels))
    levels = LogSNR(to_zero=True)(known.levels.schedule.starting_at(10.0), 5)
    with ours.stabilize(pipe, replace(known, levels=levels)):
        pipe.scheduler.set_timesteps(5)
        assert pipe.scheduler.init_noise_sigma == levels[0].sigma < 1.0


def test_a_recipe_that_begins_late_needs_a_host_that_can():
    few = replace(FEW_CALLS, seeds=range(6), steps=6, search=replace(FEW_CALLS.search, iterations=1))
    with pytest.raises(ValueError, match=r"start must be True or False, got 0.75: DDPMScheduler begins at its"):
        ours.calibrate(tiny.ddpm(), nfe=4, **{**QUICK, "recipe": few})
    case = CASES["sd"]
    calibration = ours.calibrate(case.make(), nfe=5, solver=Heun(), **{**QUICK, "recipe": few}, **case.call)
    assert calibration.provenance["network_calls"] > 0
    ours.stabilize(case.make(), calibration)


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


@pytest.mark.parametrize(
    ("kind", "unet", "message"),
    [
        (Doubling, {}, "is neither the network's output nor classifier-free guidance"),
        (Drifting, {"class_embed_type": "identity"}, "argument class_labels changes from step to step"),
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


def test_a_report_of_ones_own_pipeline(tmp_path):
    """Prompts are captions, every row has the same seeds, and the pipeline is as before."""
    from steindiff.report import write

    pipe = tiny.stable_diffusion(prompts=True)
    before, prompts = pipe.scheduler, ["a fox", "a lake"]
    made = ours.calibrate(pipe, prompts, nfe=[3, 4], **QUICK, guidance_scale=3.0)
    found = ours.report(pipe, made, prompts, seeds=range(3), many=6, progress=False, guidance_scale=3.0)
    assert pipe.scheduler is before
    assert [(entry.title, entry.nfe) for entry in found.entries] == [
        ("plain", 3),
        ("plain", 4),
        ("calibrated", 3),
        ("calibrated", 4),
        ("many steps (6)", 6),
    ]
    assert list(found.captions) == ["a fox", "a lake", "a fox"]
    with ours.stabilize(pipe, made):
        again = pipe("a lake", num_inference_steps=4, guidance_scale=3.0, generator=torch.Generator().manual_seed(1))
    assert again.images[0].tobytes() == found.entries[3].images[1].tobytes()
    page, *_ = write(found, tmp_path)
    assert "a lake" in page.read_text(encoding="utf-8")


def test_a_report_without_prompts_or_images():
    pipe = tiny.ddpm()
    made = ours.calibrate(pipe, nfe=3, **QUICK, batch_size=2)
    assert len(ours.report(pipe, made, seeds=[4, 5], many=4, progress=False).entries) == 3
