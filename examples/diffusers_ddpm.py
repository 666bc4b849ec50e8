"""An unconditional pixel model in a few steps, compared with the stock scheduler; no calibration in the last one.

    python examples/diffusers_ddpm.py --nfe 8 --out ddpm          # needs the hub or its cache
    python examples/diffusers_ddpm.py --tiny --out /tmp/ddpm      # the same script, a tiny random network, offline

Three schedulers on the same noise: stock DPM-Solver++(2M), calibrated, and the analytical relaxation, which needs
neither calibration nor derivatives.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from diffusers import DDPMPipeline

from steindiff.calibrating import Recipe
from steindiff.integrations import diffusers as stein

MODEL = "google/ddpm-cifar10-32"
QUICK = Recipe(seeds=range(4), steps=6, search=None)
"""For tiny networks only: a real one deserves the default."""


def load(small: bool) -> tuple[Any, dict[str, Any]]:
    """The pipeline, and how thoroughly to calibrate."""
    if small:
        return tiny.ddpm(), {"recipe": QUICK}
    pipe = DDPMPipeline.from_pretrained(MODEL)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu"), {"batch": 16}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nfe", type=int, default=8, help="network evaluations of a run")
    parser.add_argument("--out", type=Path, default=Path("ddpm"), help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="a tiny random network, offline")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pipe, effort = load(options.tiny)
    calibration = stein.calibrate(pipe, nfe=options.nfe, **effort, batch_size=4)
    config = stein.scheduler_for(pipe.scheduler, calibration.solver).config
    schedulers = {
        "stock": stein.SteinDPMSolverMultistepScheduler.from_config(config),
        "calibrated": stein.SteinDPMSolverMultistepScheduler.from_config(config, stein_calibration=calibration),
        "analytical": stein.SteinDPMSolverMultistepScheduler.from_config(config, stein_analytical=True),
    }
    for name, scheduler in schedulers.items():
        pipe.scheduler = scheduler
        generator = torch.Generator().manual_seed(0)
        images = pipe(batch_size=4, num_inference_steps=options.nfe, generator=generator).images
        for k, image in enumerate(images):
            image.save(options.out / f"{name}-{k}.png")
    print(f"{options.out}: {', '.join(f'{name}-*.png' for name in schedulers)}")


if __name__ == "__main__":
    main()
