"""Which denoiser a pipeline really runs: in half precision, for many prompts, and in every layout."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from steindiff import sample
from steindiff.calibrating import Recipe
from steindiff.grids import LogSNR

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import hosts  # noqa: E402
import tiny  # noqa: E402

from steindiff.integrations import diffusers as ours  # noqa: E402
from steindiff.integrations.diffusers.capture import capture, chunks, network_of  # noqa: E402
from steindiff.integrations.diffusers.families import converted, same_process  # noqa: E402
from steindiff.integrations.diffusers.networks import (  # noqa: E402
    ChannelsAt,
    Tokens,
    layout_from,
    layout_of,
    names,
)
from steindiff.levels import Level  # noqa: E402
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh2  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:In CPU autocast:UserWarning",
    "ignore:Mismatch dtype:UserWarning",
)


def built(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    return hosts.HOSTS[name].build()


def captured(pipe: Any, call: dict[str, Any], solver: Solver | None = None, **options: Any) -> Any:
    return capture(pipe, ours.scheduler_for(pipe.scheduler, solver or DPMSolverMultistep(2)), **options, **call)


def in_dtype(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in call.items()
    }


# --- half precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["stable_diffusion_controlnet_guess", "stable_diffusion_xl_inpaint_blended", "stable_diffusion_controlnet_early"],
)
def test_wrong_denoisers_do_not_pass_in_half_precision(name: str, dtype: torch.dtype):
    """Rounding hides nothing: what could differ is compared before it goes through the network."""
    pipe, call = built(name)
    with pytest.raises(ValueError, match=hosts.HOSTS[name].refused):
        captured(pipe.to(dtype), in_dtype(call, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name", ["stable_diffusion", "flux", "qwen_image", "lumina2", "wan", "krea2", "stable_diffusion_xl_controlnet"]
)
def test_right_denoisers_pass_in_half_precision(name: str, dtype: torch.dtype):
    pipe, call = built(name)
    expected = captured(pipe, call).network.guidance
    found = captured(pipe.to(dtype), in_dtype(call, dtype)).network
    assert found.guidance == expected
    assert abs(found.calls[0].time.unit) in (1.0, 1e-3)


@pytest.mark.parametrize("name", ["stable_diffusion", "flux", "qwen_image", "lumina2", "wan"])
def test_networks_are_told_bitwise_what_the_pipeline_tells_them_in_half_precision(name: str):
    """Flux rounds t and then t/1000: rounded once, the time would be up to four of a thousand timesteps off."""
    pipe, call = built(name)
    call = in_dtype(call, torch.bfloat16)
    time = captured(pipe.to(torch.bfloat16), call).network.calls[0].time
    module = network_of(pipe)
    told: list[Tensor] = []

    def asked(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        told.append(torch.as_tensor(bound[names(module)[1]]).flatten()[0])

    pipe.scheduler = ours.scheduler_for(pipe.scheduler, DPMSolverMultistep(2))
    hook = module.register_forward_pre_hook(asked, with_kwargs=True)
    pipe(**{**call, "num_inference_steps": 12, "output_type": "latent"})
    hook.remove()
    expected = time(pipe.scheduler.timesteps.double()).repeat_interleave(len(told) // len(pipe.scheduler.timesteps))
    found = torch.stack(told).to(time.dtype)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0 if time.dtype == torch.bfloat16 else 1e-7)


# --- steps that are not alike -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("callback_on_step_end", lambda *_: {}),
        ("skip_guidance_layers", [0]),
        ("denoising_end", 0.8),
        ("use_dynamic_cfg", True),
        ("cfg_trunc_ratio", 0.5),
    ],
)
def test_arguments_that_act_in_the_middle_of_a_run_are_refused(name: str, value: Any):
    pipe, call = built("stable_diffusion_xl")
    with pytest.raises(ValueError, match=f"{name} = .*: changes what a step does within a run"):
        captured(pipe, {**call, name: value})


def test_unknown_arguments_are_named():
    pipe, call = built("stable_diffusion_3")
    with pytest.raises(ValueError, match="guidance: StableDiffusion3Pipeline takes no such argument"):
        captured(pipe, {**call, "guidance": 3.0})


def test_a_weight_changed_in_the_middle_of_a_calibrated_run_is_refused():
    pipe, call = built("stable_diffusion")
    call.pop("guidance_rescale")
    calibration = ours.calibrate(pipe, nfe=4, recipe=BRIEF, **call)

    def fade(pipe: Any, i: int, t: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pipe._guidance_scale = 2.0 if i else 5.0
        return tensors

    with (
        ours.stabilize(pipe, calibration),
        pytest.raises(ValueError, match=r"guidance: measured with .*closest to weight = 2"),
    ):
        pipe(**call, num_inference_steps=4, output_type="latent", callback_on_step_end=fade)


class Loop(diffusers.DDPMPipeline):
    """A pipeline that does something of its own with the network."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(x, t).sample

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 4, batch_size: int = 1):
        x = torch.randn(batch_size, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            x = self.follow(self.scheduler.step(self.predict(x, t), t, x).prev_sample)

    def follow(self, x: Tensor) -> Tensor:
        return x


class Doubling(Loop):
    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return 2.0 * self.unet(x, t).sample


class Drifting(Loop):
    """A condition that depends on the time, as the residuals of a ControlNet do; as wide as the time embedding."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(x, t, class_labels=t.expand(len(x), 4 * 8) / 100).sample


class Fading(Loop):
    """A guidance weight that depends on the time."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        c, u = (self.unet(x, t, class_labels=torch.full((len(x), 32), value)).sample for value in (1.0, 0.0))
        return u + (1.0 + float(t) / 1000) * (c - u)


class Swapping(Loop):
    """A network that is another one at every step."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            self.unet.conv_out.bias.add_(0.1)
        return self.unet(x, t).sample


class Leaping(Loop):
    """A state that is changed after the step, as where a known image is blended in."""

    def follow(self, x: Tensor) -> Tensor:
        return 0.9 * x


class Halving(Loop):
    """A network that is given something else than the state."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(0.5 * x, t).sample


class Marking(Loop):
    """A channel more than the state has, which depends on the time."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(torch.cat([x, torch.full_like(x[:, :1], float(t))], 1), t).sample


class Warping(Loop):
    """A time that is not the scheduler's."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        return self.unet(x, t.float() ** 2 / 1000).sample


class Skipping(Loop):
    """Guidance from the second step on."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        if t > 700:
            return self.unet(x, t).sample
        return 0.5 * (self.unet(x, t).sample + self.unet(x, t).sample)


class Failing(Loop):
    """An error of the pipeline's own."""

    def predict(self, x: Tensor, t: Tensor) -> Tensor:
        raise KeyError("mask")


@pytest.mark.parametrize(
    ("kind", "unet", "message"),
    [
        (Doubling, {}, "what it makes of 1 network calls on 1 rows for 1 states is neither"),
        (Drifting, {"class_embed_type": "identity"}, "the network's argument class_labels changes from step to step"),
        (Fading, {"class_embed_type": "identity"}, "its guidance changes from step to step"),
        (Swapping, {}, "its network, asked again, is off by"),
        (Leaping, {}, "changes the state between steps"),
        (Halving, {}, r"is not given the state, \(3, 8, 8\), but \(3, 8, 8\) made from it"),
        (Marking, {"in_channels": 4}, "what it joins to the state changes from step to step"),
        (Warping, {}, "which no affine function gives"),
        (Skipping, {}, "calls its network 1 times in the first step and 2 times in step 2"),
        (Failing, {}, r"does not run with SteinDPMSolverMultistepScheduler .*\(KeyError: 'mask'\)"),
    ],
)
def test_steps_that_cannot_be_rebuilt_are_refused(kind: type, unet: dict[str, Any], message: str):
    """A pipeline that does something else is never calibrated for the wrong thing."""
    pipe = tiny.quiet(kind(tiny.unet_unconditional(**unet), diffusers.DDPMScheduler()))
    with pytest.raises(ValueError, match=message):
        captured(pipe, {})


# --- prompts and batches ------------------------------------------------------------------------------------------


def rows_of(pipe: Any) -> tuple[list[int], Any]:
    rows: list[int] = []
    module = network_of(pipe)
    state = names(module)[0]
    hook = module.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs[state])), with_kwargs=True
    )
    return rows, hook


