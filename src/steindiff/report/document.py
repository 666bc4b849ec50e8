"""A report as plain data, and the self-contained page made of it; the files in `assets` draw the page."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata, resources
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from steindiff._version import __version__
from steindiff.images import PictureRow, data_uri, to_image
from steindiff.metrics import psnr, spread
from steindiff.model import Model
from steindiff.sampler import Sampler

SHOWN = 48
"""The page carries the pictures of at most this many seeds; numbers are over all of them."""
PIXELS = 48_000_000
"""The page carries at most about this many pixels: fewer seeds where pictures are large."""
GAP, CAPTION = 2, 150
"""Pixels between the pictures of a contact sheet, and for the titles of its rows."""
PAPER = "https://arxiv.org/abs/2606.07835"

Chart = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One method at one number of evaluations.

    Attributes:
        title: the method as shown; entries with the same title are one method at several budgets.
        nfe: network evaluations per image.
        images: one picture per seed, tensors `(C, H, W)` in [−1, 1] or bytes, C = 1 or 3, or PIL images.
        numbers: by column key; a pair under `KEY_interval` is shown as the range of `KEY`.
        method: a short key for links and files; default the title.
        reference: whether this is the many-step run, shown at every number of evaluations.
    """

    title: str
    nfe: int
    images: PictureRow
    numbers: Mapping[str, Any] = field(default_factory=dict)
    method: str = ""
    reference: bool = False

    @property
    def key(self) -> str:
        """What names the method."""
        return self.method or self.title


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: of an entry's numbers.
        title: the heading.
        digits: decimals; None prints the value as it is.
        badness: what the best entry has least of; None if no entry is best.
    """

    key: str
    title: str
    digits: int | None = None
    badness: Callable[[float], float] | None = None

    def text(self, entry: Entry) -> str:
        """The entry's number, a dash where it has none."""
        value = entry.numbers.get(self.key)
        return "–" if value is None else str(value) if self.digits is None else f"{value:.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page shows.

    Attributes:
        title: of the document.
        entries: rows of pictures, one or more methods at one or more numbers of evaluations.
        labels: the seeds, as shown.
        captions: a text for each seed, such as its prompt; may be empty.
        headlines: the first sentence at each number of evaluations.
        lead: the second sentence.
        tiles: for each number of evaluations up to three figures: before, after, label.
        columns: of the table; default the entries' numbers by name.
        notes: sentences below the table.
        charts: what is drawn.
        sides: keys of the methods left and right of the divider; default the first and the last method.
        command: what made this report.
        settings: shown at the end.
    """

    title: str
    entries: Sequence[Entry]
    labels: Sequence[str | int]
    captions: Sequence[str] = ()
    headlines: Mapping[int, str] = field(default_factory=dict)
    lead: str = ""
    tiles: Mapping[int, Sequence[Mapping[str, str]]] = field(default_factory=dict)
    columns: Sequence[Column] = ()
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    sides: tuple[str, str] | None = None
    command: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.entries:
            raise ValueError("entries must not be empty")
        if any(len(entry.images) != len(self.labels) for entry in self.entries):
            counts = sorted({len(entry.images) for entry in self.entries})
            raise ValueError(f"every entry needs one image per label: {len(self.labels)} labels, {counts} images")
        if self.captions and len(self.captions) != len(self.labels):
            raise ValueError(f"captions must be one per label, {len(self.labels)}, got {len(self.captions)}")

    @property
    def nfes(self) -> list[int]:
        """The numbers of evaluations to choose from."""
        few = [entry.nfe for entry in self.entries if not entry.reference]
        return sorted(set(few or [entry.nfe for entry in self.entries]))


def of_images(
    entries: Sequence[Entry],
    labels: Sequence[str | int],
    *,
    title: str = "The same seeds, side by side",
    captions: Sequence[str] = (),
    command: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Report:
    """The report of one's own pictures: no charts; where one entry is the reference, how like it the others are.

    Args:
        entries: rows of pictures; the first method starts left of the divider, the last few-step one right of it.
        labels: the seeds.
        title: of the document.
        captions: a text for each seed, such as its prompt.
        command: what made them.
        settings: shown at the end.
    """
    many = next((entry for entry in entries if entry.reference), None)
    few = [entry for entry in entries if not entry.reference]
    columns = [Column("title", "method"), Column("nfe", "evaluations")]
    if many is not None:
        entries = [replace(e, numbers={**alike(e, many, captions), **e.numbers}) for e in entries]
        columns.append(Column("psnr", f"PSNR to the {many.nfe}-evaluation image, dB", 2, lambda value: -value))
        columns.append(Column("spread", "spread", 2, lambda value: abs(value - 1)))
    numbers = {key: value for entry in entries for key, value in entry.numbers.items()}
    given = {
        key: value for key, value in numbers.items() if key not in ("psnr", "spread") and not key.endswith("_interval")
    }
    columns += [Column(key, key.replace("_", " "), 3 if isinstance(given[key], float) else None) for key in given]
    pick = few[-1] if few else entries[-1]
    return Report(
        title=title,
        entries=entries,
        labels=labels,
        captions=captions,
        headlines={
            entry.nfe: f"{entry.nfe} evaluations beside {many.nfe if many else 'each other'}: drag the divider"
            for entry in few
        },
        lead="Every method sampled the same seeds from the same noise.",
        columns=columns,
        notes=["Spread: how much pictures of one caption differ, over how much the many-step ones do. 1 is right."]
        if many
        else [],
        sides=(entries[0].key, pick.key),
        command=command,
        settings=settings or {},
    )


def of_samplers(
    model: Model,
    samplers: Mapping[str, Sampler],
    seeds: Sequence[int],
    *,
    captions: Sequence[str] = (),
    reference: str | None = None,
    batch: int = 16,
    command: str = "",
) -> Report:
    """Sample the same seeds by several samplers and lay the images side by side.

    Args:
        model: whose samples are images in [−1, 1], `(C, H, W)` with C = 1 or 3.
        samplers: by the title their images get.
        seeds: one image each.
        captions: a text for each seed, such as its label or prompt.
        reference: title of the many-step sampler; the others' distance to its images is shown.
        batch: samples evaluated together.
        command: what made this.
    """
    if reference is not None and reference not in samplers:
        raise ValueError(f"reference must be one of the samplers {', '.join(samplers)}, got {reference!r}")
    entries = []
    for title, sampler in samplers.items():
        result = sampler(model, seeds, batch=batch)
        cost = {"network_calls": result.network_calls, "backward_passes": result.backward_passes}
        entries.append(Entry(title, result.nfe, result.x.cpu(), cost, reference=title == reference))
    settings = {"model": model.name, "shape": str(model.shape), "device": str(model.device), "steindiff": __version__}
    title = f"{model.name}: {', '.join(samplers)}"
    return of_images(entries, seeds, title=title, captions=captions, command=command, settings=settings)


def alike(entry: Entry, many: Entry, captions: Sequence[str]) -> dict[str, float]:
    """PSNR to the many-step pictures, and spread within a caption over theirs; nothing for pictures of another size."""
    parts = [[torch.from_numpy(np.array(to_image(x))) / 127.5 - 1.0 for x in e.images] for e in (entry, many)]
    if len({x.shape for images in parts for x in images}) > 1:
        return {}
    made, known = map(torch.stack, parts)
    conditions = captions or [""] * len(known)
    found = {"psnr": psnr(made, known), "spread": spread(made, known, conditions)}
    return {key: value for key, value in found.items() if math.isfinite(value)}


def best(report: Report) -> dict[str, list[int]]:
    """For each judged column the best entry at each number of evaluations, by index."""
    out: dict[str, list[int]] = {}
    for column in report.columns:
        if column.badness is None:
            continue
        for nfe in report.nfes:
            scores = [
                (column.badness(entry.numbers[column.key]), i)
                for i, entry in enumerate(report.entries)
                if entry.nfe == nfe and not entry.reference and entry.numbers.get(column.key) is not None
            ]
            if len(scores) > 1:
                out.setdefault(column.key, []).append(min(scores)[1])
    return out


def links() -> list[tuple[str, str]]:
    """Where to read more: the project's addresses, as far as its package names any, and the paper."""
    try:
        urls = metadata.metadata("steindiff").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        urls = []
    return [*(tuple(url.split(", ", 1)) for url in urls), ("Paper", PAPER)]


