"""The picture of a benchmark."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from bench.report import label


def plot(result: Mapping[str, Any]) -> bytes:
    """Ratios with quartiles on the left, scaling on the right: a PNG.

    Raises:
        ImportError: if matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    bars = [r for r in result["records"] if "ratio" in r and r["section"] != "scaling" and r["name"] != r["against"]]
    middle = [r["ratio"]["median"] for r in bars]
    errors = [
        [r["ratio"]["median"] - r["ratio"]["low"] for r in bars],
        [r["ratio"]["high"] - r["ratio"]["median"] for r in bars],
    ]
    left.barh(range(len(bars)), middle, xerr=errors, color="#f4511e", alpha=0.8, height=0.6)
    left.set_yticks(range(len(bars)), [label(r) for r in bars], fontsize=7)
    left.invert_yaxis()
    left.axvline(1.0, color="0.4", lw=0.8)
    left.set(xlabel="time ratio within one run, median and quartiles", title=f"{result['model']}, {result['device']}")
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in result["records"]:
        if record["section"] == "scaling" and record["axis"] != "probes":
            first = next(r["value"] for r in result["records"] if r.get("axis") == record["axis"])
            lines.setdefault(record["axis"], []).append((record["value"] / first, record["ratio"]["median"]))
    for axis, points in lines.items():
        right.plot(*zip(*points, strict=True), marker="o", label=axis)
    if lines:
        right.set(xscale="log", yscale="log", xlabel="times the smallest", ylabel="times its time", title="scaling")
        times = sorted({x for points in lines.values() for x, _ in points})
        right.set_xticks(times, [f"{x:g}" for x in times])
        right.set_xticks([], minor=True)
        right.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
