"""FID of the embedded CIFAR-10 model, one record per cell.

    python benchmarks/fid.py baseline
    python benchmarks/fid.py limit --samples 50000
    python benchmarks/fid.py calibrated ablation --seconds 300

Records are appended to `--out` as they are made; cells already there are skipped, so an interrupted run goes on where
it stopped. Seeds are 0 to samples − 1, labels seed mod 10 (class-conditional, no guidance); calibrations use other
seeds. NFE counts evaluations of the network per sample; `network_calls` is what one batch's run really called;
`order` is the order at which the solver converges, which is 2 for the published DPM-Solver++(3M).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steindiff import GRIDS, SOLVERS, datasets, noise, sample
from steindiff.calibrate import calibrate
from steindiff.corrections import Correction
from steindiff.corrections.plain import Plain
from steindiff.corrections.replay import Replay
from steindiff.denoisers import Denoiser, EDMDenoiser
from steindiff.files import write_json
from steindiff.levels import Level, Levels
from steindiff.metrics import references
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.metrics.inception import InceptionFeatures
from steindiff.pixels import to_uint8
from steindiff.schedules import EDM
from steindiff.survey import Survey, survey
from steindiff.zoo import load

CALIBRATION_SEEDS = range(10**6, 10**6 + 1000)


@dataclass(frozen=True)
class Cell:
    """One number of the table: a solver on a grid, corrected or not, at a budget."""

    solver: str
    nfe: int
    grid: str = "stein"
    correction: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """The model, its calibration survey, the feature network and the reference, made when first needed."""

    network: nn.Module
    inception: Path
    device: str
    samples: int
    batch: int

    schedule = EDM()

    @cached_property
    def features(self) -> InceptionFeatures:
        return InceptionFeatures.load(self.inception, self.device)

    @cached_property
    def reference(self) -> Moments:
        return references.load("cifar10-train").to(self.device)

    @cached_property
    def unit_noise(self) -> Tensor:
        return noise(range(self.samples), (3, 32, 32), Level(0.0, 1.0, 1.0)).to(self.device)

    def denoiser(self, network: nn.Module, seeds: Sequence[int]) -> Denoiser:
        labels = torch.tensor([seed % 10 for seed in seeds], device=self.device)
        return EDMDenoiser(partial(network, labels=labels))

    @cached_property
    def wide(self) -> nn.Module:
        """The network in float32, for derivatives."""
        return load("cifar10", device=self.device).float()

    @cached_property
    def survey(self) -> Survey:
        return survey(
            partial(self.denoiser, self.wide),
            self.schedule,
            (3, 32, 32),
            seeds=CALIBRATION_SEEDS,
            steps=32,
            stations=16,
            probed=125,
            probes=4,
            batch=256,
            device=self.device,
        )

    def plan(self, cell: Cell) -> tuple[Levels, Correction]:
        solver = SOLVERS[cell.solver]
        if cell.correction == "none":
            grid = GRIDS[cell.grid] if cell.grid in GRIDS else self.survey.grid(**cell.options)
            return solver.levels(grid, self.schedule, cell.nfe), Plain()
        grid = None if cell.grid == "stein" else GRIDS[cell.grid]
        calibration = calibrate(
            partial(self.denoiser, self.wide),
            solver,
            self.schedule,
            cell.nfe,
            (3, 32, 32),
            measured=self.survey,
            batch=512,
            grid=grid,
            device=self.device,
            **cell.options,
        )
        return calibration.levels, Replay(calibration)

    def images(self, cell: Cell, spent: dict[str, int]) -> Iterator[Tensor]:
        levels, correction = self.plan(cell)
        for start in range(0, self.samples, self.batch):
            seeds = range(start, min(start + self.batch, self.samples))
            x = self.unit_noise[seeds.start : seeds.stop] * levels[0].sigma
            out = sample(self.denoiser(self.network, seeds), x, levels, SOLVERS[cell.solver], correction)
            spent.update(nfe=out.nfe, network_calls=out.network_calls, backward_passes=out.backward_passes)
            yield from to_uint8(out.x).split(500)

    def run(self, cell: Cell) -> dict[str, Any]:
        begun = time.monotonic()
        spent: dict[str, int] = {}
        moments = Moments.stream(self.images(cell, spent), self.features)
        fid = frechet_distance(self.reference, moments)
        return {
            **identity(cell, self.samples),
            **spent,
            "order": SOLVERS[cell.solver].order,
            "seed": 0,
            "fid": round(fid, 4),
            "seconds": round(time.monotonic() - begun, 2),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else platform.machine(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }


def identity(cell: Cell, samples: int) -> dict[str, Any]:
    """The fields that tell cells apart."""
    return {
        "model": "cifar10",
        "solver": cell.solver,
        "grid": cell.grid,
        "correction": cell.correction,
        "options": cell.options,
        "nfe": cell.nfe,
        "samples": samples,
    }


def limit() -> list[Cell]:
    return [Cell("heun", 35, "edm")]


def baseline() -> list[Cell]:
    return [
        Cell(solver, nfe, grid)
        for nfe in (5, 6, 8, 10, 15, 20)
        for solver in ("dpmpp-2m", "dpmpp-3m")
        for grid in ("edm-min", "logsnr-min")
    ]


BUDGETS = (4, 5, 6, 8, 10, 15, 20)
HEUN_BUDGETS = (5, 7, 9, 15, 19)
"""Heun with a last step to σ = 0 costs an odd number of evaluations."""
HOSTS = ("dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ddim", "ipndm-4")


def hosts() -> list[Cell]:
    cells = [Cell(s, nfe, grid) for nfe in BUDGETS for s in HOSTS for grid in ("edm-min", "logsnr-min")]
    return [*cells, *(Cell("heun", nfe, grid) for nfe in HEUN_BUDGETS for grid in ("edm", "logsnr"))]


def calibrated() -> list[Cell]:
    cells = [Cell(s, nfe, correction="balance") for nfe in BUDGETS for s in HOSTS]
    return [*cells, *(Cell("heun", nfe, correction="balance") for nfe in HEUN_BUDGETS)]


def ablation() -> list[Cell]:
    """One change at a time from the default, 2M at 5 and 8 evaluations."""
    changes: list[dict[str, Any]] = [
        *({"power": power} for power in (0.0, 0.1, 0.3, 0.5)),
        *({"below": below} for below in (0.0, 0.5, 1e9)),
        *({"bound": bound} for bound in (1.5, 2.0, 1e9)),
        *({"significance": significance} for significance in (0.0, 4.0)),
    ]
    cells = [Cell("dpmpp-2m", nfe, correction="balance", options=change) for nfe in (5, 8) for change in changes]
    cells += [Cell("dpmpp-2m", nfe) for nfe in (5, 8)]  # the Stein grid alone
    cells += [Cell("dpmpp-2m", nfe, grid, "balance") for nfe in (5, 8) for grid in ("edm-min", "logsnr-min")]
    return [*cells, *(Cell("dpmpp-2m", nfe, grid) for nfe in (5, 8) for grid in ("edm", "logsnr"))]


PLANS: dict[str, Callable[[], list[Cell]]] = {
    "limit": limit,
    "baseline": baseline,
    "hosts": hosts,
    "calibrated": calibrated,
    "ablation": ablation,
}


def append(path: Path, records: list[dict[str, Any]], record: dict[str, Any]) -> None:
    records.append(record)
    write_json(path, records)
    print(
        json.dumps(
            {k: record[k] for k in ("solver", "grid", "correction", "options", "nfe", "samples", "fid", "seconds")}
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="+", choices=PLANS)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=2_500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after so long")
    parser.add_argument("--inception", type=Path, help="TorchScript file; default: fetched by package name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cifar10.json"))
    args = parser.parse_args()

    begun = time.monotonic()
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    network = load("cifar10", device=args.device).to(dtype).to(memory_format=torch.channels_last)
    bench = Bench(network, args.inception or datasets.inception(), args.device, args.samples, args.batch)
    records = json.loads(args.out.read_text()) if args.out.exists() else []
    for cell in (cell for plan in args.plans for cell in PLANS[plan]()):
        known = identity(cell, args.samples)
        if any(all(record.get(k) == v for k, v in known.items()) for record in records):
            continue
        if time.monotonic() - begun > args.seconds:
            break
        append(args.out, records, bench.run(cell))


if __name__ == "__main__":
    main()
