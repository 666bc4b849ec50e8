r"""LPIPS: perceptual distance of two images, by the features of VGG-16.

Reference: Zhang et al. (2018), arXiv:1801.03924.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steindiff import _weights as weights

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Widths of the convolutions of each stage; the sides are halved in between."""
SMALLEST = 16
"""Side of the smallest image that leaves a pixel to every stage."""
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)
"""ImageNet's mean and deviation of pixels in [−1, 1]."""


class LPIPS(nn.Module):
    r"""d(x, y) = Σ_l mean_{h,w} Σ_c w_{lc} (x̂_l − ŷ_l)²_c, x̂_l the features of stage l of unit length at each pixel.

    Shapes: x and y (B, 3, H, W) or (B, 1, H, W) in [−1, 1] → (B,). H, W >= 16.

    Args:
        stages: widths of the trunk's convolutions.
    """

    def __init__(self, stages: Sequence[Sequence[int]] = VGG16) -> None:
        super().__init__()
        widths = [3, *(width for stage in stages for width in stage)]
        self.stages = tuple(len(stage) for stage in stages)
        self.trunk = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.heads = nn.ParameterList(torch.ones(stage[-1]) for stage in stages)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> LPIPS:
        """The published network from the file `datasets.lpips` keeps, frozen."""
        network = cls()
        weights.assign(network, weights.read(path), str(path))
        return network.to(device).eval().requires_grad_(False)

    def features(self, x: Tensor) -> list[Tensor]:
        """Features of each stage, of unit length at each pixel."""
        x = x.expand(-1, 3, -1, -1)
        x = (x - x.new_tensor(SHIFT)[:, None, None]) / x.new_tensor(SCALE)[:, None, None]
        out, layers = [], iter(self.trunk)
        for stage, convolutions in enumerate(self.stages):
            x = F.max_pool2d(x, 2) if stage else x
            for _ in range(convolutions):
                x = F.relu(next(layers)(x))
            out.append(x / (x.norm(dim=1, keepdim=True) + 1e-10))
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The distance of each pair."""
        if x.shape != y.shape or x.ndim != 4 or x.shape[1] not in (1, 3):
            raise ValueError(f"x and y must both be (B, 1 or 3, H, W), got {tuple(x.shape)} and {tuple(y.shape)}")
        pairs = zip(self.heads, self.features(x), self.features(y), strict=True)
        parts = [((a - b).square() * w[:, None, None]).sum(1).mean((1, 2)) for w, a, b in pairs]
        return torch.stack(parts).sum(0)
