"""Images of a comparison as pictures: PNG bytes, data URIs, and the contact sheet."""

from __future__ import annotations

import base64

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from steindiff.comparison import Comparison
from steindiff.pixels import picture, png, to_uint8

GAP, CAPTION = 2, 150


def to_image(x: Tensor) -> Image.Image:
    """One image in [−1, 1], `(C, H, W)` with C = 1 or 3, as bytes."""
    return picture(to_uint8(x))


def data_uri(x: Tensor) -> str:
    """The PNG of one image as a URI that needs no request."""
    return "data:image/png;base64," + base64.b64encode(png(to_uint8(x))).decode()


def contact_sheet(comparison: Comparison, columns: int = 12) -> Image.Image:
    """One row for each method and number of evaluations, one column for each seed."""
    rows = list(zip(comparison.rows, comparison.images, strict=True))
    height, width = rows[0][1].shape[2:]
    zoom = max(1, round(64 / height))
    columns = min(columns, len(rows[0][1]))
    cell = (width * zoom + GAP, height * zoom + GAP)
    sheet = Image.new("RGB", (CAPTION + columns * cell[0], len(rows) * cell[1]), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for j, (row, images) in enumerate(rows):
        y = j * cell[1]
        text = f"{row.title}\n{row.nfe} evaluations"
        draw.multiline_text((8, y + cell[1] / 2), text, fill="black", font=font, anchor="lm", spacing=3)
        for i in range(columns):
            tile = to_image(images[i]).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
            sheet.paste(tile, (CAPTION + i * cell[0], y))
    return sheet
