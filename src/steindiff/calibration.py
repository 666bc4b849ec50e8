r"""A calibration: what was measured once, in one small readable file, to be replayed for free."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from steindiff import bases, schedules, solvers
from steindiff._files import write_json
from steindiff._serialization import from_config, kinds, to_config, verified, with_checksum
from steindiff.bases import Basis
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise
from steindiff.solvers.base import Solver

FORMAT = 2
"""Version of the file format; a file of another version is refused."""

FIELDS = {"format", "solver", "nfe", "schedule", "levels", "basis", "gamma", "rho", "tau", "error", "model", "settings"}
"""What a file must hold, beside its checksum."""


def fingerprint(
    denoiser: Denoiser, shape: Sequence[int], schedule: Schedule, device: torch.device | str = "cpu"
) -> tuple[float, ...]:
    r"""Eight numbers that tell models apart: projections of D(x, level) for one fixed x in the middle of the schedule.

    They survive another device, dtype or a compiled network up to rounding; another model differs in the first digit.

    Args:
        denoiser: for a batch of one; under a condition, always the same one.
        shape: of one sample.
        schedule: the model's schedule.
        device: where the model lives.
    """
    middle = schedule.level(0.5 * (schedule.t_min + schedule.t_max))
    # Where the schedule's middle is almost pure noise, D says little: take σ/α = 1/2 instead, typical of detail.
    level = schedule.at(math.log(2.0)) if middle.ratio > 0.5 else middle
    x = noise([0], shape, Level(0.0, 1.0, math.hypot(0.5 * level.alpha, level.sigma)))
    with torch.no_grad():
        d = denoiser(x.to(device), level).double().cpu().flatten()
    directions = torch.randn(8, len(d), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return tuple(round(v, 6) for v in (directions @ d / len(d) ** 0.5).tolist())


@dataclass(frozen=True)
class Calibration:
    r"""Levels, γ, ρ and τ for one model, solver and number of evaluations.

    Attributes:
        solver: what it was measured with.
        levels: where to step.
        basis: in which ρ and τ act.
        rho: per step: K weights of the solver's effective denoised image, or empty where the step is left alone.
        gamma: per step: the relaxation coefficient; 1 leaves the step alone.
        error: standard errors of the energy correction contained in `rho`, in the same layout.
        model: fingerprint of the model, empty if unknown.
        settings: how it was measured: seeds, probes, cost, versions.
        tau: per step: for each difference ∇D_1, ∇D_2, … of the latest denoised images K weights; none by default.
    """

    solver: Solver
    levels: Levels
    basis: Basis
    rho: tuple[tuple[float, ...], ...]
    gamma: tuple[float, ...]
    error: tuple[tuple[float, ...], ...] = ()
    model: tuple[float, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    tau: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def __post_init__(self) -> None:
        steps, bands = self.levels.steps, self.basis.bands
        if not self.tau:
            object.__setattr__(self, "tau", ((),) * steps)
        if len(self.rho) != steps or len(self.gamma) != steps:
            raise ValueError(f"rho, gamma: {len(self.rho)} and {len(self.gamma)} entries for {steps} steps")
        for i, row in enumerate(self.rho):
            if row and (len(row) != bands or not all(map(math.isfinite, row))):
                raise ValueError(f"rho[{i}]: need {bands} finite numbers, or none")
        if len(self.tau) != steps:
            raise ValueError(f"tau: {len(self.tau)} entries for {steps} steps")
        for i, rows in enumerate(self.tau):
            if rows and not self.rho[i]:
                raise ValueError(f"tau[{i}]: given for a step without rho")
            if not all(len(row) == bands and all(map(math.isfinite, row)) for row in rows):
                raise ValueError(f"tau[{i}]: need rows of {bands} finite numbers")
        if not all(math.isfinite(g) for g in self.gamma):
            raise ValueError("gamma: need finite numbers")

    @classmethod
    def empty(cls, solver: Solver, levels: Levels, basis: Basis) -> Calibration:
        """A calibration that changes nothing."""
        return cls(solver, levels, basis, ((),) * levels.steps, (1.0,) * levels.steps)

    @property
    def nfe(self) -> int:
        """Evaluations a run costs."""
        return self.solver.calls(self.levels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.basis.shape

    def check(
        self,
        *,
        denoiser: Denoiser | None = None,
        solver: Solver | None = None,
        nfe: int | None = None,
        shape: Sequence[int] | None = None,
        settings: dict[str, Any] | None = None,
        device: torch.device | str = "cpu",
        tolerance: float = 0.02,
    ) -> None:
        """Refuse to be used for something else than it was measured for.

        Args:
            denoiser: for a batch of one, under the condition of the first seed it was measured on (`settings["seed"]`);
                one evaluation tells whether it is the model.
            solver: the solver about to be used.
            nfe: the budget.
            shape: of one sample.
            settings: further entries of `settings` that must be equal (guidance, prompts, …).
            device: where the model lives.
            tolerance: relative difference allowed between fingerprints.

        Raises:
            ValueError: naming everything that differs.
        """
        wrong = []
        if solver is not None and solver != self.solver:
            wrong.append(f"solver: measured with {self.solver!r}, asked for {solver!r}")
        if nfe is not None and nfe != self.nfe:
            wrong.append(f"nfe: measured for {self.nfe}, asked for {nfe}")
        if shape is not None and tuple(shape) != self.shape:
            wrong.append(f"shape: measured for {self.shape}, asked for {tuple(shape)}")
        for name, value in (settings or {}).items():
            if self.settings.get(name) != value:
                wrong.append(f"{name}: measured with {self.settings.get(name)!r}, asked for {value!r}")
        if denoiser is not None and self.model and not wrong:
            found = torch.tensor(fingerprint(denoiser, self.shape, self.levels.schedule, device))
            known = torch.tensor(self.model)
            gap = float((found - known).norm() / known.norm().clamp(min=1e-12))
            if gap > tolerance:
                wrong.append(f"model: fingerprint differs by {gap:.1%}, allowed is {tolerance:.1%}")
        if wrong:
            raise ValueError("calibration does not fit: " + "; ".join(wrong))

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        content = {
            "format": FORMAT,
            "solver": to_config(self.solver),
            "nfe": self.nfe,
            "schedule": to_config(self.levels.schedule),
            "levels": [list(level) for level in self.levels],
            "basis": to_config(self.basis),
            "gamma": list(self.gamma),
            "rho": [[round(v, 6) for v in row] for row in self.rho],
            "tau": [[[round(v, 6) for v in row] for row in rows] for rows in self.tau],
            "error": [[float(f"{v:.3g}") for v in row] for row in self.error],
            "model": list(self.model),
            "settings": self.settings,
        }
        content = json.loads(json.dumps(content))
        return with_checksum(content)

    @classmethod
    def from_dict(cls, content: Any) -> Calibration:
        """Rebuild from what `to_dict` gave, checking everything.

        Raises:
            ValueError: if anything is missing, altered or of another version.
        """
        body = verified("calibration", content, FORMAT)
        missing = FIELDS - set(body)
        if missing:
            raise ValueError(f"fields missing: {', '.join(sorted(missing))}")
        try:
            schedule = from_config("schedule", body["schedule"], kinds(schedules, Schedule))
            calibration = cls(
                solver=from_config("solver", body["solver"], kinds(solvers, Solver)),
                levels=Levels(tuple(Level(*map(float, level)) for level in body["levels"]), schedule),
                basis=from_config("basis", body["basis"], kinds(bases, Basis)),
                rho=tuple(tuple(map(float, row)) for row in body["rho"]),
                gamma=tuple(map(float, body["gamma"])),
                error=tuple(tuple(map(float, row)) for row in body["error"]),
                model=tuple(map(float, body["model"])),
                settings=dict(body["settings"]),
                tau=tuple(tuple(tuple(map(float, row)) for row in rows) for rows in body["tau"]),
            )
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"a field has the wrong type: {error}") from None
        if len(body["tau"]) != calibration.levels.steps:
            raise ValueError(f"tau: {len(body['tau'])} entries for {calibration.levels.steps} steps")
        if calibration.nfe != body["nfe"]:
            raise ValueError(f"nfe = {body['nfe']!r}: solver and levels make {calibration.nfe}")
        return calibration

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read and check a file.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not a sound calibration of this format; the message names the file.
        """
        data = Path(path).read_bytes()
        try:
            return cls.from_dict(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None
