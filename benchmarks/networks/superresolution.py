"""A strongly conditional toy: Fashion-MNIST at 16×16 given its 4×4 average, an EDM denoiser.

Eight consecutive seeds share one low-resolution picture, so spread within a condition can be measured: the picture
fixes nearly everything, what varies are the details.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import pieces
from steindiff import EDM, EDMDenoiser, Model
from steindiff.denoisers.base import Denoiser
from steindiff.denoisers.prediction import precondition
from steindiff.zoo import UNet, UNetConfig

NAME = "superresolution"
SHAPE = (1, 16, 16)
SIGMA_DATA = 0.6
SEEDS_PER_CONDITION = 8
PICTURES = 512
"""Low-resolution pictures kept with the weights: the first test images."""


def prepared(images: Tensor) -> Tensor:
    """Bytes (N, 1, 28, 28) to [−1, 1], padded to 32×32 and averaged to (N, 1, 16, 16)."""
    return F.avg_pool2d(F.pad(images.float() / 127.5 - 1, (2, 2, 2, 2), value=-1.0), 2)


def lowered(x: Tensor) -> Tensor:
    """The condition of an image: its 4×4 averages, (N, 1, 4, 4)."""
    return F.avg_pool2d(x, 4)


class SuperResolution(nn.Module):
    """D(x, σ, low): x (B, 1, 16, 16), sigma (B,), low (B, 1, 4, 4) → (B, 1, 16, 16)."""

    pictures: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = UNet(
            UNetConfig(
                shape=(2, 16, 16),
                num_classes=0,
                channels=(32, 64),
                blocks=1,
                attention=(False, True),
                head=32,
                embedding=64,
                groups=8,
            )
        )
        self.register_buffer("pictures", torch.zeros(PICTURES, 1, 4, 4))

    def forward(self, x: Tensor, sigma: Tensor, low: Tensor) -> Tensor:
        """Denoise x given its low-resolution picture."""
        wide = F.interpolate(low.to(x), size=SHAPE[1:], mode="nearest")

        def inner(z: Tensor, c_noise: Tensor) -> Tensor:
            return self.network(torch.cat([z, wide], dim=1), c_noise)[:, :1]

        return precondition(inner, x, sigma, SIGMA_DATA)


def condition(seed: int) -> int:
    """The picture of a seed."""
    return seed // SEEDS_PER_CONDITION % PICTURES


def load(device: torch.device | str = "cpu", folder: Path = Path(__file__).parent) -> Model:
    """The trained network as a model; eight consecutive seeds share a picture."""
    network = SuperResolution()
    network.load_state_dict(pieces.read(pieces.found(folder, NAME)))
    network.to(device).eval().requires_grad_(False)

    def denoiser(seeds: Sequence[int]) -> Denoiser:
        low = network.pictures[[condition(seed) for seed in seeds]]
        return EDMDenoiser(lambda x, sigma: network(x, sigma, low))

    return Model(denoiser, EDM(), SHAPE, device=device, name=NAME, condition=condition)
