"""Tiny pipelines of many classes, random weights, built from configuration alone: what the support matrix runs.

The networks are real classes of diffusers in their smallest form. Text encoders are left out, since every pipeline
takes embeddings; autoencoders are a stand-in that pools, since only their configuration and latents matter here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import tiny
import torch
from diffusers.configuration_utils import FrozenDict, register_to_config
from torch import Tensor, nn

from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh2

WIDTH = 16
"""Width of text embeddings."""


class Pooling(nn.Module):
    """An autoencoder's stand-in: latents are pooled pixels."""

    def __init__(self, channels: int, space: int = 2, time: int = 1, *, video: bool = False, **config: Any) -> None:
        super().__init__()
        self.channels, self.space, self.time, self.video = channels, space, time, video
        self.weight = nn.Parameter(torch.zeros(1))
        blocks = space.bit_length()
        self.config = FrozenDict(
            {
                "latent_channels": channels,
                "z_dim": channels,
                "block_out_channels": [8] * blocks,
                "scaling_factor": 1.0,
                "scaling_factor_spatial": space,
                "scaling_factor_temporal": time,
                "scale_factor_spatial": space,
                "scale_factor_temporal": time,
                "shift_factor": 0.0,
                "latents_mean": [0.0] * channels,
                "latents_std": [1.0] * channels,
                "sample_size": 16,
                "patch_size": None,
                "batch_norm_eps": 1e-5,
                "in_channels": 3,
                "sampling_rate": 8,
                "temporal_compression_ratio": time,
                "spatial_compression_ratio": space,
                "force_upcast": False,
                "invert_scale_latents": False,
                **config,
            }
        )
        self.device = torch.device("cpu")
        self.temperal_downsample = [True] * (time.bit_length() - 1)
        self.spatial_compression_ratio, self.temporal_compression_ratio = space, time
        self.latents_mean, self.latents_std = torch.zeros(channels), torch.ones(channels)
        self.bn = SimpleNamespace(running_mean=torch.zeros(4 * channels), running_var=torch.ones(4 * channels))
        self.hop_length = space

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def register_to_config(self, **settings: Any) -> None:
        """Change the configuration."""
        self.config = FrozenDict({**self.config, **settings})

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """Latents by pooling; the channels are repeated."""
        if x.ndim == 5:
            x = nn.functional.interpolate(
                x, (1 + (x.shape[2] - 1) // self.time, *(n // self.space for n in x.shape[3:]))
            )
        else:
            x = nn.functional.avg_pool2d(x, self.space)
        x = x.repeat(1, -(-self.channels // x.shape[1]), *[1] * (x.ndim - 2))[:, : self.channels]
        draw = SimpleNamespace(sample=lambda generator=None: x, mode=lambda: x)
        return SimpleNamespace(latent_dist=draw) if return_dict else (draw,)


def make(cls: type[Any], **parts: Any) -> Any:
    """A pipeline with its parts; what is not given is left out."""
    needed = inspect.signature(cls.__init__).parameters.values()
    missing = {
        p.name: None
        for p in needed
        if p.name != "self" and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in parts
    }
    if "requires_safety_checker" in inspect.signature(cls.__init__).parameters:
        parts.setdefault("requires_safety_checker", False)
        missing |= {name: None for name in ("safety_checker", "feature_extractor")}
    return tiny.quiet(cls(**{**missing, **parts}))


def embeds(*names: str, prompts: int = 2, length: int = 4, width: int = WIDTH, negative: bool = True) -> dict[str, Any]:
    """Random embeddings `(prompts, length, width)` under these names, and negative ones."""
    generator = torch.Generator().manual_seed(5)
    signs = ("", "negative_") if negative else ("",)
    return {
        f"{sign}{name}": torch.randn(prompts, *([] if "pooled" in name else [length]), width, generator=generator)
        for sign in signs
        for name in names or ("prompt_embeds",)
    }


def masks(
    *names: str, prompts: int = 2, length: int = 4, dtype: torch.dtype = torch.int64, negative: bool = True
) -> dict[str, Any]:
    """Masks that leave all tokens in."""
    signs = ("", "negative_") if negative else ("",)
    return {f"{sign}{name}": torch.ones(prompts, length, dtype=dtype) for sign in signs for name in names}


def flow(**settings: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **settings})


def ddim(**settings: Any) -> Any:
    return diffusers.DDIMScheduler(**{"beta_schedule": "scaled_linear", "clip_sample": False, **settings})


def images(prompts: int = 2, size: int = 16) -> Tensor:
    return torch.rand(prompts, 3, size, size, generator=torch.Generator().manual_seed(3))


def hole(prompts: int = 2, size: int = 16) -> Tensor:
    mask = torch.zeros(prompts, 1, size, size)
    mask[..., : size // 2, :] = 1.0
    return mask


SIZE = {"height": 16, "width": 16}


@dataclass(frozen=True)
class Host:
    """A pipeline class, how to build and call it, and what is expected.

    Attributes:
        build: makes pipeline and call.
        solver: what to run.
        refused: words of the refusal; empty: it is verified.
        note: for the table.
    """

    build: Callable[[], tuple[Any, dict[str, Any]]]
    solver: Solver = field(default_factory=lambda: DPMSolverMultistep(2))
    refused: str = ""
    note: str = ""


HOSTS: dict[str, Host] = {}


def host(*, solver: Solver | None = None, refused: str = "", note: str = "") -> Callable[..., Any]:
    """Enter a builder into the table."""

    def enter(build: Callable[[], tuple[Any, dict[str, Any]]]) -> Callable[[], tuple[Any, dict[str, Any]]]:
        HOSTS[build.__name__] = Host(build, solver or DPMSolverMultistep(2), refused, note)
        return build

    return enter


def sd(cls: type[Any], **extra: Any) -> Any:
    parts = {name: extra.pop(name) for name in ("adapter", "scheduler") if name in extra}
    unet = tiny.unet_condition(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        **extra,
    )
    return make(cls, **{"vae": Pooling(4), "unet": unet, "scheduler": ddim(), **parts})


def sdxl(cls: type[Any], **extra: Any) -> Any:
    unet = tiny.unet_condition(
        cross_attention_dim=WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        **extra,
    )
    scheduler = diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear")
    return make(cls, vae=Pooling(4), unet=unet, scheduler=scheduler, add_watermarker=False)


XL = ("prompt_embeds", "pooled_prompt_embeds")


# --- pixels and Stable Diffusion ----------------------------------------------------------------------------------


@host()
def ddpm() -> Any:
    return make(diffusers.DDPMPipeline, unet=tiny.unet_unconditional(), scheduler=diffusers.DDPMScheduler()), {
        "batch_size": 2
    }


@host(solver=UniPCBh2(2))
def ddim_pixels() -> Any:
    return make(diffusers.DDIMPipeline, unet=tiny.unet_unconditional(), scheduler=diffusers.DDIMScheduler()), {
        "batch_size": 2
    }


@host()
def latent_diffusion() -> Any:
    vqvae = diffusers.VQModel(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        num_vq_embeddings=16,
    )
    scheduler = diffusers.DDIMScheduler(1000, 0.0015, 0.0195, "scaled_linear")
    return make(diffusers.LDMPipeline, vqvae=vqvae, unet=tiny.unet_unconditional(), scheduler=scheduler), {
        "batch_size": 2
    }


@host()
def stable_diffusion() -> Any:
    return sd(diffusers.StableDiffusionPipeline), {**embeds(), **SIZE, "guidance_scale": 5.0, "guidance_rescale": 0.7}


@host(solver=Heun())
def stable_diffusion_heun() -> Any:
    return sd(diffusers.StableDiffusionPipeline), {**embeds(), **SIZE, "guidance_scale": 5.0}


@host(note="strength 1")
def stable_diffusion_img2img() -> Any:
    return sd(diffusers.StableDiffusionImg2ImgPipeline), {**embeds(), "image": images(), "strength": 1.0}


@host(note="nine-channel UNet: mask and masked image are conditions")
def stable_diffusion_inpaint() -> Any:
    call = {**embeds(), **SIZE, "image": images(), "mask_image": hole(), "strength": 1.0}
    return sd(diffusers.StableDiffusionInpaintPipeline, in_channels=9), call


@host(refused="changes the state between steps", note="four-channel UNet: latents are blended after every step")
def stable_diffusion_inpaint_blended() -> Any:
    call = {**embeds(), **SIZE, "image": images(), "mask_image": hole(), "strength": 1.0}
    return sd(diffusers.StableDiffusionInpaintPipeline), call


@host(refused="neither the network's output nor classifier-free guidance", note="three conditions a sample")
def stable_diffusion_pix2pix() -> Any:
    pipe = sd(diffusers.StableDiffusionInstructPix2PixPipeline, in_channels=8)
    return pipe, {**embeds(), "image": images(), "guidance_scale": 5.0, "image_guidance_scale": 1.5}


@host(note="low-resolution image and its noise level are conditions")
def stable_diffusion_upscale() -> Any:
    unet = tiny.unet_condition(cross_attention_dim=WIDTH, in_channels=7, num_class_embeds=1000)
    parts = {"low_res_scheduler": diffusers.DDPMScheduler(), "scheduler": ddim(prediction_type="v_prediction")}
    pipe = make(diffusers.StableDiffusionUpscalePipeline, vae=Pooling(4), unet=unet, max_noise_level=350, **parts)
    return pipe, {**embeds(), "image": images(size=8), "guidance_scale": 5.0}


@host(note="the adapter's features are a condition")
def stable_diffusion_adapter() -> Any:
    adapter = diffusers.T2IAdapter(channels=[8, 16], num_res_blocks=1, downscale_factor=2, adapter_type="full_adapter")
    call = {**embeds(), **SIZE, "image": images(), "guidance_scale": 5.0}
    return sd(diffusers.StableDiffusionAdapterPipeline, adapter=adapter), call


def controlled(cls: type[Any], pipe: Any, *, several: bool = False) -> Any:
    """A pipeline with a ControlNet of its network, or with two."""

    def controlnet() -> Any:
        made = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(8, 16))
        nn.init.normal_(made.controlnet_mid_block.weight, std=0.3)
        return made

    parts = {**pipe.components, "controlnet": [controlnet(), controlnet()] if several else controlnet()}
    return make(cls, **parts)


CONTROLLED = {"guidance_scale": 5.0, "controlnet_conditioning_scale": 0.8, "height": 32, "width": 32}


@host(note="the ControlNet is evaluated beside the network")
def stable_diffusion_controlnet() -> Any:
    pipe = controlled(diffusers.StableDiffusionControlNetPipeline, sd(diffusers.StableDiffusionPipeline))
    return pipe, {**embeds(), **CONTROLLED, "image": images(size=32)}


@host(note="two ControlNets")
def stable_diffusion_controlnets() -> Any:
    pipe = controlled(diffusers.StableDiffusionControlNetPipeline, sd(diffusers.StableDiffusionPipeline), several=True)
    pictures = [images(size=32), images(size=32).flip(-1)]
    return pipe, {**embeds(), **CONTROLLED, "image": pictures, "controlnet_conditioning_scale": [0.8, 0.5]}


@host(refused="residuals? changes from step to step", note="a ControlNet in guess mode")
def stable_diffusion_controlnet_guess() -> Any:
    pipe, call = stable_diffusion_controlnet()
    return pipe, {**call, "guess_mode": True}


@host(refused="conditioning_scale changes from step to step", note="a ControlNet that acts in some steps")
def stable_diffusion_controlnet_early() -> Any:
    pipe, call = stable_diffusion_controlnet()
    return pipe, {**call, "control_guidance_end": 0.5}


@host(note="the ControlNet is evaluated beside the network")
def stable_diffusion_xl_controlnet() -> Any:
    pipe = controlled(diffusers.StableDiffusionXLControlNetPipeline, sdxl(diffusers.StableDiffusionXLPipeline))
    return pipe, {**embeds(*XL), **CONTROLLED, "image": images(size=32)}


@host(refused="neither the network's output", note="attention is perturbed for a third condition")
def stable_diffusion_pag() -> Any:
    pipe = sd(diffusers.StableDiffusionPipeline)
    pag = make(diffusers.StableDiffusionPAGPipeline, **pipe.components, pag_applied_layers="mid")
    return pag, {**embeds(), **SIZE, "guidance_scale": 5.0, "pag_scale": 3.0}


@host()
def stable_diffusion_xl() -> Any:
    return sdxl(diffusers.StableDiffusionXLPipeline), {**embeds(*XL), **SIZE, "guidance_scale": 5.0}


@host(note="strength 1")
def stable_diffusion_xl_img2img() -> Any:
    return sdxl(diffusers.StableDiffusionXLImg2ImgPipeline), {**embeds(*XL), "image": images(), "strength": 1.0}


@host(note="nine-channel UNet")
def stable_diffusion_xl_inpaint() -> Any:
    call = {**embeds(*XL), **SIZE, "image": images(), "mask_image": hole(), "strength": 1.0}
    return sdxl(diffusers.StableDiffusionXLInpaintPipeline, in_channels=9), call


@host(refused="changes the state between steps", note="four-channel UNet: latents are blended after every step")
def stable_diffusion_xl_inpaint_blended() -> Any:
    call = {**embeds(*XL), **SIZE, "image": images(), "mask_image": hole(), "strength": 1.0}
    return sdxl(diffusers.StableDiffusionXLInpaintPipeline), call


@host(refused="time and noise levels are not known", note="continuous times ln(σ)/4, a guidance weight for each frame")
def stable_video_diffusion() -> Any:
    scheduler = diffusers.EulerDiscreteScheduler(
        timestep_type="continuous", prediction_type="v_prediction", sigma_min=0.002, sigma_max=700.0
    )
    return make(
        diffusers.StableVideoDiffusionPipeline, vae=Pooling(4), unet=tiny.unet_unconditional(), scheduler=scheduler
    ), {"image": images(1)}


@host(refused="original_inference_steps", note="distilled for its own scheduler")
def latent_consistency() -> Any:
    pipe = sd(diffusers.LatentConsistencyModelPipeline, time_cond_proj_dim=8, scheduler=diffusers.LCMScheduler())
    return pipe, {**embeds(negative=False), **SIZE}


@host(note="learned variances")
def deepfloyd_if() -> Any:
    unet = tiny.unet_condition(in_channels=3, out_channels=6, cross_attention_dim=WIDTH)
    scheduler = diffusers.DDPMScheduler(variance_type="learned_range")
    return make(diffusers.IFPipeline, unet=unet, scheduler=scheduler), {**embeds(), **SIZE, "guidance_scale": 5.0}


@host(refused="time and noise levels are not known", note="one-step model with its own scheduler")
def consistency_model() -> Any:
    pipe = make(
        diffusers.ConsistencyModelPipeline,
        unet=tiny.unet_unconditional(),
        scheduler=diffusers.CMStochasticIterativeScheduler(),
    )
    return pipe, {"batch_size": 2}


# --- transformers with discrete times -----------------------------------------------------------------------------


@host(note="predicted variances")
def dit() -> Any:
    return tiny.dit(), {"class_labels": [1, 2], "guidance_scale": 4.0}


def pixart(cls: type[Any]) -> Any:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        norm_type="ada_norm_single",
    )
    call = {
        **embeds(),
        **masks("prompt_attention_mask"),
        "use_resolution_binning": False,
        "negative_prompt": None,
        **SIZE,
    }
    return make(cls, transformer=transformer, vae=Pooling(4), scheduler=diffusers.DPMSolverMultistepScheduler()), call


@host(note="predicted variances")
def pixart_alpha() -> Any:
    return pixart(diffusers.PixArtAlphaPipeline)


@host(note="predicted variances")
def pixart_sigma() -> Any:
    return pixart(diffusers.PixArtSigmaPipeline)


@host()
def hunyuan_dit() -> Any:
    transformer = diffusers.HunyuanDiT2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=WIDTH,
        cross_attention_dim_t5=WIDTH,
        pooled_projection_dim=8,
        hidden_size=16,
        text_len=4,
        text_len_t5=4,
        activation_fn="gelu-approximate",
    )
    call = {
        **embeds("prompt_embeds", "prompt_embeds_2"),
        **masks("prompt_attention_mask", "prompt_attention_mask_2"),
        **SIZE,
        "use_resolution_binning": False,
    }
    scheduler = diffusers.DDPMScheduler(beta_schedule="scaled_linear", prediction_type="v_prediction")
    return make(diffusers.HunyuanDiTPipeline, transformer=transformer, vae=Pooling(4), scheduler=scheduler), call


