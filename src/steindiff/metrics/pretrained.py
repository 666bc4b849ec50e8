"""Networks whose weights have to be downloaded by their own loaders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class WeightsUnavailable(RuntimeError):
    """Pretrained weights cannot be had here: the figure that needs them is not measured."""


def pretrained(name: str, build: Callable[[], Any]) -> nn.Module:
    """The network `build` makes, in evaluation mode and frozen.

    Args:
        name: What it is, for the message.
        build: A loader, which may import a package or download a file.
    """
    try:
        network: nn.Module = build()
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsUnavailable(f"{name}: weights not available ({reason})") from error
    return network.eval().requires_grad_(False)


class ImageNetInput(nn.Module):
    """A network on images of bytes: antialiased bicubic resize to a square, then ImageNet's mean and deviation.

    Shapes: images (B, 3, H, W) uint8 → whatever the network returns for (B, 3, size, size).

    Args:
        network: The network.
        size: Side of its input.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self.network = network
        self.size = size
        self.register_buffer("mean", torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(STD)[:, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Apply the network."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must have shape (B, 3, H, W), got {tuple(images.shape)}")
        x = F.interpolate(images.float(), size=(self.size, self.size), mode="bicubic", antialias=True)
        return self.network((x.clamp(0, 255) / 255 - self.mean) / self.std)
