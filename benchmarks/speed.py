"""Tables and pictures of docs/speed.md, from committed results alone.

    python benchmarks/speed.py

Reads `benchmarks/results/bench-*.json`, writes `docs/assets/bench-*.png` and the tables between the
marks of `docs/speed.md`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from steindiff.bench.plot import plot
from steindiff.bench.report import markdown
from steindiff.files import write_bytes, write_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "speed.md"


def filled(page: str, name: str, table: str) -> str:
    """The page with a table between the marks of that name."""
    begun, ended = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    pattern = rf"{re.escape(begun)}(.*?{re.escape(ended)})?"
    return re.sub(pattern, lambda _: f"{begun}\n\n{table}\n\n{ended}", page, flags=re.S)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in sorted((ROOT / "benchmarks" / "results").glob("bench-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        page = filled(page, path.stem, markdown(result))
        write_bytes(ROOT / "docs" / "assets" / f"{path.stem}.png", plot(result))
    write_text(PAGE, page)


if __name__ == "__main__":
    main()
