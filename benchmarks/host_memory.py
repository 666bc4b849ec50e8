"""Peak memory and time of calibrating a diffusers pipeline, against one plain call of the same pipeline and batch.

    python benchmarks/host_memory.py sdxl flux --device cuda

Networks have the real configuration of SDXL or Flux.1-dev and random weights in bfloat16: memory and time do not depend
on what a network has learnt. They are built on the meta device, so that their weights exist once. Text embeddings are
given, samples stay latents. Peaks are those of `torch.cuda.max_memory_allocated`, weights included.

Memory beyond a plain call is of two kinds: what `calibrate` keeps of the network's inputs and outputs, and what it
keeps of every seed. `--seeds` is small for the real networks; `--small` is a small network on latents of the real size,
where the default number of seeds costs seconds, and shows the second kind alone.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from torch import Tensor, nn

from recording import Records, machine
from steindiff.calibrating import Progress
from steindiff.integrations.diffusers import HOST_RECIPE, calibrate

SIZE = 1024
"""Height and width of the images."""

SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
SMALL_SDXL = SDXL | {"block_out_channels": (32, 32, 64), "attention_head_dim": 4, "transformer_layers_per_block": 1}
SMALL_FLUX = FLUX | {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
SMALL_FLUX["axes_dims_rope"] = (4, 4, 8)


@dataclass(frozen=True)
class Host:
    """A pipeline to be measured.

    Attributes:
        build: the network from its configuration.
        real: configuration of the model that is used.
        small: one of the same inputs and outputs.
        pipeline: the pipeline around a network.
        embeddings: shapes of text embeddings, by argument.
        settings: other arguments of the pipeline's call.
        channels: of a latent.
    """

    build: Callable[..., nn.Module]
    real: dict[str, Any]
    small: dict[str, Any]
    pipeline: Callable[[nn.Module], Any]
    embeddings: dict[str, tuple[int, ...]]
    settings: dict[str, Any]
    channels: int


def sdxl(unet: nn.Module) -> Any:
    """SDXL's pipeline without text encoders and autoencoder."""
    scheduler = EulerDiscreteScheduler(1000, 0.00085, 0.012, "scaled_linear", steps_offset=1)
    nothing = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return StableDiffusionXLPipeline(**nothing, unet=unet, scheduler=scheduler, add_watermarker=False)