@host()
def kandinsky_v22() -> Any:
    unet = tiny.unet_condition(
        cross_attention_dim=WIDTH,
        out_channels=8,
        encoder_hid_dim=8,
        encoder_hid_dim_type="image_proj",
        addition_embed_type="image",
    )
    generator = torch.Generator().manual_seed(1)
    call = {name: torch.randn(2, 8, generator=generator) for name in ("image_embeds", "negative_image_embeds")}
    pipe = make(
        diffusers.KandinskyV22Pipeline,
        unet=unet,
        movq=Pooling(4),
        scheduler=diffusers.DDPMScheduler(beta_schedule="linear"),
    )
    return pipe, {**call, **SIZE}


def cogvideo(cls: type[Any], channels: int = 4, **extra: Any) -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=WIDTH,
        num_layers=1,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=4,
        **extra,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=1.0, timestep_spacing="trailing"
    )
    return make(cls, transformer=transformer, vae=Pooling(4, 2, 4), scheduler=scheduler)


@host(note="zero terminal SNR; frames first")
def cogvideox() -> Any:
    return cogvideo(diffusers.CogVideoXPipeline), {**embeds(), **SIZE, "num_frames": 9}


@host(note="the image's latents are a condition")
def cogvideox_i2v() -> Any:
    call = {**embeds(prompts=1), **SIZE, "num_frames": 9, "image": images(1)}
    return cogvideo(diffusers.CogVideoXImageToVideoPipeline, 8), call


