"""A benchmark as text, for terminals and pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("what", "against", "ratio", "quartiles", "network calls", "backward passes")


def label(record: Mapping[str, Any]) -> str:
    """The name of a record with what tells it from others."""
    resolution = [f"{record['resolution']}²"] if "resolution" in record else []
    batch = [f"batch {record['batch']}"] if "batch" in record else []
    return ", ".join([record["name"], *resolution, *batch])


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of a table under `HEAD`; what is missing says why."""
    out: list[tuple[str, ...]] = []
    for record in result["records"]:
        if "missing" in record:
            out.append((label(record), "", "–", record["missing"], "", ""))
        elif record["name"] != record["against"]:
            ratio, cost = record["ratio"], (str(record["network_calls"]), str(record["backward_passes"]))
            quartiles = f"{ratio['low']:.3f}–{ratio['high']:.3f}"
            out.append((label(record), record["against"], f"{ratio['median']:.3f}", quartiles, *cost))
        if "outside" in record:
            share = record["outside"]
            quartiles = f"{share['low']:.2%}–{share['high']:.2%}"
            out.append((f"{label(record)}: outside the network", "", f"{share['median']:.2%}", quartiles, "", ""))
    return out


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [HEAD, ("---",) * len(HEAD), *rows(result)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