def flux(transformer: nn.Module) -> Any:
    """Flux' pipeline without text encoders and autoencoder."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    nothing = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    return FluxPipeline(**nothing, transformer=transformer, scheduler=scheduler)


HOSTS = {
    "sdxl": Host(
        UNet2DConditionModel,
        SDXL,
        SMALL_SDXL,
        sdxl,
        {
            "prompt_embeds": (77, 2048),
            "negative_prompt_embeds": (77, 2048),
            "pooled_prompt_embeds": (1280,),
            "negative_pooled_prompt_embeds": (1280,),
        },
        {"guidance_scale": 5.0},
        4,
    ),
    "flux": Host(
        FluxTransformer2DModel,
        FLUX,
        SMALL_FLUX,
        flux,
        {"prompt_embeds": (512, 4096), "pooled_prompt_embeds": (768,)},
        {"guidance_scale": 3.5},
        16,
    ),
}


def materialised(build: Callable[..., nn.Module], config: dict[str, Any], device: str, dtype: torch.dtype) -> nn.Module:
    """A network with random weights that never exist twice.

    Matrices are N(0, 1/(4 fan-in)), so that depth does not amplify rounding, scales 1, offsets 0.
    """
    with torch.device("meta"):
        network = build(**config).to(dtype)
    assert not list(network.buffers()), "nothing would fill a buffer"
    network = network.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0.0, 0.5 / math.sqrt(weight[0].numel()), generator=generator)
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return network


class Meter:
    """Counts what a network is asked, and measures time and peak memory of a piece of work."""

    def __init__(self, network: nn.Module, device: str) -> None:
        self.calls = self.rows = 0
        self._cuda = device == "cuda"
        network.register_forward_hook(self._asked, with_kwargs=True)

    def _asked(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.calls += 1
        self.rows += len(output[0])

    def __call__(self, work: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
        """What `work` costs, and what it returned."""
        self.calls = self.rows = 0
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        result = work()
        peak = None
        if self._cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        seconds = round(time.perf_counter() - begun, 2)
        return {"peak_bytes": peak, "seconds": seconds, "network_calls": self.calls, "rows": self.rows}, result


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """One record: a plain call and a calibration, of the same pipeline at the same batch."""
    host, dtype = HOSTS[name], getattr(torch, given.dtype)
    network = materialised(host.build, host.small if given.small else host.real, given.device, dtype)
    pipe = host.pipeline(network)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator(given.device).manual_seed(1)
    call: dict[str, Any] = {
        key: torch.randn(given.batch, *shape, generator=generator, device=given.device, dtype=dtype)
        for key, shape in host.embeddings.items()
    }
    call |= {**host.settings, "height": given.size, "width": given.size, "output_type": "latent"}
    meter = Meter(network, given.device)

    def plain() -> Tensor:
        images: Tensor = pipe(**call, num_inference_steps=given.nfe).images
        return images

    deadline, stages = math.inf, set()

    def told(now: Progress) -> bool:
        stages.add(now.stage)
        return time.monotonic() < deadline

    recipe = replace(HOST_RECIPE, seeds=range(10**6, 10**6 + given.seeds))
    with torch.no_grad():
        plain()  # libraries choose their kernels and workspaces
        base, images = meter(plain)
        if not bool(images.isfinite().all()):
            raise SystemExit(f"{name}: the random network's samples are not finite")
        deadline = time.monotonic() + given.seconds
        cost, made = meter(
            lambda: calibrate(pipe, nfe=given.nfe, recipe=recipe, batch=given.batch, progress=told, **call)
        )
    stretches = 2 * recipe.reference_steps([given.nfe]) + 1  # states and denoised images of the fine trajectory
    shape = (host.channels, given.size // 8, given.size // 8)
    peak, before = cost["peak_bytes"], base["peak_bytes"]
    return {
        "host": name,
        "small": given.small,
        "pipeline": type(pipe).__name__,
        "parameters": sum(p.numel() for p in network.parameters()),
        "weights_bytes": sum(p.numel() * p.element_size() for p in network.parameters()),
        "dtype": given.dtype,
        "shape": shape,
        "nfe": given.nfe,
        "batch": given.batch,
        "seeds": [recipe.seeds[0], given.seeds],
        "solver": repr(made.solver),
        "plain": base,
        "calibrate": cost | {"backward_passes": 0, "stopped": made.provenance["stopped"], "stages": sorted(stages)},
        "trajectory_bytes_in_main_memory": stretches * given.seeds * math.prod(shape) * 4,
        "memory_ratio": peak and round(peak / before, 4),
        "memory_added": peak and peak - before,
        **machine(given.device),
        "diffusers": diffusers.__version__,
    }


def main() -> None:
    """Measure the hosts named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("hosts", nargs="+", choices=HOSTS)
    parser.add_argument("--nfe", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4, help="samples in one network call; default: calibrate's own")
    parser.add_argument("--seeds", type=int, default=6, help="calibration samples; calibrate's own default is 32")
    parser.add_argument("--size", type=int, default=SIZE, help="height and width of the images")
    parser.add_argument("--small", action="store_true", help="a small network on the same latents")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop calibrating after this time")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host_memory.json"))
    given = parser.parse_args()
    records = Records(given.out)
    for name in given.hosts:
        identity = {"host": name, "small": given.small, "batch": given.batch, "seeds": [10**6, given.seeds]}
        records.measure([name], lambda _, known=identity: known, lambda cell: measure(cell, given), math.inf)
        if given.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