@host(note="shifted SNR, carried as betas")
def cogview3_plus() -> Any:
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=4.0, timestep_spacing="trailing"
    )
    pipe = make(diffusers.CogView3PlusPipeline, transformer=transformer, vae=Pooling(4), scheduler=scheduler)
    return pipe, {**embeds(), **SIZE, "original_size": (16, 16)}


@host(note="predicted variances")
def latte() -> Any:
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=8,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=WIDTH,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        norm_type="ada_norm_single",
        video_length=3,
    )
    pipe = make(diffusers.LattePipeline, transformer=transformer, vae=Pooling(4), scheduler=ddim())
    return pipe, {**embeds(), **SIZE, "video_length": 3, "negative_prompt": None}


@host()
def allegro() -> Any:
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=4,
        caption_channels=WIDTH,
    )
    pipe = make(diffusers.AllegroPipeline, transformer=transformer, vae=Pooling(4, 2, 4), scheduler=ddim())
    return pipe, {**embeds(), **masks("prompt_attention_mask"), **SIZE, "num_frames": 8, "negative_prompt": None}


@host(note="text of each frame on its own rows")
def animatediff() -> Any:
    motion = diffusers.MotionAdapter(
        block_out_channels=(8, 16), motion_layers_per_block=1, motion_norm_num_groups=2, motion_num_attention_heads=2
    )
    pipe = sd(diffusers.StableDiffusionPipeline)
    parts = {"vae": pipe.vae, "unet": pipe.unet, "motion_adapter": motion, "scheduler": ddim()}
    return make(diffusers.AnimateDiffPipeline, **parts), {**embeds(), **SIZE, "num_frames": 4, "guidance_scale": 4.0}


