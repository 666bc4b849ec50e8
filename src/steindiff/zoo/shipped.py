"""Calibrations of the embedded models that ship with the package: one file per model, solver and budget."""

from __future__ import annotations

from pathlib import Path

from steindiff.calibration import Calibration
from steindiff.solvers import SOLVERS
from steindiff.solvers.base import Solver

FOLDER = Path(__file__).parent / "calibrations"


def location(name: str, solver: Solver, nfe: int) -> Path | None:
    """Where a model's calibration lies or would lie; None for a solver that has no name."""
    names = [key for key, value in SOLVERS.items() if value == solver]
    return FOLDER / f"{name}-{names[0]}-{nfe}.json" if names else None


def calibration(name: str, solver: Solver, nfe: int) -> Calibration | None:
    """The shipped calibration of a model for a solver and a number of evaluations, or None where there is none."""
    path = location(name, solver, nfe)
    return Calibration.load(path) if path is not None and path.exists() else None
