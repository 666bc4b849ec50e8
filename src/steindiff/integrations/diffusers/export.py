r"""The networks of the zoo as diffusers pipelines, to be saved, loaded and sampled like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline, ImagePipelineOutput
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_edm_dpmsolver_multistep import EDMDPMSolverMultistepScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from steindiff.calibration import Calibration
from steindiff.integrations.diffusers.networks import Guidance, denoiser, identify
from steindiff.integrations.diffusers.pipelines import scheduler_for, stabilize
from steindiff.integrations.diffusers.schedulers import PUBLIC
from steindiff.model import Model
from steindiff.solvers import DPMSolverMultistep
from steindiff.zoo import EDMPrecond, UNet, UNetConfig, VPNoise


class ZooOutput(NamedTuple):
    """A model's output, `(B, C, H, W)`, as diffusers models return it."""

    sample: Tensor


class ZooUNet2DModel(ModelMixin, ConfigMixin):  # type: ignore[misc]
    r"""The raw U-Net F(x, a t + b, label) as a diffusers model; label K, and no label, is the null label.

    Arguments as in `steindiff.zoo.UNetConfig`; `time_scale` is a, `time_shift` b, t the scheduler's timestep.
    """

    @register_to_config
    def __init__(
        self,
        shape: Sequence[int],
        num_classes: int,
        channels: Sequence[int],
        blocks: int,
        attention: Sequence[bool],
        head: int = 64,
        embedding: int = 256,
        groups: int = 32,
        octaves: Sequence[float] = (-2.0, 4.0),
        time_scale: float = 1.0,
        time_shift: float = 0.0,
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {field.name: self.config[field.name] for field in fields(UNetConfig)}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list | tuple)}
        self.network = UNet(UNetConfig(**{**given, **lists}))

    def forward(
        self, sample: Tensor, timestep: Tensor | float, class_labels: Tensor | None = None, return_dict: bool = True
    ) -> ZooOutput | tuple[Tensor]:
        """Evaluate at states `(B, C, H, W)`, timesteps `(B,)` or one for all, and labels `(B,)`."""
        times = torch.as_tensor(timestep, device=sample.device).expand(len(sample)).float()
        position = self.config["time_scale"] * times + self.config["time_shift"]
        out = self.network(sample, position, class_labels)
        return ZooOutput(out) if return_dict else (out,)


class ClassConditionalPipeline(DiffusionPipeline):
    """Images by label from a `ZooUNet2DModel` and any scheduler, with classifier-free guidance."""

    model_cpu_offload_seq = "unet"  # type: ignore[assignment]

    def __init__(self, unet: ZooUNet2DModel, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int],
        guidance_scale: float = 1.0,
        num_inference_steps: int = 8,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Sample one image for each label.

        Args:
            class_labels: labels.
            guidance_scale: w; 1 is the conditional model.
            num_inference_steps: of the scheduler.
            generator: of the first noise.
            latents: the first noise, of unit variance, `(B, C, H, W)`.
            output_type: "pil", "np", "pt" (images in [0, 1]) or "latent" (the state itself).
            return_dict: return an `ImagePipelineOutput` instead of a tuple.
        """
        device, shape = self._execution_device, tuple(self.unet.config.shape)
        labels = torch.as_tensor(list(class_labels), device=device)
        conditions = labels
        if guidance_scale != 1.0:
            conditions = torch.cat([torch.full_like(labels, self.unet.config.num_classes), labels])
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        if latents is None:
            latents = randn_tensor((len(labels), *shape), generator=generator, device=device, dtype=self.unet.dtype)
        x = latents.to(device) * self.scheduler.init_noise_sigma
        for t in self.progress_bar(self.scheduler.timesteps):
            inputs = torch.cat([x] * (len(conditions) // len(labels)))
            inputs = self.scheduler.scale_model_input(inputs, t).to(self.unet.dtype)
            out = self.unet(inputs, t, class_labels=conditions, return_dict=False)[0]
            if guidance_scale != 1.0:
                unconditional, conditional = out.chunk(2)
                out = unconditional + guidance_scale * (conditional - unconditional)
            x = self.scheduler.step(out, t, x, return_dict=False)[0]
        self.maybe_free_model_hooks()
        if output_type != "latent":
            x = (x / 2 + 0.5).clamp(0, 1)
        if output_type in ("pil", "np"):
            x = x.float().permute(0, 2, 3, 1).cpu().numpy()
        images = self.numpy_to_pil(x) if output_type == "pil" else x
        return ImagePipelineOutput(images=images) if return_dict else (images,)


for _ in (ZooUNet2DModel, ClassConditionalPipeline):
    _.__module__ = PUBLIC


def export(network: EDMPrecond | VPNoise, calibration: Calibration | None = None) -> ClassConditionalPipeline:
    """A network of the zoo as a diffusers pipeline.

    Args:
        network: from `steindiff.zoo.load`; its parameters are shared, not copied.
        calibration: installed, e.g. one that ships with the network; None: plain DPM-Solver++(2M).
    """
    time = {} if isinstance(network, EDMPrecond) else {"time_scale": 2.0 / network.steps, "time_shift": -1.0}
    with torch.device("meta"):
        unet = ZooUNet2DModel(**asdict(network.config), **time)
    unet.network = network.network
    stock: Any = EDMDPMSolverMultistepScheduler(sigma_data=getattr(network, "sigma_data", 0.5))
    if isinstance(network, VPNoise):
        stock = DDIMScheduler(network.steps, *network.betas)
    pipe = ClassConditionalPipeline(unet.eval(), scheduler_for(stock, DPMSolverMultistep(2)))
    if calibration is not None:
        first = torch.zeros(1, dtype=torch.int64, device=unet.device)  # the label of seed 0
        own = denoiser(unet, pipe.scheduler, class_labels=first)
        calibration.check(Model(own, calibration.levels.schedule, network.shape, device=unet.device))
        known = {"network": identify(unet), "guidance": asdict(Guidance())}
        stabilize(pipe, replace(calibration, conditions={**calibration.conditions, **known}))
    return pipe
