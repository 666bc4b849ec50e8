"""Stable Diffusion XL in a few steps: calibrate once, then sample at no extra cost.

    python examples/diffusers_sdxl.py --nfe 8 --out sdxl          # needs the hub (or its cache) and a GPU
    python examples/diffusers_sdxl.py --tiny --out /tmp/sdxl      # the same script, tiny random networks, offline

Writes the calibration (a small JSON file, reused if it is there), and one image per prompt for the stock
DPM-Solver++(2M) and for the calibrated one, from the same noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch

from steindiff.calibrating import Recipe
from steindiff.calibration import Calibration
from steindiff.integrations import diffusers as stein

MODEL = "stabilityai/stable-diffusion-xl-base-1.0"
QUICK = Recipe(seeds=range(4), steps=6, search=None)
"""For tiny networks only: a real one deserves the default."""
PROMPTS = [
    "a lighthouse on a cliff at dawn, oil painting",
    "close-up photograph of a dragonfly on a reed",
    "an old market street in the rain, film still",
    "a bowl of lemons on a wooden table, still life",
]


def load(small: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The pipeline, the arguments of its call, and how thoroughly to calibrate."""
    if small:
        call = {**tiny.embeddings(pooled=True), "height": 16, "width": 16}
        return tiny.stable_diffusion_xl(), call, {"recipe": QUICK}
    from diffusers import StableDiffusionXLPipeline

    pipe = StableDiffusionXLPipeline.from_pretrained(MODEL, torch_dtype=torch.float16, variant="fp16").to("cuda")
    return pipe, {"prompt": PROMPTS}, {"batch": 1}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nfe", type=int, default=8, help="network evaluations of a run")
    parser.add_argument("--guidance", type=float, default=5.0, help="classifier-free guidance")
    parser.add_argument("--out", type=Path, default=Path("sdxl"), help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="tiny random networks, offline")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pipe, call, effort = load(options.tiny)
    call["guidance_scale"] = options.guidance
    file = options.out / f"calibration-{options.nfe}.json"
    if file.exists():
        calibration = Calibration.load(file)
    else:
        calibration = stein.calibrate(pipe, nfe=options.nfe, **effort, **call)
        calibration.save(file)

    pipe.scheduler = stein.scheduler_for(pipe.scheduler, calibration.solver)
    for name in ("stock", "calibrated"):
        if name == "calibrated":
            stein.stabilize(pipe, calibration)
        steps = calibration.levels.steps
        images = pipe(num_inference_steps=steps, generator=torch.Generator().manual_seed(0), **call).images
        for k, image in enumerate(images):
            image.save(options.out / f"{name}-{k}.png")
    print(f"{options.out}: {file.name}, stock-*.png, calibrated-*.png")


if __name__ == "__main__":
    main()
