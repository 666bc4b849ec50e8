"""Features of the InceptionV3 network that defines FID (the frozen graph of 2015-12-05, 2048-d pool)."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor, nn


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

    The resize is exact, and convolutions run in full float32 unless `tf32` is asked for. The module is a feature
    function for `Moments.stream` and a custom `feature` for `torchmetrics.image.fid.FrechetInceptionDistance`.

    Shapes: images (B, 3, H, W) uint8 (or float in [0, 255]) → (B, 2048).

    Args:
        network: The network on (B, 3, 299, 299) in [−1, 1); by `load`, the TorchScript file.
        size: Side of the network's input.
        tf32: Let a GPU multiply in TF32: over twice as fast, features differ by about 1e-4 of their size.

    References:
        | Rethinking the Inception Architecture for Computer Vision (Szegedy et al., 2015)
        | https://arxiv.org/abs/1512.00567
    """

    num_features = 2048

    def __init__(self, network: nn.Module, size: int = 299, *, tf32: bool = False) -> None:
        super().__init__()
        self.network = network.eval()
        self.size = size
        self.tf32 = tf32

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu", *, tf32: bool = False) -> InceptionFeatures:
        """Read the TorchScript network from a file."""
        if not path.is_file():
            raise FileNotFoundError(f"Inception network {path}: no such file")
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
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
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=self.tf32):
            return self.network(x)