class Arctan(diffusers.SchedulerMixin, diffusers.ConfigMixin):
    """What matters of Stable Audio's own scheduler, which needs a library that is not installed here."""

    @register_to_config
    def __init__(
        self,
        sigma_min: float = 0.3,
        sigma_max: float = 500.0,
        sigma_data: float = 1.0,
        prediction_type: str = "v_prediction",
    ) -> None:
        pass

    def precondition_noise(self, sigma: Tensor) -> Tensor:
        return sigma.atan() / torch.pi * 2


@host(refused="no corrected scheduler tells networks", note="networks are told (2/π) arctan σ")
def stable_audio() -> Any:
    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=4,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=4,
    )
    return make(diffusers.StableAudioPipeline, transformer=transformer, vae=Pooling(4), scheduler=Arctan()), embeds(
        width=4
    )


# --- flow matching: images ----------------------------------------------------------------------------------------


def sd3(cls: type[Any]) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=16,
    )
    return make(cls, transformer=transformer, vae=Pooling(4), scheduler=flow())


@host()
def stable_diffusion_3() -> Any:
    return sd3(diffusers.StableDiffusion3Pipeline), {**embeds(*XL), **SIZE, "guidance_scale": 4.0}


@host(solver=UniPCBh2(2))
def stable_diffusion_3_unipc() -> Any:
    return sd3(diffusers.StableDiffusion3Pipeline), {**embeds(*XL), **SIZE, "guidance_scale": 4.0}


