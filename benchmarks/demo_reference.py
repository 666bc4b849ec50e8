"""Moments of the real images under the fixed random features `steindiff compare` uses offline.

    python benchmarks/demo_reference.py

Writes one small file per embedded model to the package.
"""

from __future__ import annotations

import training_data
from reference import save
from steindiff import zoo
from steindiff.comparison import RandomFeatures
from steindiff.metrics import Moments
from steindiff.yardsticks import MOMENTS


def main() -> None:
    for name in zoo.names():
        images = training_data.load(name).images
        features = RandomFeatures(images.shape[1])
        moments = Moments.stream((part.float() / 127.5 - 1 for part in images.split(1000)), features)
        save(MOMENTS / f"{name}.npz", moments)
        print(f"{name}: {len(images)} images, {moments.count} neighbourhoods")


if __name__ == "__main__":
    main()
