"""Tables and pictures of docs/speed.md, from committed results alone.

    python benchmarks/speed.py

Reads `benchmarks/results/bench-*.json`, writes `docs/assets/bench-*.png` and the tables between the
marks of `docs/speed.md`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.plot import plot
from bench.report import markdown
from pages import fill
from steindiff._files import write_bytes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"


def results() -> dict[str, Any]:
    """What was measured, by device."""
    files = sorted((ROOT / "benchmarks" / "results").glob("bench-*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}


def tables() -> dict[str, str]:
    """Every table of the page, by name."""
    return {name: markdown(result) for name, result in results().items()}


def main() -> None:
    for name, text in tables().items():
        fill(PAGE, name, text)
    for name, result in results().items():
        write_bytes(ROOT / "docs" / "assets" / f"{name}.png", plot(result))


if __name__ == "__main__":
    main()