@host(refused="skip_guidance_layers = ", note="a third condition in some steps")
def stable_diffusion_3_skip_layers() -> Any:
    return sd3(diffusers.StableDiffusion3Pipeline), {**embeds(*XL), **SIZE, "skip_guidance_layers": [0]}


@host(solver=UniPCBh2(2), note="strength 1")
def stable_diffusion_3_img2img() -> Any:
    return sd3(diffusers.StableDiffusion3Img2ImgPipeline), {**embeds(*XL), **SIZE, "image": images(), "strength": 1.0}


def flux_net(**extra: Any) -> Any:
    settings = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 1,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": [4, 4, 8],
        "guidance_embeds": True,
        **extra,
    }
    return diffusers.FluxTransformer2DModel(**settings)


def flux_like(cls: type[Any], **extra: Any) -> Any:
    return make(cls, transformer=flux_net(**extra), vae=Pooling(4), scheduler=flow(use_dynamic_shifting=True))


FLUX = {**embeds(*XL, negative=False), **SIZE}


@host(note="embedded guidance")
def flux() -> Any:
    return flux_like(diffusers.FluxPipeline), FLUX


@host(solver=UniPCBh2(2), note="true guidance, two calls a step")
def flux_cfg() -> Any:
    return flux_like(diffusers.FluxPipeline), {**embeds(*XL), **SIZE, "true_cfg_scale": 2.5}


@host(solver=UniPCBh2(2), note="strength 1")
def flux_img2img() -> Any:
    return flux_like(diffusers.FluxImg2ImgPipeline), {**FLUX, "image": images(), "strength": 1.0}


@host(refused="changes the state between steps", note="latents are blended after every step")
def flux_inpaint() -> Any:
    return flux_like(diffusers.FluxInpaintPipeline), {**FLUX, "image": images(), "mask_image": hole(), "strength": 1.0}


@host(note="mask and masked image are conditions")
def flux_fill() -> Any:
    pipe = flux_like(diffusers.FluxFillPipeline, in_channels=48, out_channels=16)
    return pipe, {**FLUX, "image": images(), "mask_image": hole()}


@host(solver=UniPCBh2(2), note="mask and masked image are conditions")
def flux_fill_unipc() -> Any:
    return flux_fill()


