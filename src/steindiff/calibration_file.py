r"""The calibration file: small, readable, versioned JSON that knows whether it is whole.

Format 3 has one entry a step, `conditions` that are checked before use apart from `provenance` that never is, and the
factor the network is told at every level. Format 2, with parallel lists and one `settings`, can still be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steindiff._files import write_text
from steindiff._serialization import finite, from_config, to_config, verified, with_checksum
from steindiff.bases import BASES
from steindiff.corrections.replay import StepWeights
from steindiff.levels import Level, Levels
from steindiff.schedules import SCHEDULES
from steindiff.solvers import SOLVERS

FORMAT = 3
"""Version of the format that is written."""

MOST_BYTES = 64 * 2**20
"""A larger file is not a calibration."""

CHECKED = ("guidance", "guidance_rescale", "network", "pipeline")
"""Entries of format 2's `settings` that were checked before use."""

FIELDS = {
    2: {"format", "solver", "nfe", "schedule", "levels", "basis", "gamma", "rho", "tau", "error", "model", "settings"},
    3: {"format", "solver", "nfe", "schedule", "levels", "basis", "steps", "fingerprint", "conditions", "provenance"},
}
"""What a file must hold, beside its checksum."""


def encode(calibration: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file, checksum included, from a calibration's fields by name."""
    solver, levels = calibration["solver"], calibration["levels"]

    def rounded(weights: StepWeights) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "rho": [round(v, 6) for v in weights.rho],
            "tau": [[round(v, 6) for v in row] for row in weights.tau],
            "error": [float(f"{v:.3g}") for v in weights.error],
        }
        if weights.gamma != 1.0:
            entry["gamma"] = weights.gamma
        if weights.restarted:
            entry["restarted"] = list(map(rounded, weights.restarted))
        return entry

    content = {
        "format": FORMAT,
        "solver": to_config(solver),
        "nfe": solver.calls(levels),
        "schedule": to_config(levels.schedule),
        "levels": [list(level) for level in levels],
        "basis": to_config(calibration["basis"]),
        "steps": [rounded(weights) for weights in calibration["steps"]],
        "fingerprint": list(calibration["fingerprint"]),
        "conditions": dict(calibration["conditions"]),
        "provenance": dict(calibration["provenance"]),
    }
    return with_checksum(json.loads(json.dumps(content)))


def decode(content: Any) -> dict[str, Any]:
    """A calibration's fields by name, from what a file holds.

    Raises:
        ValueError: if anything is missing, altered, of the wrong type or of an unknown format.
    """
    body = verified("calibration", content, *FIELDS)
    version = body["format"]
    if set(body) != FIELDS[version]:
        missing, unknown = sorted(FIELDS[version] - set(body)), sorted(set(body) - FIELDS[version])
        raise ValueError(f"a calibration of format {version} misses {missing} or does not know {unknown}")
    schedule = from_config("schedule", body["schedule"], SCHEDULES.classes())
    levels = Levels(tuple(read_level(f"levels[{i}]", row) for i, row in enumerate(entries("levels", body))), schedule)
    solver = from_config("solver", body["solver"], SOLVERS.classes())
    if body["nfe"] != solver.calls(levels) or isinstance(body["nfe"], bool):
        raise ValueError(f"nfe must be {solver.calls(levels)}, what solver and levels cost, got {body['nfe']!r}")
    if version == 2:
        body = {**body, **from_format_2(body, levels.steps)}
    for name in ("conditions", "provenance"):
        if not isinstance(body[name], dict):
            raise ValueError(f"{name} must be an object, got {type(body[name]).__name__}")
    return {
        "solver": solver,
        "levels": levels,
        "basis": from_config("basis", body["basis"], BASES.classes()),
        "steps": tuple(read_weights(f"steps[{i}]", entry) for i, entry in enumerate(entries("steps", body))),
        "fingerprint": finite("fingerprint", body["fingerprint"]),
        "conditions": body["conditions"],
        "provenance": body["provenance"],
    }


def entries(name: str, body: Mapping[str, Any]) -> list[Any]:
    """A list of the file."""
    if not isinstance(body[name], list):
        raise ValueError(f"{name} must be a list, got {type(body[name]).__name__}")
    return list(body[name])


def read_level(name: str, row: Any) -> Level:
    """A level from (t, α, σ) or (t, α, σ, told)."""
    numbers = finite(name, row)
    if len(numbers) not in (3, 4):
        raise ValueError(f"{name} must be (t, alpha, sigma, told), got {len(numbers)} numbers")
    return Level(*numbers)


def read_weights(name: str, entry: Any, *, restarts: bool = True) -> StepWeights:
    """The weights of a step; those of a restarted one have none of their own."""
    must, may = {"rho", "tau", "error"}, {"gamma", "restarted"} if restarts else {"gamma"}
    if not isinstance(entry, dict) or not must <= set(entry) <= must | may:
        raise ValueError(f"{name} must be an object with rho, tau and error, got {str(entry)[:60]}")
    restarted = entries("restarted", {"restarted": entry.get("restarted", [])})
    return StepWeights(
        rho=finite(f"{name}.rho", entry["rho"]),
        tau=tuple(finite(f"{name}.tau[{k}]", row) for k, row in enumerate(entries("tau", entry))),
        error=finite(f"{name}.error", entry["error"]),
        gamma=finite(f"{name}.gamma", [entry.get("gamma", 1.0)])[0],
        restarted=tuple(read_weights(f"{name}.restarted[{k}]", e, restarts=False) for k, e in enumerate(restarted)),
    )


def from_format_2(body: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What format 3 says, from parallel lists."""
    rho, tau, gamma = (entries(name, body) for name in ("rho", "tau", "gamma"))
    error = entries("error", body) or [[]] * steps
    for name, rows in (("rho", rho), ("tau", tau), ("gamma", gamma), ("error", error)):
        if len(rows) != steps:
            raise ValueError(f"{name} must hold {steps} entries, one a step, got {len(rows)}")
    settings = body["settings"]
    if not isinstance(settings, dict):
        raise ValueError(f"settings must be an object, got {type(settings).__name__}")
    return {
        "steps": [
            {"rho": r, "tau": t, "error": e, "gamma": g} for r, t, e, g in zip(rho, tau, error, gamma, strict=True)
        ],
        "fingerprint": body["model"],
        "conditions": {name: value for name, value in settings.items() if name in CHECKED},
        "provenance": {name: value for name, value in settings.items() if name not in CHECKED},
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file, whole or not at all; lists of numbers stand on one line each."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    text = re.sub(
        r"\[[^\[\]{}\"]*\]",
        lambda found: re.sub(r"\s+", " ", found.group()).replace("[ ", "[").replace(" ]", "]"),
        text,
    )
    write_text(path, text + "\n")


def read(path: Path) -> Any:
    """What a file holds, unchecked.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not JSON, or too large to be a calibration.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"not a calibration: {size} bytes, at most {MOST_BYTES} are read")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a calibration: {error}") from None
