r"""A calibration: what was measured once for one model, solver and budget, to be replayed for free; and sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steindiff import calibration_file
from steindiff._checks import shown
from steindiff._serialization import decode, verified, with_checksum
from steindiff.bases import Basis
from steindiff.corrections.replay import Replay, StepWeights
from steindiff.levels import Levels
from steindiff.model import SAME_MODEL, Model, fingerprint_gap
from steindiff.sampler import Sampler
from steindiff.solvers.base import Solver

DEFAULTS: Mapping[str, Any] = {"guidance": 1.0, "guidance_rescale": 0.0, "threshold": None}
"""Conditions that hold where nothing is said of them."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    r"""Levels and weights for one model, solver and number of evaluations.

    Attributes:
        solver: what it was measured with.
        levels: where to step, and what the network is told there.
        basis: in which the weights act.
        steps: the weights of every step.
        fingerprint: of the model, eight numbers; empty if unknown.
        conditions: what must be equal where it is used (guidance, network), by name; checked.
        provenance: how it was made: seeds, cost, versions. Never checked.
    """

    solver: Solver
    levels: Levels
    basis: Basis
    steps: tuple[StepWeights, ...]
    fingerprint: tuple[float, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replay()  # checks that the parts fit each other

    @classmethod
    def empty(cls, solver: Solver, levels: Levels, basis: Basis) -> Calibration:
        """A calibration that changes nothing."""
        return cls(solver=solver, levels=levels, basis=basis, steps=(StepWeights(),) * levels.steps)

    @property
    def nfe(self) -> int:
        """Evaluations a run costs."""
        return self.solver.calls(self.levels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.basis.shape

    @property
    def corrects(self) -> bool:
        """Whether anything is changed: some step has weights, or the network is told another level."""
        return any(w.rho or w.gamma != 1.0 for w in self.steps) or any(level.told != 1.0 for level in self.levels)

    def replay(self) -> Replay:
        """The correction that replays it, bound to its solver and levels."""
        return Replay(self.solver, self.levels, self.basis, self.steps)

    def sampler(self, *, check: bool = True) -> Sampler:
        """The sampler that replays it.

        Args:
            check: recognise the model before sampling, by one evaluation, once. False skips that: for another guidance,
                a LoRA or a quantised network, at your own risk.
        """
        return Sampler(self.solver, self.levels, None, self.replay(), self.check if check else None)

    def differences(
        self,
        *,
        solver: Solver | None = None,
        nfe: int | None = None,
        shape: tuple[int, ...] | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """What differs from how it was measured, in words; of what is given only."""
        found = []
        if solver is not None and solver != self.solver:
            found.append(f"solver: measured with {self.solver!r}, asked for {solver!r}")
        if nfe is not None and nfe != self.nfe:
            found.append(f"nfe: measured for {self.nfe}, asked for {nfe}")
        if shape is not None and tuple(shape) != self.shape:
            found.append(f"shape: measured for {self.shape}, asked for {tuple(shape)}")
        for name, value in (conditions or {}).items():
            known = self.conditions.get(name, DEFAULTS.get(name))
            if known != value:
                found.append(f"{name}: measured with {known!r}, asked for {value!r}")
        return found

    def check(self, model: Model) -> None:
        """Raise if this calibration was not made for the given model; costs one evaluation, once for a model."""
        wanted = {**DEFAULTS, **model.conditions}
        found = self.differences(shape=model.shape, conditions=wanted)
        if type(model.schedule) is not type(self.levels.schedule):
            known, given = type(self.levels.schedule).__name__, type(model.schedule).__name__
            found.append(f"schedule: measured on {known}, the model has {given}")
        if not found and self.fingerprint:
            gap = fingerprint_gap(model.fingerprint, self.fingerprint)
            if gap > SAME_MODEL:
                found.append(f"network: its answer differs by {gap:.1%} from the one measured, over {SAME_MODEL:.0%}")
        if found:
            why = "; ".join(found)
            raise ValueError(f"calibration does not fit the model: {why}; calibrate it, or use sampler(check=False)")

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        return calibration_file.encode(vars(self))

    @classmethod
    def from_dict(cls, content: Any) -> Calibration:
        """Rebuild from what `to_dict` gave, checking everything."""
        return cls(**calibration_file.decode(content))

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        calibration_file.write(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read and check a file.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not a sound calibration; the message names the file.
        """
        return calibration_file.load(Path(path), cls.from_dict)


def check_calibration(given: object) -> None:
    """Refuse what is not a calibration, such as the path of one."""
    if not isinstance(given, Calibration | CalibrationSet):
        raise TypeError(
            f"calibration must be a Calibration, got {shown(given)}; of a file write Calibration.load(path)"
        )


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
        """The one calibration for a number of steps or evaluations and a guidance scale; of what is given only."""
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
        """Rebuild from what `to_dict` gave, or from that of a single calibration."""
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
        """Read and check a file of several calibrations, or of one."""
        return calibration_file.load(Path(path), cls.from_dict)