@host(note="the control image's latents are a condition")
def flux_control() -> Any:
    pipe = flux_like(diffusers.FluxControlPipeline, in_channels=32, out_channels=16)
    return pipe, {**FLUX, "control_image": images()}


@host(solver=UniPCBh2(2), note="the image's tokens are a condition")
def flux_kontext() -> Any:
    call = {
        **embeds(*XL, negative=False, prompts=1),
        **SIZE,
        "image": images(1),
        "max_area": 256,
        "_auto_resize": False,
    }
    return flux_like(diffusers.FluxKontextPipeline), call


@host(note="the ControlNet is evaluated beside the network")
def flux_controlnet() -> Any:
    controlnet = diffusers.FluxControlNetModel.from_transformer(
        flux_net(), num_layers=1, num_single_layers=0, attention_head_dim=16, num_attention_heads=1
    )
    nn.init.normal_(controlnet.controlnet_blocks[0].weight, std=0.3)
    pipe = make(
        diffusers.FluxControlNetPipeline,
        transformer=flux_net(),
        vae=Pooling(4),
        scheduler=flow(),
        controlnet=controlnet,
    )
    return pipe, {**FLUX, "control_image": images()}


def flux2_net(**extra: Any) -> Any:
    return diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        timestep_guidance_channels=8,
        axes_dims_rope=[4, 4, 4, 4],
        **extra,
    )


@host(note="embedded guidance")
def flux2() -> Any:
    pipe = make(
        diffusers.Flux2Pipeline, transformer=flux2_net(), vae=Pooling(4), scheduler=flow(use_dynamic_shifting=True)
    )
    return pipe, {**embeds(negative=False), **SIZE}


@host()
def flux2_klein() -> Any:
    parts = {"transformer": flux2_net(guidance_embeds=False), "scheduler": flow(use_dynamic_shifting=True)}
    return make(diffusers.Flux2KleinPipeline, vae=Pooling(4), **parts), {**embeds(), **SIZE}


@host()
def chroma() -> Any:
    transformer = diffusers.ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=[4, 4, 8],
        approximator_hidden_dim=8,
        approximator_layers=1,
        approximator_num_channels=16,
    )
    pipe = make(diffusers.ChromaPipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    return pipe, {**embeds(), **masks("prompt_attention_mask", dtype=torch.bool), **SIZE, "guidance_scale": 4.0}


@host(note="normalised guidance")
def qwen_image() -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 4, 4),
    )
    pipe = make(
        diffusers.QwenImagePipeline, transformer=transformer, vae=Pooling(4), scheduler=flow(use_dynamic_shifting=True)
    )
    return pipe, {**embeds(), **masks("prompt_embeds_mask"), **SIZE, "true_cfg_scale": 4.0}


@host(note="c + w (c − u)")
def krea2() -> Any:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        timestep_embed_dim=8,
        text_hidden_dim=WIDTH,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )
    pipe = make(
        diffusers.Krea2Pipeline,
        transformer=transformer,
        vae=Pooling(4),
        scheduler=flow(use_dynamic_shifting=True),
        text_encoder_select_layers=(0, 1, 2),
    )
    generator = torch.Generator().manual_seed(1)
    text = {f"{sign}prompt_embeds": torch.randn(2, 4, 3, WIDTH, generator=generator) for sign in ("", "negative_")}
    return pipe, {**text, **masks("prompt_embeds_mask", dtype=torch.bool), **SIZE, "guidance_scale": 4.0}


@host()
def bria() -> Any:
    transformer = diffusers.BriaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=None,
        axes_dims_rope=[0, 4, 4],
    )
    pipe = make(
        diffusers.BriaPipeline, transformer=transformer, vae=Pooling(4), scheduler=flow(use_dynamic_shifting=True)
    )
    return pipe, {**embeds(), **SIZE, "guidance_scale": 4.0}


@host(note="negated output, time 1 − t, normalised guidance")
def lumina2() -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=1,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=[4, 2, 2],
        axes_lens=[32, 16, 16],
        cap_feat_dim=WIDTH,
    )
    pipe = make(diffusers.Lumina2Pipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    return pipe, {**embeds(), **masks("prompt_attention_mask", dtype=torch.bool), **SIZE}


@host(note="negated output, time 1 − t, a list of states, c + w (c − u)")
def z_image() -> Any:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[64, 16, 16],
    )
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        nn.init.ones_(token)
    pipe = make(diffusers.ZImagePipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    text = {name: list(value) for name, value in embeds().items()}
    return pipe, {**text, **SIZE, "guidance_scale": 3.0}


@host(solver=UniPCBh2(2), note="negated output, time 1 − t, a list of states, no guidance")
def z_image_turbo() -> Any:
    pipe, call = z_image()
    return pipe, {**call, "guidance_scale": 0.0}


@host(note="negated output; text layers come before samples")
def hidream() -> Any:
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=WIDTH,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16),
        llama_layers=(0, 1),
    )
    pipe = make(diffusers.HiDreamImagePipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    pipe.default_sample_size = 8
    generator = torch.Generator().manual_seed(1)
    llama = {
        f"{sign}prompt_embeds_llama3": torch.randn(2, 2, 4, WIDTH, generator=generator) for sign in ("", "negative_")
    }
    return pipe, {**embeds("prompt_embeds_t5", "pooled_prompt_embeds"), **llama, **SIZE, "guidance_scale": 4.0}


@host()
def cogview4() -> Any:
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=4,
        out_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=8,
        condition_dim=4,
    )
    scheduler = flow(use_dynamic_shifting=True, time_shift_type="linear")
    pipe = make(diffusers.CogView4Pipeline, transformer=transformer, vae=Pooling(4), scheduler=scheduler)
    return pipe, {**embeds(length=16), **SIZE, "guidance_scale": 4.0}


