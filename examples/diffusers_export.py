"""The embedded CIFAR-10 model as a diffusers pipeline, calibrated, saved, loaded and sampled. Runs offline.

python examples/diffusers_export.py --nfe 5 --out export
python examples/diffusers_export.py --tiny --out /tmp/export  # the smaller embedded model, a quick calibration
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from steindiff import zoo
from steindiff.calibrating import Recipe
from steindiff.integrations import diffusers as stein

QUICK = Recipe(seeds=range(4), steps=6, search=None)
"""For tiny networks only: a real one deserves the default."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nfe", type=int, default=5, help="network evaluations of a run")
    parser.add_argument("--out", type=Path, default=Path("export"), help="folder for the results")
    parser.add_argument("--tiny", action="store_true", help="the smaller model and a quick calibration")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)

    pipe = stein.export(zoo.load("fashion" if options.tiny else "cifar10"))
    effort = {"recipe": QUICK} if options.tiny else {}
    labels = list(range(10))
    calibration = stein.calibrate(pipe, nfe=options.nfe, class_labels=labels, **effort)
    stein.stabilize(pipe, calibration)
    pipe.save_pretrained(options.out / "pipeline")

    again = stein.ClassConditionalPipeline.from_pretrained(options.out / "pipeline")
    stein.stabilize(again)  # checks the network, and the guidance of every run
    generator = torch.Generator().manual_seed(0)
    images = again(labels, num_inference_steps=calibration.levels.steps, generator=generator).images
    for label, image in zip(labels, images, strict=True):
        image.save(options.out / f"{label}.png")
    print(f"{options.out}: pipeline/, one image for each label")


if __name__ == "__main__":
    main()
