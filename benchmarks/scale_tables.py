"""The tables of docs/scale.md, from committed records alone.

    python benchmarks/scale_tables.py

Reads `benchmarks/results/{fuzz,soak,drills,busy,determinism,scaling}.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pages import fill, rows

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"


def record(name: str) -> Any:
    """What a benchmark found."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def spelled(difference: float | None, none: str = "not promised") -> str:
    """A difference as the page says it."""
    if difference is None:
        return none
    return f"{difference:.0e}" if difference else "equal to the bit"


def determinism() -> str:
    """What changes when something about a run does; nothing is promised that was not measured."""
    body = []
    for claim in record("determinism")["claims"].values():
        promise = None if claim["measured"] is None else claim["promise"]
        body.append([claim["change"], spelled(promise), spelled(claim["measured"], "not measured")])
    return rows(["what changes", "images differ at most by", "measured"], body)


def faults() -> str:
    """Faults of the soak and of the drills, tried and held."""
    soak = record("soak")
    body = [[f"soak: {name}", str(f["tried"]), str(f["held"])] for name, f in soak["faults"].items()]
    for drill in record("drills")["drills"].values():
        body.append([f"drill: {drill['what'][0].lower()}{drill['what'][1:]}", str(drill["tried"]), str(drill["held"])])
    numbers = ", ".join(f"{name} {soak[name]}" for name in ("lost", "duplicated", "different"))
    return rows(["fault", "tried", "held"], body) + f"\n\nSoak, {soak['images']:,} images: {numbers}."


def fuzz() -> str:
    """Damaged files and inputs, by reader."""
    readers: dict[str, list[dict[str, Any]]] = {}
    for test in record("fuzz")["tests"].values():
        readers.setdefault(test["reader"], []).append(test)
    body = [
        [reader, *(f"{sum(test[name] for test in tests):,}" for name in ("cases", "failures")), f"{peak(tests):.1f}"]
        for reader, tests in sorted(readers.items(), key=lambda item: item[0].lower())
    ]
    return rows(["what is damaged", "cases", "failures", "memory taken, at most, MiB"], body)


def peak(tests: Iterable[dict[str, Any]]) -> float:
    """The most memory that a case took beyond what there was, in MiB."""
    return max(test["peak_bytes"] for test in tests) / 2**20


def busy() -> str:
    """Runs of the whole suite beside processes that never rest."""
    body = [
        [str(i), *(str(run.get(name, 0)) for name in ("passed", "failed", "skipped", "busy processes at the end"))]
        for i, run in enumerate(record("busy")["runs"], 1)
    ]
    return rows(["run", "passed", "failed", "skipped", "busy processes"], body)


def scaling() -> str:
    """Time against images, evaluations and processes."""
    body = [
        [row["name"], *(f"{row[key]:.2f}" for key in ("ratio", "smallest", "largest")), f"{row['linear']:.0f}"]
        for row in record("scaling")["rows"]
    ]
    return rows(["time ratio", "median", "smallest", "largest", "if linear"], body)


def tables() -> dict[str, str]:
    """Every table of the page, by name."""
    return {make.__name__: make() for make in (fuzz, faults, busy, determinism, scaling)}


def main() -> None:
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