def content(report: Report) -> dict[str, Any]:
    """All the page needs, as JSON values."""
    width, height = to_image(report.entries[0].images[0]).size
    shown = max(1, min(SHOWN, PIXELS // (width * height * len(report.entries))))
    methods = {entry.key: entry for entry in report.entries}
    left, right = report.sides or (report.entries[0].key, report.entries[-1].key)
    cells = [{"title": e.title, "nfe": e.nfe, **e.numbers} for e in report.entries]
    return {
        "version": __version__,
        "links": links(),
        "headlines": {str(nfe): text for nfe, text in report.headlines.items()},
        "lead": report.lead,
        "command": report.command,
        "notes": list(report.notes),
        "methods": [{"key": key, "title": e.title, "reference": e.reference} for key, e in methods.items()],
        "left": left,
        "right": right,
        "nfes": report.nfes,
        "start": report.nfes.index(5) if 5 in report.nfes else 0,
        "seeds": [str(label) for label in report.labels][:shown],
        "captions": list(report.captions)[:shown],
        "smooth": height >= 128,
        "columns": [{"key": c.key, "title": c.title, "digits": c.digits} for c in report.columns],
        "rows": [
            {"index": i, "method": e.key, "reference": e.reference, **cells[i]} for i, e in enumerate(report.entries)
        ],
        "best": best(report),
        "tiles": {str(nfe): list(tiles) for nfe, tiles in report.tiles.items()},
        "pictures": [[data_uri(x) for x in entry.images[:shown]] for entry in report.entries],
        "charts": list(report.charts),
        "settings": [[str(name), str(value)] for name, value in report.settings.items()],
    }


def contact_sheet(strips: Sequence[Entry], columns: int = 12) -> Image.Image:
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


def asset(name: str) -> str:
    """A file of the page's, as text."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def render(report: Report) -> str:
    """The HTML document: styles, script, pictures and numbers in one file that requests nothing."""
    data = json.dumps(content(report), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "@title@": html.escape(report.title),
        "@style@": asset("report.css"),
        "@script@": asset("report.js"),
        "@data@": data.replace("<", "\\u003c"),
    }
    document = asset("report.html")
    for mark, text in parts.items():
        document = document.replace(mark, text)
    return document
