"""DiT-XL/2 on ImageNet in a few steps: class labels instead of prompts, predicted variances left aside.

    python examples/diffusers_dit.py --nfe 8 --out dit            # needs the hub (or its cache) and a GPU
    python examples/diffusers_dit.py --tiny --out /tmp/dit        # the same script, tiny random networks, offline

The whole pipeline is saved with its calibration and loaded again, as one would to share it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch
from diffusers import DiTPipeline

from steindiff.calibrating import Recipe
from steindiff.integrations import diffusers as stein

MODEL = "facebook/DiT-XL-2-256"
QUICK = Recipe(seeds=range(4), steps=6, search=None)
"""For tiny networks only: a real one deserves the default."""
LABELS = [207, 360, 387, 974]


def load(small: bool) -> tuple[Any, dict[str, Any]]:
    """The pipeline, and how thoroughly to calibrate."""
    if small:
        return tiny.dit(), {"recipe": QUICK}
    return DiTPipeline.from_pretrained(MODEL).to("cuda"), {"batch": 8}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nfe", type=int, default=8, help="network evaluations of a run")
    parser.add_argument("--guidance", type=float, default=4.0, help="classifier-free guidance")
    parser.add_argument("--out", type=Path, default=Path("dit"), help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="tiny random networks, offline")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pipe, effort = load(options.tiny)
    call = {"class_labels": LABELS, "guidance_scale": options.guidance}
    calibration = stein.calibrate(pipe, nfe=options.nfe, **effort, **call)
    stein.stabilize(pipe, calibration)
    pipe.save_pretrained(options.out / "pipeline")

    # Importing steindiff.integrations.diffusers first is what lets diffusers find the scheduler's class.
    again = DiTPipeline.from_pretrained(options.out / "pipeline").to(pipe.device)
    stein.stabilize(again)  # checks the network, and the guidance of every run
    images = again(num_inference_steps=options.nfe, generator=torch.Generator().manual_seed(0), **call).images
    for label, image in zip(LABELS, images, strict=True):
        image.save(options.out / f"{label}.png")
    print(f"{options.out}: pipeline/, one image for each of {LABELS}")


if __name__ == "__main__":
    main()
