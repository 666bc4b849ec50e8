"""Features that need no weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RandomFeatures:
    """Features of a fixed random convolutional network, one vector for each 10×10 neighbourhood.

    Needs no weights: the network is drawn from a fixed seed on the CPU. A vector for each place rather than for each
    image makes covariances of some dozens of images well conditioned. Their unit is arbitrary; `scale` puts distances
    between sets of natural images in the tens.

    Shapes: `(B, C, H, W)` → `(B · H/4 · W/4, width)`.

    Args:
        channels: of the images.
        width: number of features.
    """

    name = "random features"
    scale = 32.0

    def __init__(self, channels: int, width: int = 48) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kernels = []
        for size_in, size_out in ((channels, 32), (32, width)):
            kernel = torch.empty(size_out, size_in * 16)
            nn.init.orthogonal_(kernel, generator=generator)
            self.kernels.append(kernel.reshape(size_out, size_in, 4, 4))

    def __call__(self, images: Tensor) -> Tensor:
        h = images
        for kernel in self.kernels:
            h = nn.functional.conv2d(h, kernel.to(h), stride=2, padding=1).abs()
        return self.scale * h.movedim(1, -1).flatten(0, 2)
