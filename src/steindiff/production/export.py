"""A finished set as plain files, for programs that know nothing of shards."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import IO

import numpy as np

from steindiff._files import atomic, naming, sweep, write_bytes
from steindiff.pixels import png
from steindiff.production.shards import Images


def to_png(images: Images, folder: Path) -> None:
    """Write one PNG for each seed, `000042.png` for seed 42; what a killed run left unfinished is removed.

    Raises:
        OSError: if the folder cannot be written to or the disk is full; it names the file.
        ValueError: if the images have neither one nor three channels, or a shard was damaged meanwhile.
    """
    if images.manifest.shape[0] not in (1, 3):
        raise ValueError(f"png: images must have 1 or 3 channels, got {images.manifest.shape[0]}")
    sweep(folder)
    for shard in images.shards():
        for seed, image in zip(shard.seeds.tolist(), shard.images, strict=True):
            write_bytes(folder / f"{seed:06d}.png", png(image), durable=False)  # the shards are durable


def to_npz(images: Images, path: Path) -> None:
    """Write `images`, bytes `(N, H, W, C)`, their `seeds` and, as JSON, `settings` to one compressed file.

    One shard at a time is in memory.

    Raises:
        OSError: if the file cannot be written or the disk is full; it names the file.
        ValueError: if a shard was damaged meanwhile.
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
