"""Shards: files of images that carry the name of their set, a checksum beside them; and plain files made of them."""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from steindiff._checks import at_least, shown
from steindiff._distributed import EVERYTHING, Rank
from steindiff._files import atomic, naming, sweep, write_bytes
from steindiff.images import png
from steindiff.production.manifest import Manifest

NAMED = 8
"""A message names this many shards at most."""
HEADER = 4096
"""Bytes of a shard that are not tensors, at most."""


class Shard(NamedTuple):
    """Images `(n, C, H, W)` uint8, their seeds `(n,)` int64, and labels `(n,)` int64 where there are any."""

    images: Tensor
    seeds: Tensor
    labels: Tensor | None


def shard_path(folder: Path, k: int) -> Path:
    """The file of shard k."""
    return folder / f"shard-{k:05d}.safetensors"


def sum_path(folder: Path, k: int) -> Path:
    """The checksum beside it, as `sha256sum --check` reads it."""
    return folder / f"shard-{k:05d}.safetensors.sha256"


def sum_line(folder: Path, k: int, data: bytes) -> bytes:
    """The content of the checksum's file."""
    return f"{hashlib.sha256(data).hexdigest()}  {shard_path(folder, k).name}\n".encode()


def write(folder: Path, manifest: Manifest, k: int, shard: Shard) -> None:
    """Write shard k whole, then its checksum: a shard without one is not finished."""
    tensors = {"images": shard.images, "seeds": shard.seeds, "set": _identity(manifest)}
    if shard.labels is not None:
        tensors["labels"] = shard.labels
    data = save(tensors)
    for path, content in ((shard_path(folder, k), data), (sum_path(folder, k), sum_line(folder, k, data))):
        write_bytes(path, content)


def read(folder: Path, manifest: Manifest, k: int) -> Shard:
    """Read shard k, checking everything."""
    path = shard_path(folder, k)
    n = len(manifest.part(k))
    need = {"images": (torch.uint8, (n, *manifest.shape)), "seeds": (torch.int64, (n,)), "set": (torch.uint8, (32,))}
    if manifest.labels is not None:
        need["labels"] = (torch.int64, (n,))
    most = HEADER + sum(dtype.itemsize * math.prod(shape) for dtype, shape in need.values())
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path}: {size} bytes, a shard of {n} images has at most {most} (altered)")
    data = path.read_bytes()
    with sum_path(folder, k).open("rb") as file:
        recorded = file.read(HEADER)
    if recorded != sum_line(folder, k, data):
        raise ValueError(f"{path}: {len(data)} bytes that are not those of its checksum (truncated or altered)")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path}: not a file of tensors ({error})") from None
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    if found != need:
        raise ValueError(f"{path}: holds {shown(found)}, need {need}")
    seeds = torch.arange(manifest.part(k).start, manifest.part(k).stop)  # as many as the file really holds
    if not torch.equal(tensors["set"], _identity(manifest)) or not torch.equal(tensors["seeds"], seeds):
        raise ValueError(f"{path}: belongs to another set")
    return Shard(tensors["images"], tensors["seeds"], tensors.get("labels"))


def _identity(manifest: Manifest) -> Tensor:
    return torch.tensor(list(bytes.fromhex(manifest.identity)), dtype=torch.uint8)


@dataclass(frozen=True)
class ShardStatus:
    """How some shards are: sound, missing (not finished), or damaged, with what is wrong with each."""

    sound: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    damaged: Mapping[int, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all are sound."""
        return not self.missing and not self.damaged

    def __str__(self) -> str:
        total = len(self.sound) + len(self.missing) + len(self.damaged)
        parts = [f"{len(self.sound)} of {total} shards are sound"]
        if self.missing:
            parts.append(f"missing: {listed(map(str, self.missing))}")
        if self.damaged:
            parts.append(f"damaged: {listed(self.damaged.values())}")
        return "; ".join(parts)


def listed(items: Iterable[str]) -> str:
    """The first few, and how many more."""
    items = list(items)
    more = f" and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return ", ".join(items[:NAMED]) + more


def examine(folder: Path, manifest: Manifest, shards: Iterable[int]) -> ShardStatus:
    """Read some shards and say how they are."""
    sound, missing, damaged = [], [], {}
    for k in shards:
        try:
            read(folder, manifest, k)
            sound.append(k)
        except FileNotFoundError:
            missing.append(k)
        except ValueError as error:
            damaged[k] = str(error)
    return ShardStatus(tuple(sound), tuple(missing), damaged)


def verify(folder: str | Path) -> ShardStatus:
    """Read all shards of a folder and say how they are."""
    folder = Path(folder)
    manifest = Manifest.load(folder)
    return examine(folder, manifest, range(manifest.shards))


class Images:
    """A finished set of images in the folder `generate` wrote, read a shard at a time; first every byte is checked."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder)
        condition = examine(self.folder, self.manifest, range(self.manifest.shards))
        if not condition.complete:
            raise ValueError(f"folder = {folder}: {condition}; produce the same set again to complete it")

    def __len__(self) -> int:
        return len(self.manifest.seeds)

    def shards(self) -> Iterator[Shard]:
        """All shards in the order of their seeds."""
        return (read(self.folder, self.manifest, k) for k in range(self.manifest.shards))

    def batches(self, size: int, share: Rank = EVERYTHING) -> Iterator[Tensor]:
        """Images in the order of their seeds, uint8 `(B, C, H, W)`; B is `size`, or less where a shard ends."""
        at_least("size", size, 1)
        manifest = self.manifest
        cuts = [(k, i) for k in range(manifest.shards) for i in range(0, len(manifest.part(k)), size)]
        return (
            images[i : i + size]
            for k, group in groupby(share.slice(cuts), key=itemgetter(0))
            for images in [read(self.folder, manifest, k).images]
            for _, i in group
        )


def to_png(images: Images, folder: Path) -> None:
    """Write one PNG for each seed, `000042.png` for seed 42; what a killed run left unfinished is removed."""
    if images.manifest.shape[0] not in (1, 3):
        raise ValueError(f"png: images must have 1 or 3 channels, got {images.manifest.shape[0]}")
    sweep(folder)
    for shard in images.shards():
        for seed, image in zip(shard.seeds.tolist(), shard.images, strict=True):
            write_bytes(folder / f"{seed:06d}.png", png(image), durable=False)  # the shards are durable


def to_npz(images: Images, path: Path) -> None:
    """Write `images`, bytes `(N, H, W, C)`, their `seeds` and, as JSON, `settings` to one compressed file.

    One shard at a time is in memory.
    """
    manifest = images.manifest
    channels, height, width = manifest.shape
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), height, width, channels)}
    sweep(path.parent)
    with naming(path), atomic(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        with _member(archive, "images") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for shard in images.shards():
                file.write(shard.images.movedim(1, -1).contiguous().numpy().tobytes())
        for name, array in (
            ("seeds", np.arange(manifest.seeds.start, manifest.seeds.stop)),
            ("settings", np.array(json.dumps(manifest.settings()))),
        ):
            with _member(archive, name) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    info = zipfile.ZipInfo(f"{name}.npy")  # with a fixed date: equal sets make equal files
    info.compress_type = zipfile.ZIP_DEFLATED
    return archive.open(info, "w", force_zip64=True)
