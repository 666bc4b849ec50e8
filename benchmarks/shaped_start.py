"""Does a late start gain from the model's own spectrum and mean? Calibrated DPM-Solver++(2M), FID of 10,000 samples.

    python benchmarks/shaped_start.py

The ODE of Gaussian data has a closed solution: its state at σ has the mean m and in every band the variance σ² + V_f.
Wang and Vastola (arXiv:2412.09726) begin there instead of at the schedule's largest σ. Here m and V are those of the
survey's own samples; `shape` is "white" (noise alone), "spectrum" (no mean, V the band energies), "mean" (one for all)
or "classes" (one for each). The alignment is fitted from the same states. Writes
`benchmarks/results/shaped_start.json`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fid import Bench
from recording import Records, machine, options
from steindiff import SOLVERS, datasets, noise, sample
from steindiff.calibrating import ByAlignment, step_row
from steindiff.calibration import Calibration
from steindiff.corrections.replay import Replay
from steindiff.levels import Level
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.reference import conditioned
from steindiff.schedules import EDM
from steindiff.zoo import load

SOLVER = SOLVERS["dpmpp-2m"]
UNIT = Level(0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Cell:
    """One number: evaluations, where the run begins, and with what."""

    nfe: int
    sigma: float
    shape: str


CELLS = [
    Cell(4, 80.0, "white"),
    *(Cell(4, 20.0, shape) for shape in ("white", "spectrum", "mean", "classes")),
    *(Cell(4, 10.0, shape) for shape in ("spectrum", "mean", "classes")),
    *(Cell(4, 6.0, shape) for shape in ("mean", "classes")),
    Cell(4, 40.0, "mean"),
    Cell(3, 80.0, "white"),
    Cell(3, 10.0, "mean"),
    *(Cell(3, sigma, "classes") for sigma in (10.0, 6.0)),
    *(Cell(5, sigma, "mean") for sigma in (40.0, 20.0, 10.0)),
    Cell(5, 10.0, "classes"),
    *(Cell(nfe, 15.0, "mean") for nfe in (3, 4, 6, 8)),
]


@dataclass
class Starts:
    """Initial states made of unit noise, from what a bench's survey found."""

    bench: Bench

    @cached_property
    def means(self) -> dict[str, Tensor]:
        """Means of the survey's samples: none, one, and one for each class, `(classes, C, H, W)`."""
        own = self.bench.survey.samples.double()
        labels = torch.tensor([seed % 10 for seed in self.bench.survey.own])
        classes = torch.stack([own[labels == k].mean(0) for k in range(10)])
        return {"spectrum": torch.zeros_like(classes), "mean": own.mean(0).expand_as(classes), "classes": classes}

    def __call__(self, cell: Cell, unit: Tensor, seeds: Sequence[int]) -> Tensor:
        """The states of `cell` for unit noise `(B, C, H, W)`."""
        if cell.shape == "white":
            return unit * cell.sigma
        basis, survey = self.bench.survey.basis, self.bench.survey
        mean = self.means[cell.shape]
        around = survey.samples.double() - mean[[seed % 10 for seed in survey.own]]
        variance = basis.average(basis.forward(around).square()).mean(0)
        scale = basis.spread((cell.sigma**2 + variance).sqrt()).to(unit.device)
        shift = mean[[seed % 10 for seed in seeds]].to(unit.device)
        return (shift + basis.filter(unit.double(), scale)).float()


def run(bench: Bench, starts: Starts, cell: Cell) -> dict[str, Any]:
    begun, survey = time.monotonic(), bench.survey
    levels = SOLVER.levels(survey.grid(), EDM(t_max=cell.sigma), cell.nfe)
    unit = noise(survey.own, (3, 32, 32), UNIT).to(bench.device)
    whole = conditioned(bench.quick, survey.own, bench.batch)
    fitted = sample(whole, starts(cell, unit, survey.own), levels, SOLVER, ByAlignment()(survey))
    rows = [step_row(found) for found in fitted.statistics]
    calibration = Calibration(
        SOLVER,
        levels,
        survey.basis,
        tuple(row.rho for row in rows),
        (1.0,) * levels.steps,
        tau=tuple(row.tau for row in rows),
    )
    spent: dict[str, int] = {}
    images = bench.sampled(SOLVER, levels, Replay(calibration), spent, partial(starts, cell))
    fid = frechet_distance(bench.reference, Moments.stream(images, bench.features))
    record = {**identity(cell, bench.samples), **spent, "seed": 0, "fid": round(fid, 3), "tf32": bench.tf32}
    return {**record, "seconds": round(time.monotonic() - begun, 1), **machine(bench.device)}


def identity(cell: Cell, samples: int) -> dict[str, Any]:
    """The fields that tell cells apart."""
    return {"model": "cifar10", "solver": "dpmpp-2m", **vars(cell), "samples": samples}


def main() -> None:
    parser = options(__doc__, "shaped_start")
    args = parser.parse_args()
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    network = load("cifar10", device=args.device).to(dtype).to(memory_format=torch.channels_last)
    bench = Bench(network, args.inception or datasets.inception(), args.device, args.samples, args.batch, args.tf32)
    starts = Starts(bench)
    until = time.monotonic() + args.seconds
    Records(args.out).measure(CELLS, partial(identity, samples=args.samples), partial(run, bench, starts), until)


if __name__ == "__main__":
    main()
