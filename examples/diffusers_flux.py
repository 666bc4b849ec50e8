"""FLUX.1 [dev] in a few steps. Flow matching, guidance as an input of the network, latents kept as tokens.

    python examples/diffusers_flux.py --nfe 10 --out flux         # needs the hub (or its cache) and a GPU
    python examples/diffusers_flux.py --tiny --out /tmp/flux      # the same script, tiny random networks, offline

Calibration takes forward passes only, so the network may be offloaded or compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny
import torch

from steindiff.calibrating import Recipe
from steindiff.integrations import diffusers as stein
from steindiff.solvers import UniPCBh2

MODEL = "black-forest-labs/FLUX.1-dev"
QUICK = Recipe(seeds=range(4), steps=6, search=None)
"""For tiny networks only: a real one deserves the default."""
PROMPTS = ["a cat holding a sign that says hello world", "a paper boat on a stormy sea, macro photograph"]


def load(small: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The pipeline, the arguments of its call, and how thoroughly to calibrate."""
    if small:
        call = {**tiny.embeddings(pooled=True, negative=False), "height": 16, "width": 16}
        return tiny.flux(), call, {"recipe": QUICK}
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()
    call = {"prompt": PROMPTS, "height": 1024, "width": 1024}
    return pipe, call, {"batch": 1}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nfe", type=int, default=10, help="network evaluations of a run")
    parser.add_argument("--out", type=Path, default=Path("flux"), help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="tiny random networks, offline")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pipe, call, effort = load(options.tiny)
    calibration = stein.calibrate(pipe, nfe=options.nfe, solver=UniPCBh2(2), **effort, **call)
    calibration.save(options.out / "calibration.json")
    with stein.stabilize(pipe, calibration):
        images = pipe(num_inference_steps=options.nfe, generator=torch.Generator().manual_seed(0), **call).images
    for k, image in enumerate(images):
        image.save(options.out / f"calibrated-{k}.png")
    print(f"{options.out}: calibration.json, calibrated-*.png")


if __name__ == "__main__":
    main()
