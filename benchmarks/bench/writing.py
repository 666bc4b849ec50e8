"""Where a benchmark is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.plot import plot
from steindiff._files import write_bytes, write_json


def write(result: Mapping[str, Any], out: Path, note: Callable[[str], None]) -> list[Path]:
    """Write `bench-<kind>.json` and its plot into a folder; `note` is told if there can be no plot."""
    path = out / f"bench-{result['kind']}.json"
    write_json(path, result)
    try:
        picture = plot(result)
    except ImportError as error:
        note(f"no plot: {error}")
        return [path]
    write_bytes(path.with_suffix(".png"), picture)
    return [path, path.with_suffix(".png")]
