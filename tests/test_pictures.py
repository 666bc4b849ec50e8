"""Sets of images: read in order, in parts, and whatever a file holds, with one documented error."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drills
from damage import Trap
from steindiff._distributed import Rank
from steindiff.images import STRIPE, Archive, Folder
from steindiff.production import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (11, 4, 5, 3), dtype=np.uint8)
FORMATS = {"PNG": ".png", "JPEG": ".jpg", "BMP": ".bmp", "TIFF": ".tif", "WEBP": ".webp"}


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def folder(place: Path) -> Folder:
    (place / "sub").mkdir()
    for i, pixels in enumerate(PIXELS):
        (place / ("sub" if i > 8 else "") / f"{i:02d}.{'png' if i % 2 else 'PNG'}").write_bytes(encoded(pixels))
    (place / "notes.txt").write_text("not an image")
    return Folder(place)


def archive(place: Path) -> Archive:
    np.savez_compressed(place / "a.npz", labels=np.arange(3), images=PIXELS)
    return Archive(place / "a.npz")


def production(place: Path) -> Images:
    drills.make(place, 11)
    return Images(place)


@pytest.mark.parametrize("make", [folder, archive, production])
def test_batches_are_in_order_and_shared_whole(make, tmp_path):
    pictures = make(tmp_path)
    assert len(pictures) == 11
    whole = [part.clone() for part in pictures.batches(3)]
    assert {part.dtype for part in whole} == {torch.uint8}
    if make is not production:
        assert torch.equal(torch.cat(whole), torch.from_numpy(PIXELS).movedim(-1, 1))
        assert [len(part) for part in whole] == [3, 3, 3, 2]
    for world in (2, 3, 7):
        shared = [part for rank in range(world) for part in pictures.batches(3, Rank(rank, world))]
        assert len(shared) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(shared, whole, strict=True))


def test_a_share_of_a_production_reads_its_own_shards_only(tmp_path):
    images = production(tmp_path)
    (tmp_path / "shard-00000.safetensors").unlink()
    assert sum(len(part) for part in images.batches(4, Rank(1, 3))) == 4
    with pytest.raises(FileNotFoundError):
        list(images.batches(4, Rank(0, 3)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pictures_of_several_stripes_are_what_pil_reads(mode, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (2 * STRIPE + 7, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(tmp_path / "a.png", **({"transparency": 3} if mode == "P" else {}))
    with Image.open(tmp_path / "a.png") as image:
        expected = np.array(image.convert("RGB"))
    assert np.array_equal(next(Folder(tmp_path).batches(1))[0].movedim(0, -1), expected)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        Folder(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no image"):
        Folder(tmp_path)
    (tmp_path / "a.png").write_bytes(encoded(PIXELS[0]))
    (tmp_path / "b.png").write_bytes(encoded(PIXELS[0][:3]))
    with pytest.raises(ValueError, match=r"b\.png: \(3, 5\) pixels, the others have \(4, 5\)"):
        next(Folder(tmp_path).batches(2))


def test_archive_without_a_name_is_its_first_array(tmp_path):
    np.savez(tmp_path / "a.npz", PIXELS, np.arange(11))
    assert torch.equal(next(Archive(tmp_path / "a.npz").batches(99)).movedim(1, -1), torch.from_numpy(PIXELS))


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (PIXELS.astype(np.float32), r"float32 \(11, 4, 5, 3\), need bytes"),
        (PIXELS[..., :2], r"\(11, 4, 5, 2\), need bytes"),
        (PIXELS[:0], r"\(0, 4, 5, 3\), need bytes"),
        (PIXELS[0], r"\(4, 5, 3\), need bytes"),
        (np.asfortranarray(PIXELS), "in Fortran order, need bytes"),
    ],
)
def test_other_arrays_are_named(tmp_path, array, says):
    np.savez(tmp_path / "a.npz", images=array)
    with pytest.raises(ValueError, match=says):
        Archive(tmp_path / "a.npz")


def test_an_archive_cannot_carry_code(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.array([Trap(tmp_path / "sprung")] * 3, dtype=object).reshape(1, 1, 1, 3))
    with pytest.raises(ValueError, match=r"a\.npz: not an archive of images .*object"):
        Archive(tmp_path / "a.npz")
    assert not (tmp_path / "sprung").exists()


def test_a_picture_cannot_carry_code(tmp_path):
    """PostScript, which a decoder would run, is not an image here, whatever its name."""
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match=r"a\.png: cannot be read"):
        next(Folder(tmp_path).batches(1))


def test_array_that_says_more_than_it_holds_is_refused(tmp_path):
    header = io.BytesIO()
    shape = (10**9, 10**3, 10**3, 3)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("images.npy", header.getvalue() + bytes(100))
    with pytest.raises(ValueError, match="ends before image 2 of 1000000000"):
        next(Archive(tmp_path / "a.npz").batches(2))
