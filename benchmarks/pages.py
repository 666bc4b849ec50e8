"""Tables in Markdown, and putting them between the marks of a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from steindiff._files import write_text

TITLES = {
    "dpmpp-2m": "DPM-Solver++(2M)",
    "dpmpp-3m": "DPM-Solver++(3M)",
    "unipc-bh1-3": "UniPC-3 (bh1)",
    "ddim": "DDIM",
    "ipndm": "iPNDM",
    "ipndm-4": "iPNDM-4",
    "v3": "DPM-Solver-v3",
    "heun": "Heun",
}
"""What pages call a solver."""


def rows(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def filled(page: str, name: str, text: str) -> str:
    """The page with `text` between its marks `table:name`, if it has them."""
    mark, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    pattern = rf"{re.escape(mark)}(.*?{re.escape(end)})?"
    return re.sub(pattern, lambda found: f"{mark}\n\n{text}\n\n{end}", page, flags=re.S)


def fill(path: Path, name: str, text: str) -> None:
    """Put `text` between the marks `table:name` of a page that has them."""
    write_text(path, filled(path.read_text(encoding="utf-8"), name, text))
