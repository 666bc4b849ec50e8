"""Writing the report's files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from steindiff._files import write_bytes, write_text
from steindiff.comparison import Comparison
from steindiff.report.document import Report, render
from steindiff.report.page import report_of
from steindiff.report.picture import contact_sheet


def results(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, ready for JSON."""
    return {
        "settings": dict(comparison.settings),
        "features": comparison.features,
        "against": comparison.against,
        "rows": [dataclasses.asdict(row) for row in comparison.rows],
    }


def numbers(report: Report) -> dict[str, Any]:
    """The numbers of a report of one's own pictures, ready for JSON."""
    rows = [{"method": e.key, "title": e.title, "nfe": e.nfe, **e.numbers} for e in report.entries]
    return {"settings": dict(report.settings), "rows": rows}


def write(what: Comparison | Report, out: Path) -> tuple[Path, Path, Path]:
    """Write `report.html`, `grid.png` and `results.json` into the folder `out`, each whole or not at all.

    Args:
        what: a comparison, or a report of one's own pictures (`steindiff.report.of_images`).
        out: an existing folder.
    """
    report = what if isinstance(what, Report) else report_of(what)
    paths = out / "report.html", out / "grid.png", out / "results.json"
    buffer = io.BytesIO()
    contact_sheet(report.entries).save(buffer, "PNG", optimize=True)
    write_text(paths[0], render(report))
    write_bytes(paths[1], buffer.getvalue())
    write_text(paths[2], json.dumps(numbers(what) if isinstance(what, Report) else results(what), indent=1) + "\n")
    return paths
