"""Reference statistics on disk: mean, and the upper triangle of the covariance, in float32."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import numpy as np
import torch

from steindiff._discovery import named
from steindiff.metrics.frechet import Moments

FOLDER = Path(__file__).parent / "reference"
"""The statistics that ship with the package."""
MOST = 2**53
"""More samples than float64 can count cannot have been measured."""


def read(path: Path) -> Moments:
    """Read statistics: `count`, `mean` (F,), `covariance` (F(F + 1)/2,)."""
    if not path.is_file():
        raise FileNotFoundError(f"reference statistics {path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:
            count = int(_array(archive, "count"))
            mean, upper = _array(archive, "mean"), _array(archive, "covariance")
    except Exception as error:  # readers of damaged files end in anything
        raise RuntimeError(f"reference statistics {path}: truncated or altered ({error})") from error
    size = mean.size
    if mean.shape != (size,) or upper.shape != (size * (size + 1) // 2,):
        raise RuntimeError(f"reference statistics {path}: covariance {upper.shape} does not fit mean {mean.shape}")
    sound = mean.dtype == upper.dtype == np.float32 and np.isfinite(mean).all() and np.isfinite(upper).all()
    if not sound or not size or not 2 <= count <= MOST:
        raise RuntimeError(f"reference statistics {path}: count = {count}, need 2 to 2^53, and finite float32 numbers")
    covariance = np.zeros((size, size))
    covariance[np.triu_indices(size)] = upper
    covariance += np.triu(covariance, 1).T
    return Moments(count, torch.from_numpy(mean), torch.from_numpy(covariance * (count - 1)))


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of an archive; they are not compressed, so nothing may claim more bytes than its member has."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    with archive.open(info) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is of another format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or len(shape) > 1 or size > info.compress_size:
            raise ValueError(f"{name} is {dtype} {shape}, need at most {info.compress_size} bytes in one dimension")
        return np.frombuffer(file.read(size), dtype).reshape(shape).copy()


def load(name: str) -> Moments:
    """Statistics that ship with the package, e.g. `load("cifar10-train")`."""
    return read(named("name", name, {path.stem: path for path in sorted(FOLDER.glob("*.npz"))}))
