r"""Feature networks: FID's Inception, DINOv2, and a random network that needs no weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class WeightsUnavailable(RuntimeError):
    """Pretrained weights cannot be had here: the figure that needs them is not measured."""


def pretrained(name: str, build: Callable[[], Any]) -> nn.Module:
    """The network `build` makes, in evaluation mode and frozen."""
    try:
        network: nn.Module = build()
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsUnavailable(f"{name}: weights not available ({reason})") from error
    return network.eval().requires_grad_(False)


class ImageNetInput(nn.Module):
    """A network on images of bytes: antialiased bicubic resize to a square, then ImageNet's mean and deviation.

    Shapes: images (B, 3, H, W) uint8 → whatever the network returns for (B, 3, size, size).
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


def _hub_dinov2() -> Any:
    return torch.hub.load("facebookresearch/dinov2", "dinov2_vitl14", trust_repo=True, verbose=False)


def dinov2_features(device: torch.device | str = "cpu", *, build: Callable[[], Any] = _hub_dinov2) -> ImageNetInput:
    """DINOv2 ViT-L/14 class-token features, on bytes: (B, 3, H, W) uint8 → (B, 1024). For FD-DINOv2.

    References: Stein et al. (2023), arXiv:2306.04675; Oquab et al. (2023), arXiv:2304.07193.
    """
    return ImageNetInput(pretrained("DINOv2 ViT-L/14", build), size=224).to(device)


def resize_matrix(source: int, target: int) -> Tensor:
    """Bilinear resampling along one axis as a float64 matrix (target, source), in the convention of that graph.

    Output i reads position p = i · source/target, without the half-pixel shift later libraries use:
    y_i = (1 − w) x_⌊p⌋ + w x_{min(⌊p⌋ + 1, source − 1)}, w = p − ⌊p⌋.
    """
    position = torch.arange(target, dtype=torch.float64) * source / target
    low = position.floor().long()
    high = (low + 1).clamp(max=source - 1)
    weight = position - low
    matrix = torch.zeros(target, source, dtype=torch.float64)
    rows = torch.arange(target)
    matrix[rows, low] += 1 - weight
    matrix[rows, high] += weight
    return matrix


class InceptionFeatures(nn.Module):
    """Images of bytes to the 2048 pool features: resize to 299×299, (x − 128)/128, network.

    The resize is exact, and convolutions run in full float32 unless `tf32` lets a GPU multiply in TF32: over twice as
    fast, features differ by about 1e-4 of their size. The module is a feature function for `Moments.stream` and a
    custom `feature` for `torchmetrics.image.fid.FrechetInceptionDistance`.

    Shapes: images (B, 3, H, W) uint8 (or float in [0, 255]) → (B, 2048).

    Reference: Szegedy et al. (2015), arXiv:1512.00567.
    """

    num_features = 2048

    def __init__(self, network: nn.Module, size: int = 299, *, tf32: bool = False) -> None:
        super().__init__()
        self.network, self.size, self.tf32 = network.eval(), size, tf32

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu", *, tf32: bool = False) -> InceptionFeatures:
        """Read the TorchScript network from a file."""
        if not path.is_file():
            raise FileNotFoundError(f"Inception network {path}: no such file")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit")
                return cls(torch.jit.load(path, map_location=device), tf32=tf32)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"Inception network {path}: not a whole TorchScript file ({reason})") from error

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must have shape (B, 3, H, W), got {tuple(images.shape)}")
        rows, columns = (resize_matrix(side, self.size).to(images.device) for side in images.shape[2:])
        x = ((rows @ images.double() @ columns.T - 128) / 128).float()
        if x.device.type == "cpu":  # faster there
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=self.tf32):
            return self.network(x)


class RandomFeatures:
    """Features of a fixed random convolutional network, one vector for each 10×10 neighbourhood.

    Needs no weights: the network is drawn from a fixed seed on the CPU. A vector for each place rather than for each
    image makes covariances of some dozens of images well conditioned. Their unit is arbitrary; `scale` puts distances
    between sets of natural images in the tens.

    Shapes: `(B, C, H, W)` → `(B · H/4 · W/4, width)`.
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