@pytest.mark.parametrize("name", ["stable_diffusion", "qwen_image", "z_image"])
def test_the_capture_keeps_to_the_batch(name: str):
    """Prompts are recorded one after the other, and each sample still gets its own."""
    pipe, call = built(name)
    whole = captured(pipe, call)
    rows, hook = rows_of(pipe)
    one = captured(pipe, call, batch=1)
    hook.remove()
    assert max(rows) <= 2 * len(one.network.calls)
    assert [len(part.calls) for part in one.parts] == [len(whole.network.calls)] * 2
    x = torch.randn(3, *whole.shape, generator=torch.Generator().manual_seed(0))
    level = whole.family.schedule.level(0.5 * whole.family.schedule.t_max)
    with torch.no_grad():
        a, b = (part.denoiser([1, 4, 3])(x, level) for part in (whole, one))
        other = whole.denoiser([0, 0, 0])(x, level)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert float((a - other)[1].abs().max()) < 1e-4 < float((a - other)[0].abs().max())


def test_the_captured_denoiser_says_its_conditions():
    """What a calibration must agree on comes from the denoiser, the model only passes it on."""
    pipe, call = built("stable_diffusion_controlnet")
    found = captured(pipe, call)
    told = found.denoiser([3]).conditions
    assert (told["pipeline"], told["prediction"], told["controlnet_scale"]) == (type(pipe).__name__, "epsilon", [0.8])
    assert (told["guidance"]["copies"], told["guidance"]["weight"]) == (2, pytest.approx(5.0))
    model = found.model("mine")
    assert (model.name, found.model().name, model.conditions) == ("mine", type(pipe).__name__, dict(told))
    assert "guidance_later" not in told


