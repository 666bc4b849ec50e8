"""Writing the report's files."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steindiff._files import write_bytes, write_text
from steindiff._version import __version__
from steindiff.comparison import Comparison
from steindiff.images import contact_sheet
from steindiff.model import Model
from steindiff.report.document import Entry, Report, of_images, render
from steindiff.report.page import report_of
from steindiff.sampler import Sampler


def results(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, ready for JSON."""
    return {
        "settings": dict(comparison.settings),
        "features": comparison.features,
        "floor": comparison.floor,
        "rows": [
            {**dataclasses.asdict(row), "psnr": row.psnr if math.isfinite(row.psnr) else None}
            for row in comparison.rows
        ],
    }


def numbers(report: Report) -> dict[str, Any]:
    """The numbers of a report of one's own pictures, ready for JSON."""
    rows = [{"method": e.key, "title": e.title, "nfe": e.nfe, **e.numbers} for e in report.entries]
    return {"settings": dict(report.settings), "rows": rows}


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


def write(what: Comparison | Report, out: Path) -> tuple[Path, Path, Path]:
    """Write `report.html`, `grid.png` and `results.json` into the folder `out`, each whole or not at all."""
    report = what if isinstance(what, Report) else report_of(what)
    paths = out / "report.html", out / "grid.png", out / "results.json"
    buffer = io.BytesIO()
    contact_sheet(report.entries).save(buffer, "PNG", optimize=True)
    write_text(paths[0], render(report))
    write_bytes(paths[1], buffer.getvalue())
    write_text(paths[2], json.dumps(numbers(what) if isinstance(what, Report) else results(what), indent=1) + "\n")
    return paths
