"""Writing the report's files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from steindiff._files import write_bytes, write_text
from steindiff.comparison import Comparison
from steindiff.report.page import page
from steindiff.report.picture import contact_sheet


def results(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, ready for JSON."""
    return {
        "settings": dict(comparison.settings),
        "features": comparison.features,
        "floor": comparison.floor,
        "rows": [{**dataclasses.asdict(row), "psnr": min(row.psnr, 999.0)} for row in comparison.rows],
    }


def write(comparison: Comparison, out: Path) -> tuple[Path, Path, Path]:
    """Write `report.html`, `grid.png` and `results.json` into the folder `out`, each whole or not at all."""
    paths = out / "report.html", out / "grid.png", out / "results.json"
    buffer = io.BytesIO()
    contact_sheet(comparison).save(buffer, "PNG", optimize=True)
    write_text(paths[0], page(comparison))
    write_bytes(paths[1], buffer.getvalue())
    write_text(paths[2], json.dumps(results(comparison), indent=1) + "\n")
    return paths
