"""Eight images in five network evaluations each, plain and calibrated, as one picture.

    python examples/few_steps.py

Writes `few_steps.png`: the plain solver above, the shipped calibration below, the same seeds.
"""

from __future__ import annotations

import torch

import steindiff as sd
from steindiff.images import to_image


def main() -> None:
    """Sample and write."""
    model, plain = sd.load("cifar10"), sd.Sampler("dpmpp-2m", grid="edm", nfe=5)
    calibration = sd.shipped_calibration(model, sd.SOLVERS["dpmpp-2m"], 5)
    samplers = [plain] if calibration is None else [plain, calibration.sampler()]
    rows = [torch.cat(list(sampler(model, seeds=range(8)).x), dim=2) for sampler in samplers]
    to_image(torch.cat(rows, dim=1)).save("few_steps.png")


if __name__ == "__main__":
    main()
