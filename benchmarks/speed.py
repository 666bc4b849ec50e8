"""Tables and pictures of docs/speed.md, from committed results alone.

    python benchmarks/speed.py

Reads `benchmarks/results/bench-*.json`, writes `docs/assets/bench-*.png` and the tables between the
marks of `docs/speed.md`.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.plot import plot
from bench.report import markdown
from pages import fill
from steindiff._files import write_bytes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"


def main() -> None:
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        fill(PAGE, path.stem, markdown(result))
        write_bytes(ROOT / "docs" / "assets" / f"{path.stem}.png", plot(result))


if __name__ == "__main__":
    main()
