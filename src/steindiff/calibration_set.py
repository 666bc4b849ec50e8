r"""Several calibrations of one solver in one file: budgets and guidance scales to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steindiff import calibration_file
from steindiff._serialization import decode, verified, with_checksum
from steindiff.calibration import DEFAULTS, Calibration
from steindiff.solvers.base import Solver


def scales(calibration: Calibration) -> set[float]:
    """The guidance scales a calibration goes by: the weight of its guidance, or what its network takes as an input."""
    known = calibration.conditions.get("guidance", DEFAULTS["guidance"])
    if not isinstance(known, Mapping):
        return {float(known)}
    found = {float(known["weight"])} if known.get("copies") == 2 else set()
    embedded = known.get("embedded")
    return found | ({float(embedded)} if embedded is not None else set()) or {1.0}


@dataclass(frozen=True)
class CalibrationSet:
    """Calibrations of one solver and one shape of samples.

    Args:
        calibrations: at least one; they differ in budget, guidance or both.
    """

    calibrations: tuple[Calibration, ...]

    def __post_init__(self) -> None:
        if not self.calibrations:
            raise ValueError("calibrations must hold at least one")
        for other in self.calibrations[1:]:
            if found := self.calibrations[0].differences(solver=other.solver, shape=other.shape):
                raise ValueError(f"calibrations must share solver and shape: {'; '.join(found)}")

    @property
    def solver(self) -> Solver:
        """The solver of all of them."""
        return self.calibrations[0].solver

    def choose(self, *, steps: int | None = None, nfe: int | None = None, guidance: float | None = None) -> Calibration:
        """The one calibration for a number of steps or evaluations and a guidance scale; of what is given only.

        Raises:
            ValueError: if there is none, or more than one.
        """
        found = self.calibrations
        for name, wanted, have in (
            ("steps", steps, lambda c: {c.levels.steps}),
            ("nfe", nfe, lambda c: {c.nfe}),
            ("guidance", guidance, scales),
        ):
            if wanted is not None:
                offered = sorted({value for c in found for value in have(c)})
                found = tuple(c for c in found if wanted in have(c))
                if not found:
                    raise ValueError(f"{name} must be one of {', '.join(f'{v:g}' for v in offered)}, got {wanted:g}")
        if len(found) > 1:
            kinds = ", ".join(f"nfe {c.nfe} at guidance {' and '.join(f'{v:g}' for v in scales(c))}" for c in found)
            raise ValueError(f"calibrations: several fit ({kinds}); say which with choose(nfe=…, guidance=…)")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        calibrations = [calibration.to_dict() for calibration in self.calibrations]
        return with_checksum({"format": calibration_file.FORMAT, "calibrations": calibrations})

    @classmethod
    def from_dict(cls, content: Any) -> CalibrationSet:
        """Rebuild from what `to_dict` gave, or from that of a single calibration.

        Raises:
            ValueError: if anything is missing, altered or of an unknown format.
        """
        if not (isinstance(content, Mapping) and "calibrations" in content):
            return cls((Calibration.from_dict(content),))
        body = verified("calibration set", dict(content), calibration_file.FORMAT)
        if set(body) != {"format", "calibrations"}:
            raise ValueError(f"a calibration set does not know {sorted(set(body) - {'format', 'calibrations'})}")
        return cls(tuple(map(Calibration.from_dict, decode("calibrations", body["calibrations"], tuple[Any, ...]))))

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        calibration_file.write(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> CalibrationSet:
        """Read and check a file of several calibrations, or of one.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not sound; the message names the file.
        """
        try:
            return cls.from_dict(calibration_file.read(Path(path)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None
