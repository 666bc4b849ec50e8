r"""The calibration file: small, readable, versioned JSON that knows whether it is whole.

Format 3 has one entry a step, `conditions` that are checked before use apart from `provenance` that never is, and the
factor the network is told at every level. Format 2, with parallel lists and one `settings`, can still be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from steindiff._checks import shown
from steindiff._files import write_text
from steindiff._serialization import decode as typed
from steindiff._serialization import from_config, read_json, to_config, verified, with_checksum
from steindiff.bases import BASES
from steindiff.corrections.replay import StepWeights
from steindiff.levels import Level, Levels
from steindiff.schedules import SCHEDULES
from steindiff.solvers import SOLVERS

T = TypeVar("T")

FORMAT = 3
"""Version of the format that is written."""

CHECKED = ("guidance", "guidance_rescale", "network", "pipeline")
"""Entries of format 2's `settings` that were checked before use."""


@dataclass(frozen=True)
class File:
    """What files of both formats hold, beside their checksum; the annotations are the schema."""

    format: int
    solver: dict[str, Any]
    nfe: int
    schedule: dict[str, Any]
    levels: tuple[Level, ...]
    basis: dict[str, Any]


@dataclass(frozen=True)
class File3(File):
    """Format 3."""

    steps: tuple[StepWeights, ...]
    fingerprint: tuple[float, ...]
    conditions: dict[str, Any]
    provenance: dict[str, Any]


@dataclass(frozen=True)
class File2(File):
    """Format 2: parallel lists, one entry a step."""

    gamma: tuple[float, ...]
    rho: tuple[tuple[float, ...], ...]
    tau: tuple[tuple[tuple[float, ...], ...], ...]
    error: tuple[tuple[float, ...], ...]
    model: tuple[float, ...]
    settings: dict[str, Any]

    def upgraded(self) -> File3:
        """The same in format 3."""
        steps = len(self.levels) - 1
        error = self.error or ((),) * steps
        for name, rows in (("rho", self.rho), ("tau", self.tau), ("gamma", self.gamma), ("error", error)):
            if len(rows) != steps:
                raise ValueError(f"{name} must hold {steps} entries, one a step, got {len(rows)}")
        return File3(
            **{field.name: getattr(self, field.name) for field in fields(File)},
            steps=tuple(map(StepWeights, self.rho, self.tau, error, self.gamma)),
            fingerprint=self.model,
            conditions={name: value for name, value in self.settings.items() if name in CHECKED},
            provenance={name: value for name, value in self.settings.items() if name not in CHECKED},
        )


def described(name: str, thing: Any, known: Mapping[str, type]) -> dict[str, Any]:
    """As `to_config`; what no file may name is refused now, not when the file is read."""
    if known.get(type(thing).__name__) is not type(thing):
        raise ValueError(f"{name} = {shown(thing)} could not be loaded again; steindiff.register it first")
    return to_config(thing)


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
        "solver": described("solver", solver, SOLVERS.classes()),
        "nfe": solver.calls(levels),
        "schedule": described("schedule", levels.schedule, SCHEDULES.classes()),
        "levels": [list(level) for level in levels],
        "basis": described("basis", calibration["basis"], BASES.classes()),
        "steps": [rounded(weights) for weights in calibration["steps"]],
        "fingerprint": list(calibration["fingerprint"]),
        "conditions": dict(calibration["conditions"]),
        "provenance": dict(calibration["provenance"]),
    }
    return with_checksum(json.loads(json.dumps(content)))


def decode(content: Any) -> dict[str, Any]:
    """A calibration's fields by name, from what a file holds."""
    body = verified("calibration", content, 2, 3)
    try:
        read: File3 | File2 = typed("calibration", body, File3 if body["format"] == FORMAT else File2)
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None
    file = read.upgraded() if isinstance(read, File2) else read
    levels = Levels(file.levels, from_config("schedule", file.schedule, SCHEDULES.classes()))
    solver = from_config("solver", file.solver, SOLVERS.classes())
    if file.nfe != (spent := solver.calls(levels)):
        raise ValueError(f"nfe must be {spent}, what solver and levels cost, got {file.nfe}")
    return {
        "solver": solver,
        "levels": levels,
        "basis": from_config("basis", file.basis, BASES.classes()),
        "steps": file.steps,
        "fingerprint": file.fingerprint,
        "conditions": file.conditions,
        "provenance": file.provenance,
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


def load(path: Path, build: Callable[[Any], T]) -> T:
    """What `build` makes of a file's content; what is wrong with it is said with the file's name."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{path}: not a calibration: {error}") from None
    try:
        return build(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
