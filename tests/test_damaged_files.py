"""Weights, statistics and pictures made to do harm: nothing runs, and nothing takes more memory than it should.

Random damage is in tests/fuzz.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from damage import Trap, refusal
from steindiff import _weights as weights
from steindiff.images import Archive, Folder
from steindiff.metrics import references


def test_neither_weights_nor_statistics_carry_code(tmp_path: Path):
    sprung = tmp_path / "sprung"
    pickled, array = io.BytesIO(), io.BytesIO()
    torch.save(Trap(sprung), pickled)
    objects = np.array([Trap(sprung)], dtype=object)
    np.savez(array, count=np.int64(3), mean=objects, covariance=objects)
    for data in (pickle.dumps(Trap(sprung)), pickled.getvalue(), array.getvalue()):
        for path, look in ((tmp_path / "w.safetensors", weights.read), (tmp_path / "s.npz", references.read)):
            path.write_bytes(data)
            with pytest.raises(RuntimeError, match=path.name):
                look(path)
    assert not sprung.exists()


def test_statistics_cannot_unpack_to_more_than_they_are(tmp_path: Path):
    """Before, 760 kB became 7.2 GB."""
    np.savez_compressed(
        tmp_path / "packed.npz", count=np.int64(9), mean=np.ones(1, np.float32), covariance=np.zeros(2**27, np.bool_)
    )
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)})
    with zipfile.ZipFile(tmp_path / "claimed.npz", "w") as file:
        for name in ("count", "mean", "covariance"):
            file.writestr(f"{name}.npy", header.getvalue() + bytes(100))
    for name, says in (("packed", "count is compressed"), ("claimed", "need at most")):
        path = tmp_path / f"{name}.npz"
        assert path.stat().st_size < 2**20
        said = refusal(lambda path=path: references.read(path), RuntimeError)
        assert said is not None
        assert says in said


def test_pictures_cannot_unpack_to_more_than_an_image(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        header = io.BytesIO()
        shape = (1, 20_000, 20_000, 1)
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
        file.writestr("images.npy", header.getvalue() + bytes(1000))
    (tmp_path / "png").mkdir()
    Image.new("1", (12_000, 12_000)).save(tmp_path / "png" / "a.png")
    for look in (
        lambda: next(Archive(tmp_path / "a.npz").batches(1)),
        lambda: next(Folder(tmp_path / "png").batches(1)),
    ):
        assert refusal(look, ValueError)


def tiled_tiff(tile: int) -> bytes:
    """A grey image of 16 × 16 pixels in one tile, packed; a large one may unpack to what it claims, and need not."""
    data = zlib.compress(bytes(256))
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_tiles_are_images_too(tmp_path: Path):
    """Before, 240 kB took 244 MB."""
    for tile, refused in ((16, False), (16_000, True)):
        (tmp_path / "a.tif").write_bytes(tiled_tiff(tile))
        said = refusal(lambda: next(Folder(tmp_path).batches(1)), ValueError)
        assert ("16000 × 16000 pixels are too many" in (said or "")) == refused


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "I;16"), ("TIFF", "F"), ("WEBP", "RGB")])
def test_the_largest_pictures_fit(tmp_path: Path, kind: str, mode: str):
    """Before, a WebP of a kilobyte took 300 MB, a TIFF of numbers 240; and after other tests a WebP 233 again."""
    path = tmp_path / f"a.{kind.lower()}"
    packed = {"TIFF": {"compression": "tiff_deflate"}, "WEBP": {"lossless": True}}.get(kind, {})
    for side, refused in ((2895, False), (2896, True)):
        Image.new(mode, (side, side)).save(path, kind, **packed)
        assert path.stat().st_size < 2**20
        said = refusal(lambda: next(Folder(tmp_path).batches(1)), ValueError)
        assert ("pixels are too many" in (said or "")) == refused


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_archives_are_unpacked_bit_by_bit(tmp_path: Path, packing: int):
    """Before, a bzip2 archive of a kilobyte took 873 MB: how much it unpacks at once has no bound."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", packing) as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array(file, np.zeros((2, 4, 5, 3), np.uint8))
    said = refusal(lambda: next(Archive(tmp_path / "a.npz").batches(1)), ValueError)
    assert said is not None
    assert "images.npy must be stored or deflated" in said