def test_a_call_is_cut_prompt_by_prompt():
    call = {"prompt": ["a", "b", "c"], "image": torch.zeros(3, 3, 4, 4), "sigmas": [3, 2, 1], "height": 3}
    parts = chunks(call, 2)
    assert [part["prompt"] for part in parts] == [["a", "b"], ["c"]]
    assert [len(part["image"]) for part in parts] == [2, 1]
    assert all(part["sigmas"] == [3, 2, 1] and part["height"] == 3 for part in parts)
    assert [part["batch_size"] for part in chunks({"batch_size": 5}, 2)] == [2, 2, 1]
    assert len(chunks({"prompt": ["a", "b"], "num_images_per_prompt": 4}, 4)) == 2
    assert chunks({"prompt": "a"}, 1) == [{"prompt": "a"}]


# --- calibrated runs ----------------------------------------------------------------------------------------------

BRIEF = Recipe(seeds=range(4), steps=6, grid=LogSNR(), search=None, rivals=())
FAMILIES = ["mochi", "z_image", "qwen_image", "ltx", "cogvideox", "cogview3_plus", "kandinsky5", "flux_fill", "lumina2"]


@pytest.mark.parametrize("name", FAMILIES)
def test_calibrated_runs_are_those_of_our_own_loop(name: str):
    """Calibrate, install, run: levels, signs, layouts and times are those the calibration was measured with."""
    pipe, call = built(name)
    solver = hosts.HOSTS[name].solver
    calibration = ours.calibrate(pipe, nfe=4, solver=solver, recipe=BRIEF, **call)
    assert calibration.basis.bands > 1
    states: list[Tensor] = []
    with ours.stabilize(pipe, calibration) as stabilized:
        scheduler, step = stabilized.scheduler, stabilized.scheduler.step

        def stepped(output: Tensor, t: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            states.append(x.clone())
            made = step(output, t, x, *args, **kwargs)
            states.append((made[0] if isinstance(made, tuple) else made.prev_sample).clone())
            return made

        scheduler.step = stepped
        pipe(
            **{"num_inference_steps": 4, "generator": torch.Generator().manual_seed(0), "output_type": "latent", **call}
        )
    plain = captured(pipe, call, solver)
    layout = plain.network.layout
    first, last = (layout.unpack(x) for x in (states[0], states[-1]))
    with torch.no_grad():
        mine = sample(plain.denoiser(range(len(first))), first, calibration.levels, solver, calibration.replay())
    assert float((mine.x - last).norm() / last.norm()) < 1e-5


# --- layouts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        Tokens((4, 8, 6), 2),
        Tokens((3, 5, 4, 4), 1),
        Tokens((2, 3, 4, 8), 2),
        ChannelsAt((4, 5, 6), 0),
        ChannelsAt((4, 5, 6, 7), 3),
    ],
    ids=repr,
)
def test_layouts_go_there_and_back(layout: Any):
    x = torch.randn(2, *layout.shape)
    packed = layout.pack(x)
    assert torch.equal(layout.unpack(packed), x)
    assert layout_of(packed.shape[1:], layout.shape) == layout


def test_tokens_are_those_of_the_pipelines():
    x = torch.randn(2, 4, 8, 6)
    expected = diffusers.FluxPipeline._pack_latents(x, 2, 4, 8, 6)
    assert torch.equal(Tokens((4, 8, 6), 2).pack(x), expected)
    video = torch.randn(2, 8, 3, 4, 4)
    assert torch.equal(Tokens((8, 3, 4, 4), 1).pack(video), diffusers.LTXPipeline._pack_latents(video))


def test_tokens_are_never_taken_for_channels():
    assert layout_from((4096, 64), [16], []) is None
    assert layout_from((64, 1024), [64], []) == ChannelsAt((64, 1024), 0)
    assert layout_from((1024, 64), [64], []) == ChannelsAt((64, 1024), 1)
    assert layout_from((13, 16, 30, 45), [16], []) == ChannelsAt((16, 13, 30, 45), 1)


