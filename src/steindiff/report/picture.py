"""Pictures of a report: from tensors or PIL images to data URIs and the contact sheet."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Protocol

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from steindiff.images import picture, to_uint8

GAP, CAPTION = 2, 150
LOSSLESS = 256 * 256
"""Pictures with more pixels than this are stored as JPEG, quality 95 without chroma subsampling, instead of PNG."""

Picture = Tensor | Image.Image
Pictures = Sequence[Picture] | Tensor


class Strip(Protocol):
    """One row of pictures and its label."""

    @property
    def title(self) -> str: ...
    @property
    def nfe(self) -> int: ...
    @property
    def images(self) -> Pictures: ...


def to_image(x: Picture) -> Image.Image:
    """A PIL image from one in [−1, 1] or in bytes, `(C, H, W)` with C = 1 or 3; PIL images become L or RGB.

    Raises:
        ValueError: if a tensor has another shape.
    """
    if isinstance(x, Image.Image):
        return x if x.mode in ("L", "RGB") else x.convert("RGB")
    if x.ndim != 3 or x.shape[0] not in (1, 3):
        raise ValueError(f"an image must have shape (1, H, W) or (3, H, W), got {tuple(x.shape)}")
    x = x.detach().cpu()
    return picture(x if x.dtype == torch.uint8 else to_uint8(x.float()))


def data_uri(x: Picture) -> str:
    """One picture as a URI that needs no request."""
    image, buffer = to_image(x), io.BytesIO()
    kind = "PNG" if image.width * image.height <= LOSSLESS else "JPEG"
    image.save(buffer, kind, optimize=True, **({} if kind == "PNG" else {"quality": 95, "subsampling": 0}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def contact_sheet(strips: Sequence[Strip], columns: int = 12) -> Image.Image:
    """One row for each method and number of evaluations, one column for each seed."""
    width, height = to_image(strips[0].images[0]).size
    zoom = max(1, round(64 / height)) if height < 160 else 160 / height
    size = round(width * zoom), round(height * zoom)
    columns = min(columns, len(strips[0].images))
    sheet = Image.new("RGB", (CAPTION + columns * (size[0] + GAP), len(strips) * (size[1] + GAP)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for j, strip in enumerate(strips):
        y = j * (size[1] + GAP)
        text = f"{strip.title}\n{strip.nfe} evaluations"
        draw.multiline_text((8, y + size[1] / 2), text, fill="black", font=font, anchor="lm", spacing=3)
        for i, x in enumerate(strip.images[:columns]):
            tile = to_image(x).resize(size, Image.Resampling.NEAREST if zoom >= 1 else Image.Resampling.LANCZOS)
            sheet.paste(tile, (CAPTION + i * (size[0] + GAP), y))
    return sheet
