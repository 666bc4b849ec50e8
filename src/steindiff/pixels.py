"""From images in [−1, 1] to what is saved and judged: bytes."""

from __future__ import annotations

import io

from PIL import Image
from torch import Tensor


def to_uint8(x: Tensor) -> Tensor:
    """Images in [−1, 1], `(*)`, as bytes 0 to 255; what lies outside is clipped."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte()


def picture(pixels: Tensor) -> Image.Image:
    """The picture of bytes `(C, H, W)`, C = 1 or 3."""
    array = pixels.movedim(0, -1).numpy()
    return Image.fromarray(array.squeeze(-1) if array.shape[-1] == 1 else array)


def png(pixels: Tensor) -> bytes:
    """The PNG file of bytes `(C, H, W)`, C = 1 or 3."""
    buffer = io.BytesIO()
    picture(pixels).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