def test_states_that_cannot_be_told_are_refused():
    pipe, call = built("flux")
    latents = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    pipe.transformer.register_to_config(in_channels=99, out_channels=99)
    with pytest.raises(ValueError, match=r"its state has shape \(16, 16\) and cannot be told"):
        captured(pipe, {**call, "latents": latents})


# --- forward processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [DPMSolverMultistep(2), UniPCBh2(2), Heun()], ids=repr)
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: diffusers.DDPMScheduler(),
        lambda: diffusers.EulerDiscreteScheduler(1000, 0.00085, 0.012, "scaled_linear"),
        lambda: diffusers.PNDMScheduler(1000, 0.00085, 0.012, "scaled_linear"),
        lambda: diffusers.CogVideoXDDIMScheduler(snr_shift_scale=3.0, rescale_betas_zero_snr=True),
        lambda: diffusers.DDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction"),
    ],
)
def test_a_new_scheduler_keeps_the_forward_process(scheduler: Any, solver: Solver):
    """from_config drops defaults and positional values; ᾱ must be what it was."""
    old = scheduler()
    new = ours.scheduler_for(old, solver)
    assert same_process(old, new)
    torch.testing.assert_close(new.alphas_cumprod[:-1], old.alphas_cumprod[:-1].float(), rtol=1e-4, atol=1e-6)
    assert new.config["prediction_type"] == old.config["prediction_type"]


def test_other_processes_are_told_apart():
    base = diffusers.DDPMScheduler()
    assert not same_process(base, diffusers.DDPMScheduler(beta_end=0.03))
    assert not same_process(base, diffusers.DDPMScheduler(prediction_type="v_prediction"))
    assert not same_process(base, diffusers.DDPMScheduler(500))
    assert not same_process(base, diffusers.FlowMatchEulerDiscreteScheduler())
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    assert same_process(flow, diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0))
    assert not same_process(flow, diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    edm = diffusers.EDMEulerScheduler()
    assert same_process(edm, diffusers.EDMDPMSolverMultistepScheduler())
    assert not same_process(edm, diffusers.EDMDPMSolverMultistepScheduler(sigma_data=1.0))


def test_a_class_that_cannot_have_the_process_is_refused():
    with pytest.raises(ValueError, match="EDMEulerScheduler cannot have its forward process"):
        converted(diffusers.DDPMScheduler(), diffusers.EDMEulerScheduler)


def test_the_times_of_stable_audio():
    family = ours.family_of(hosts.Arctan())
    sigmas = (500.0, 42.2, 3.57, 0.3)
    told = [family.timestep(Level(sigma, 1.0, sigma)) for sigma in sigmas]
    assert told == pytest.approx([0.9987, 0.9849, 0.8262, 0.1855], abs=1e-4)
    seen: list[float] = []
    denoiser = family.denoiser(lambda x, t: seen.append(float(t[0])) or 0.0 * x)
    for sigma in sigmas:
        x = torch.ones(1, 2, 3)
        # v = 0: D = x/(1 + σ²)
        torch.testing.assert_close(denoiser(x, Level(sigma, 1.0, sigma)), x / (1 + sigma**2), rtol=1e-5, atol=1e-9)
    assert seen == pytest.approx(told, abs=1e-5)


def test_inverted_flow_counts_from_noise_to_data():
    family = ours.family_of(diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    level = family.level(250.0, 0.75)
    assert level == Level(0.75, 0.25, 0.75)
    assert family.timestep(level) == 250.0
    x, v = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(family.denoiser(lambda *_: -v)(x, level), x - 0.75 * v)


@pytest.mark.parametrize("name", ["SCMScheduler", "CMStochasticIterativeScheduler", "IPNDMScheduler"])
def test_schedulers_with_other_times_are_refused(name: str):
    with pytest.raises(ValueError, match=f"scheduler = {name}: its time and noise levels are not known here"):
        ours.family_of(getattr(diffusers, name)())


def test_sigmas_that_a_pipeline_brings_are_not_used():
    scheduler = ours.scheduler_for(diffusers.FlowMatchEulerDiscreteScheduler(), DPMSolverMultistep(2))
    scheduler.set_timesteps(4)
    own = scheduler.sigmas.clone()
    scheduler.set_timesteps(sigmas=[1.0, 0.9, 0.8, 0.1])
    assert torch.equal(scheduler.sigmas, own)


def test_noise_from_outside_is_refused():
    pipe, call = built("ddim_pixels")
    with pytest.raises(ValueError, match="eta: only DDIM"):
        captured(pipe, {**call, "eta": 0.5})
