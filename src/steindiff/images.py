"""Images: tensors to bytes, PNG and data URIs; and sets of images, read a batch at a time."""

from __future__ import annotations

import base64
import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steindiff._distributed import EVERYTHING, Rank


def to_uint8(x: Tensor) -> Tensor:
    """Images in [−1, 1], `(*)`, as bytes 0 to 255; what lies outside is clipped."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte()


LOSSLESS = 256 * 256
"""Pictures with more pixels than this are stored as JPEG, quality 95 without chroma subsampling, instead of PNG."""

Picture = Tensor | Image.Image
PictureRow = Sequence[Picture] | Tensor


def to_image(x: Picture) -> Image.Image:
    """A PIL image from one in [−1, 1] or in bytes, `(C, H, W)` with C = 1 or 3; PIL images become L or RGB."""
    if isinstance(x, Image.Image):
        return x if x.mode in ("L", "RGB") else x.convert("RGB")
    if x.ndim != 3 or x.shape[0] not in (1, 3):
        raise ValueError(f"an image must have shape (1, H, W) or (3, H, W), got {tuple(x.shape)}")
    x = x.detach().cpu()
    array = (x if x.dtype == torch.uint8 else to_uint8(x.float())).movedim(0, -1).numpy()
    return Image.fromarray(array.squeeze(-1) if len(x) == 1 else array)


def png(pixels: Tensor) -> bytes:
    """The PNG file of bytes `(C, H, W)`, C = 1 or 3."""
    buffer = io.BytesIO()
    to_image(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def data_uri(x: Picture) -> str:
    """One picture as a URI that needs no request."""
    image, buffer = to_image(x), io.BytesIO()
    kind = "PNG" if image.width * image.height <= LOSSLESS else "JPEG"
    image.save(buffer, kind, optimize=True, **({} if kind == "PNG" else {"quality": 95, "subsampling": 0}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"})
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""What a file may be, whatever its name says: some of the other formats are programs."""
LARGEST = 2**26
"""Bytes of the largest image that is read: a small file may claim, and unpack to, any number."""
STRIPE = 256
"""Rows of an image that leave PIL at once."""
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class Pictures(Protocol):
    """A set of images."""

    def __len__(self) -> int:
        """How many there are."""

    def batches(self, size: int, share: Rank = EVERYTHING) -> Iterator[Tensor]:
        """The images in order, uint8 `(B, C, H, W)`, B <= `size`.

        The set is cut into batches first, and whole batches are shared: a process sees the batches that one process
        alone would see.
        """


class Folder:
    """The images of a folder and its subfolders, in order of name, as `(B, 3, H, W)`; hidden files are passed over."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ValueError(f"path = {path}: no such folder")
        self.files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not self.files:
            raise ValueError(f"path = {path}: holds no image; looked for {', '.join(sorted(SUFFIXES))}")

    def __len__(self) -> int:
        return len(self.files)

    def batches(self, size: int, share: Rank = EVERYTHING) -> Iterator[Tensor]:
        shape: tuple[int, ...] | None = None
        for start in share.slice(range(0, len(self), size)):
            images = []
            for file in self.files[start : start + size]:
                pixels = decode(file)
                shape = shape or pixels.shape
                if pixels.shape != shape:
                    raise ValueError(f"image {file}: {pixels.shape[:2]} pixels, the others have {shape[:2]}")
                images.append(torch.from_numpy(pixels).permute(2, 0, 1))
            yield torch.stack(images)


def decode(file: Path) -> np.ndarray:
    """The pixels of an image, bytes `(H, W, 3)`."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            tags = getattr(image, "tag_v2", {})  # of a TIFF, whose tiles are unpacked whole, however small the image
            width, height = (max(n, tags.get(tag, 0)) for n, tag in ((image.width, 322), (image.height, 323)))
            # Decoders keep canvases of their own (WebP: 16 bytes a pixel in all, 19 with what the heap keeps) and two
            # pointers to every row. A picture of 3,840 × 2,160 fits.
            if height * (24 * width + 32) > 3 * LARGEST:
                raise ValueError(f"{width} × {height} pixels are too many")
            pixels = np.empty((image.height, image.width, 3), np.uint8)
            for top in range(0, image.height, STRIPE):  # whole, the bytes are there three times while they leave PIL
                bottom = min(top + STRIPE, image.height)
                pixels[top:bottom] = image.crop((0, top, image.width, bottom)).convert("RGB")
            return pixels
    except Exception as error:  # decoders of damaged files end in anything
        raise ValueError(f"image {file}: cannot be read ({error})") from error


class Archive:
    """The images of a `.npz` file: its array `images` or its first one, bytes `(N, H, W, C)` with C = 1 or 3.

    The array is streamed, and nothing but bytes is read: an array of objects, which would be unpickled, is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._array() as (_, shape):
            self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, size: int, share: Rank = EVERYTHING) -> Iterator[Tensor]:
        one = math.prod(self.shape[1:])
        starts = share.slice(range(0, len(self), size))
        with self._array() as (file, shape):
            if shape != self.shape:
                raise ValueError("changed while it was read")
            file.seek(one * starts[0] if starts else 0, 1)
            for start in starts:
                count = min(size, len(self) - start)
                data = file.read(one * count)
                if len(data) != one * count:
                    raise ValueError(f"ends before image {start + count} of {len(self)}")
                images = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                yield images.reshape(count, *self.shape[1:]).movedim(-1, 1)

    @contextmanager
    def _array(self) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
        """The array's shape, and its bytes as a file."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = archive.namelist()
                name = "images.npy" if "images.npy" in names else names[0]
                if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(f"{name} must be stored or deflated: other packings unpack to any size at once")
                with archive.open(name) as file:
                    version = np.lib.format.read_magic(file)
                    if version not in HEADERS:
                        raise ValueError(f"format {version} of {name}")
                    shape, fortran, dtype = HEADERS[version](file)
                    good = (
                        len(shape) == 4
                        and 0 < min(shape) <= max(shape) < 2**63
                        and shape[-1] in (1, 3)
                        and dtype == np.uint8
                    )
                    if good and math.prod(shape[1:]) > LARGEST:
                        raise ValueError(f"an image of shape {shape[1:]} has more than {LARGEST} bytes")
                    if not good or fortran:
                        order = " in Fortran order" * fortran
                        raise ValueError(f"{name} is {dtype} {shape}{order}, need bytes (N, H, W, 1 or 3) in C order")
                    yield file, shape
        except Exception as error:  # readers of damaged files end in anything
            raise ValueError(f"{self.path}: not an archive of images ({error})") from None