@host(solver=UniPCBh2(2))
def cogview4_unipc() -> Any:
    return cogview4()


def sana_net(**extra: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=WIDTH,
        sample_size=8,
        **extra,
    )


SANA = {"use_resolution_binning": False, "negative_prompt": None, "height": 32, "width": 32}


@host()
def sana() -> Any:
    pipe = make(
        diffusers.SanaPipeline,
        transformer=sana_net(),
        vae=Pooling(4, encoder_block_out_channels=[8] * 3),
        scheduler=flow(),
    )
    return pipe, {**embeds(), **masks("prompt_attention_mask"), **SANA, "guidance_scale": 4.0}


@host(refused="time and noise levels are not known", note="SCM scheduler (TrigFlow)")
def sana_sprint() -> Any:
    net = sana_net(guidance_embeds=True, qk_norm="rms_norm_across_heads")
    pipe = make(
        diffusers.SanaSprintPipeline,
        transformer=net,
        vae=Pooling(4, encoder_block_out_channels=[8] * 3),
        scheduler=diffusers.SCMScheduler(),
    )
    return pipe, {**embeds(negative=False), "height": 32, "width": 32}


@host()
def aura_flow() -> Any:
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=WIDTH,
        out_channels=4,
        pos_embed_max_size=64,
    )
    pipe = make(diffusers.AuraFlowPipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    return pipe, {**embeds(), **masks("prompt_attention_mask"), **SIZE, "guidance_scale": 4.0}


@host(refused="neither the network's output", note="guidance on three channels only")
def lumina() -> Any:
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=8,
        num_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        learn_sigma=True,
        cross_attention_dim=WIDTH,
    )
    pipe = make(diffusers.LuminaPipeline, transformer=transformer, vae=Pooling(4), scheduler=flow())
    return pipe, {**embeds(), **masks("prompt_attention_mask"), **SIZE}


# --- flow matching: video -----------------------------------------------------------------------------------------


def ltx_parts() -> dict[str, Any]:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=WIDTH,
    )
    return {"transformer": transformer, "vae": Pooling(8, 4, 4), "scheduler": flow(use_dynamic_shifting=True)}


LTX = {**masks("prompt_attention_mask"), "height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0}


@host(note="tokens of a video")
def ltx() -> Any:
    return make(diffusers.LTXPipeline, **ltx_parts()), {**embeds(), **LTX}


@host(refused="the network answers", note="the first frame is given, not made")
def ltx_i2v() -> Any:
    call = {**embeds(prompts=1), **LTX, **masks("prompt_attention_mask", prompts=1), "image": images(1, 32)}
    return make(diffusers.LTXImageToVideoPipeline, **ltx_parts()), call


@host(note="embedded guidance")
def hunyuan_video() -> Any:
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(2, 4, 2),
    )
    pipe = make(
        diffusers.HunyuanVideoPipeline, transformer=transformer, vae=Pooling(4, 2, 4), scheduler=flow(shift=7.0)
    )
    call = {**embeds(*XL, negative=False), **masks("prompt_attention_mask", negative=False)}
    return pipe, {**call, **SIZE, "num_frames": 9}


@host(note="condition channels; the guider's weight is found")
def hunyuan_video_15() -> Any:
    transformer = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    )
    guider = diffusers.ClassifierFreeGuidance(guidance_scale=3.0)
    pipe = make(
        diffusers.HunyuanVideo15Pipeline,
        transformer=transformer,
        vae=Pooling(4, 4, 4),
        scheduler=flow(shift=7.0),
        guider=guider,
    )
    call = {**embeds("prompt_embeds", "prompt_embeds_2"), **masks("prompt_embeds_mask", "prompt_embeds_mask_2")}
    return pipe, {**call, **SIZE, "num_frames": 5}


