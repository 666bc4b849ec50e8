"""What distances between sets of images are measured by: features, and real images where they are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from steindiff import datasets
from steindiff.comparison import Yardstick
from steindiff.images import to_uint8
from steindiff.metrics import LPIPS, InceptionFeatures, RandomFeatures, references
from steindiff.model import Model

MOMENTS = Path(__file__).parent / "moments"
"""Moments of the embedded models' training images under `RandomFeatures`; benchmarks/demo_reference.py makes them."""


class InceptionPool:
    """The features of FID proper, for images in [−1, 1]; grey ones count as three equal channels."""

    name = "Inception features (FID)"

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self.network = InceptionFeatures.load(datasets.inception(), device)

    def __call__(self, images: Tensor) -> Tensor:
        pixels = to_uint8(images).expand(-1, 3, -1, -1)
        features: Tensor = self.network(pixels.to(self.device)).cpu()
        return features


def lpips(model: Model) -> LPIPS | None:
    """The network of LPIPS where its weights are in the cache: a comparison downloads nothing."""
    path = datasets.cache() / datasets.LPIPS_FILE
    return LPIPS.load(path, model.device) if path.is_file() else None


def by_random_features(model: Model, channels: int) -> Yardstick:
    """Nothing to download; meaningful from some dozens of images on."""
    path = MOMENTS / f"{model.name}.npz"
    return Yardstick(RandomFeatures(channels), references.read(path) if path.exists() else None, lpips(model))


def by_inception(model: Model, channels: int) -> Yardstick:
    """FID, with statistics of real images where they ship."""
    path = references.FOLDER / f"{model.name}-train.npz"
    return Yardstick(InceptionPool(model.device), references.read(path) if path.exists() else None, lpips(model))


YARDSTICKS: dict[str, Callable[[Model, int], Yardstick]] = {"random": by_random_features, "inception": by_inception}
"""What the command line's `--features` takes: of a model and the channels of its images."""