@host(note="sigmas inverted: time 1 − t, output negated by the scheduler")
def mochi() -> Any:
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=1,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=WIDTH,
        time_embed_dim=4,
        max_sequence_length=4,
    )
    nn.init.normal_(transformer.pos_frequencies)
    pipe = make(
        diffusers.MochiPipeline, transformer=transformer, vae=Pooling(4), scheduler=flow(shift=1.0, invert_sigmas=True)
    )
    call = {**embeds(), **masks("prompt_attention_mask", dtype=torch.bool), "height": 64, "width": 64}
    return pipe, {**call, "num_frames": 7, "guidance_scale": 3.0}


def wan_net(cls: type[Any] = diffusers.WanTransformer3DModel, **extra: Any) -> Any:
    settings = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": WIDTH,
        "freq_dim": 16,
        "ffn_dim": 16,
        "num_layers": 1,
        "rope_max_seq_len": 32,
        **extra,
    }
    return cls(**settings)


def wan_parts(**extra: Any) -> dict[str, Any]:
    scheduler = diffusers.UniPCMultistepScheduler(
        use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0, num_train_timesteps=1000
    )
    return {"transformer": wan_net(), "vae": Pooling(4, 2, 4, video=True), "scheduler": scheduler, **extra}


WAN = {**embeds(), **SIZE, "num_frames": 9, "guidance_scale": 4.0}


@host(solver=UniPCBh2(2))
def wan() -> Any:
    return make(diffusers.WanPipeline, **wan_parts()), WAN


@host(solver=UniPCBh2(2), note="Wan2.2-5B: a time for each token")
def wan_22_5b() -> Any:
    return make(diffusers.WanPipeline, **wan_parts(), expand_timesteps=True), WAN


@host(solver=UniPCBh2(2), note="Wan2.2-A14B: another network and weight below a boundary")
def wan_22_a14b() -> Any:
    pipe = make(diffusers.WanPipeline, **wan_parts(transformer_2=wan_net()), boundary_ratio=0.875)
    return pipe, {**WAN, "guidance_scale_2": 3.0}


@host(solver=UniPCBh2(2), note="the image's latents are a condition")
def wan_i2v() -> Any:
    pipe = make(diffusers.WanImageToVideoPipeline, **wan_parts(transformer=wan_net(in_channels=12)))
    return pipe, {**WAN, **embeds(prompts=1), "image": images(1)}


@host(solver=UniPCBh2(2), refused="several times at once", note="Wan2.2-5B: the first frame is given")
def wan_22_5b_i2v() -> Any:
    pipe = make(diffusers.WanImageToVideoPipeline, **wan_parts(), expand_timesteps=True)
    return pipe, {**WAN, **embeds(prompts=1), "image": images(1)}


@host(solver=UniPCBh2(2))
def wan_vace() -> Any:
    net = wan_net(diffusers.WanVACETransformer3DModel, num_layers=2, vace_layers=[0], vace_in_channels=24)
    call = {**WAN, **embeds(prompts=1), "height": 32, "width": 32}
    return make(diffusers.WanVACEPipeline, **wan_parts(transformer=net, vae=Pooling(4, 4, 4))), call


@host(solver=UniPCBh2(2))
def skyreels_v2() -> Any:
    return make(
        diffusers.SkyReelsV2Pipeline, **wan_parts(transformer=wan_net(diffusers.SkyReelsV2Transformer3DModel))
    ), WAN


@host()
def sana_video() -> Any:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=WIDTH,
        sample_size=8,
        patch_size=(1, 2, 2),
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    pipe = make(diffusers.SanaVideoPipeline, transformer=transformer, vae=Pooling(4, 2, 4), scheduler=flow())
    return pipe, {**embeds(), **masks("prompt_attention_mask"), **SANA, "frames": 9, "guidance_scale": 4.0}


@host(note="channels last")
def kandinsky5() -> Any:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=WIDTH,
        in_text_dim2=WIDTH,
        time_dim=16,
        out_visual_dim=4,
        patch_size=(1, 2, 2),
        model_dim=16,
        ff_dim=16,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 2, 2),
        visual_cond=False,
        attention_type="regular",
    )
    pipe = make(diffusers.Kandinsky5T2VPipeline, transformer=transformer, vae=Pooling(4, 2, 4), scheduler=flow())
    generator = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {}
    for sign in ("", "negative_"):
        call[f"{sign}prompt_embeds_qwen"] = torch.randn(2, 4, WIDTH, generator=generator)
        call[f"{sign}prompt_embeds_clip"] = torch.randn(2, WIDTH, generator=generator)
        call[f"{sign}prompt_cu_seqlens"] = torch.tensor([0, 4, 8], dtype=torch.int32)
    return pipe, {**call, **SIZE, "num_frames": 9, "guidance_scale": 3.0}
