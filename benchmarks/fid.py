"""FID of the embedded CIFAR-10 model, one record per cell.

    python benchmarks/fid.py limit headline --samples 50000
    python benchmarks/fid.py baseline hosts calibrated ablation --calibrations calibrations

Records are appended to `--out` as they are made; cells already there are skipped, so an interrupted run goes on where
it stopped. Seeds are 0 to samples − 1, labels seed mod 10 (class-conditional, no guidance); calibrations use other
seeds. NFE counts evaluations of the network per sample; `network_calls` is what one batch's run really called;
`order` is the order at which the solver converges, which is 2 for the published DPM-Solver++(3M). Grids end at the
smallest σ without a step to 0, which is the stronger baseline at few evaluations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recording import Records, machine, options
from steindiff import GRIDS, SOLVERS, datasets, noise, sample
from steindiff.bases import Identity
from steindiff.calibrating import ByAlignment, ByEnergy, Fit, Recipe, SteinEnergy, calibrate
from steindiff.calibration import Calibration
from steindiff.corrections import Correction
from steindiff.corrections.plain import Plain
from steindiff.corrections.replay import Replay
from steindiff.denoisers import Denoiser, EDMDenoiser
from steindiff.levels import Level, Levels
from steindiff.metrics import references
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.metrics.inception import InceptionFeatures
from steindiff.pixels import to_uint8
from steindiff.reference import ReferenceRun, reference_run
from steindiff.schedules import EDM
from steindiff.solvers import Solver
from steindiff.zoo import load

CALIBRATION_SEEDS = range(10**6, 10**6 + 1000)
FITS: dict[str, Fit] = {
    "calibrated": ByAlignment(),
    "energy alone, self M": ByEnergy(),
    "energy alone, Stein M": ByEnergy(SteinEnergy()),
    "alignment alone": ByAlignment(below=0.0),
    "no difference": ByAlignment(terms=0),
    "one difference": ByAlignment(terms=1),
    "three differences": ByAlignment(terms=3),
    "energy of the last step": ByAlignment(below=0.1),
    "energy of all steps": ByAlignment(below=1e9),
    "bound 2": ByAlignment(bound=2.0),
    "bound 16": ByAlignment(bound=16.0),
    "significance 0": ByAlignment(significance=0.0),
    "significance 4": ByAlignment(significance=4.0),
    "unweighted": ByAlignment(tail=1e9),
}
"""What a record's `correction` may be, beside "none"."""
Begin = Callable[[Tensor, Sequence[int]], Tensor]
"""Unit noise `(B, C, H, W)` and its seeds to the states a run begins with."""


@dataclass(frozen=True)
class Cell:
    """One number of the table: a solver on a grid, corrected or not, at a budget.

    Options: `power` of the Stein grid; `start` of the run, in root energies of the strongest band; `within` what the
    plain solver is kept; `seeds` of the calibration; one `band` for all frequencies; `probes` on each of
    `probe_samples`.
    """

    solver: str
    nfe: int
    grid: str = "stein"
    correction: str = "none"
    options: dict[str, Any] = field(default_factory=dict)


def first(measured: ReferenceRun, count: int) -> ReferenceRun:
    """A survey's first samples alone."""
    states, denoised = (tuple(x[:count] for x in kept) for kept in (measured.path.states, measured.path.denoised))
    path = replace(measured.path, states=states, denoised=denoised)
    return replace(measured, seeds=measured.seeds[:count], own=measured.own[:count], path=path)


@dataclass
class Bench:
    """The model, its calibration survey, the feature network and the reference, made when first needed."""

    network: nn.Module
    inception: Path
    device: str
    samples: int
    batch: int
    tf32: bool = False
    calibrations: Path | None = None

    schedule = EDM()

    @cached_property
    def features(self) -> InceptionFeatures:
        return InceptionFeatures.load(self.inception, self.device, tf32=self.tf32)

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

    def quick(self, seeds: Sequence[int]) -> Denoiser:
        """The network that samples, for whole batches; one compiled for them must not be compiled again for others."""
        return self.denoiser(self.network if len(seeds) == self.batch else self.wide, seeds)

    def measure(self, probe_samples: int = 125, probes: int = 4) -> ReferenceRun:
        return reference_run(
            partial(self.denoiser, self.wide),
            self.schedule,
            (3, 32, 32),
            seeds=CALIBRATION_SEEDS,
            steps=40,
            probe_levels=16,
            probe_samples=probe_samples,
            probes=probes,
            batch=250,
            device=self.device,
        )

    @cached_property
    def reference_run(self) -> ReferenceRun:
        return self.measure()

    def calibrate(self, cell: Cell) -> Calibration:
        options = dict(cell.options)
        rarely = {name: options.pop(name) for name in ("probed", "probes") if name in options}
        measured = self.measure(**rarely) if rarely else self.survey
        if "seeds" in options:
            measured = first(measured, options.pop("seeds"))
        if options.pop("band", None):
            measured = replace(measured, basis=Identity((3, 32, 32)))
        grid = None if cell.grid == "stein" else GRIDS[cell.grid]
        return calibrate(
            self.quick,
            SOLVERS[cell.solver],
            self.schedule,
            cell.nfe,
            (3, 32, 32),
            recipe=Recipe(grid=grid, fit=FITS[cell.correction], **options),
            measured=measured,
            batch=self.batch,
            device=self.device,
            settings={"model": "cifar10", "guidance": 1.0},
        )

    def plan(self, cell: Cell) -> tuple[Levels, Correction]:
        if cell.correction == "none":
            options = dict(cell.options)
            start = options.pop("start", None)
            schedule = self.schedule.starting_at(start * self.survey.peak_band_rms) if start else self.schedule
            grid = GRIDS[cell.grid] if cell.grid in GRIDS else self.survey.grid(**options)
            return SOLVERS[cell.solver].levels(grid, schedule, cell.nfe), Plain()
        calibration = self.calibrate(cell)
        if self.calibrations is not None and cell == Cell(cell.solver, cell.nfe, "stein", "calibrated", cell.options):
            changes = "".join(f"-{name}-{value}" for name, value in cell.options.items())
            calibration.save(self.calibrations / f"cifar10-{cell.solver}-{cell.nfe}{changes}.json")
        return calibration.levels, Replay(calibration)

    def sampled(
        self, solver: Solver, levels: Levels, correction: Correction, spent: dict[str, int], begin: Begin | None = None
    ) -> Iterator[Tensor]:
        """The images of all seeds, as bytes in parts of 500; `spent` is told what one batch cost."""
        for start in range(0, self.samples, self.batch):
            seeds = range(start, min(start + self.batch, self.samples))
            unit = self.unit_noise[seeds.start : seeds.stop]
            x = unit * levels[0].sigma if begin is None else begin(unit, seeds)
            out = sample(self.denoiser(self.network, seeds), x, levels, solver, correction)
            spent.update(nfe=out.nfe, network_calls=out.network_calls, backward_passes=out.backward_passes)
            yield from to_uint8(out.x).split(500)

    def images(self, cell: Cell, spent: dict[str, int]) -> Iterator[Tensor]:
        return self.sampled(SOLVERS[cell.solver], *self.plan(cell), spent)

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
            "tf32": self.tf32,
            "seconds": round(time.monotonic() - begun, 2),
            **machine(self.device),
        }


def identity(cell: Cell, samples: int) -> dict[str, Any]:
    """The fields that tell cells apart."""
    return {"model": "cifar10", **asdict(cell), "samples": samples}


def limit() -> list[Cell]:
    return [Cell("heun", 35, "edm")]


GRIDS_COMPARED = ("edm-min", "logsnr-min")


def baseline() -> list[Cell]:
    return [
        Cell(solver, nfe, grid)
        for nfe in (4, 5, 6, 8, 10, 15, 20)
        for solver in ("dpmpp-2m", "dpmpp-3m")
        for grid in GRIDS_COMPARED
    ]


HOSTS = {
    **{solver: (4, 5, 6, 8, 10, 15, 20) for solver in ("dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ddim", "ipndm-4")},
    "heun": (4, 6, 8, 10, 20),
}
"""Budgets of every solver; Heun costs two evaluations a step."""


def hosts() -> list[Cell]:
    return [Cell(solver, nfe, grid) for solver, budgets in HOSTS.items() for nfe in budgets for grid in GRIDS_COMPARED]


def calibrated() -> list[Cell]:
    return [Cell(solver, nfe, correction="calibrated") for solver, budgets in HOSTS.items() for nfe in budgets]


def headline() -> list[Cell]:
    """What is worth 50,000 samples, the number of the field."""
    return [
        cell
        for nfe in (4, 5, 6, 8, 10)
        for cell in (Cell("dpmpp-2m", nfe, "logsnr-min"), Cell("dpmpp-2m", nfe, correction="calibrated"))
    ]


def late() -> list[Cell]:
    """Runs that begin later than the schedule, and three evaluations."""
    cells = [Cell("dpmpp-2m", nfe, correction="calibrated", options={"start": 2.0}) for nfe in (3, 4, 5, 6, 8, 10)]
    cells += [Cell("dpmpp-2m", 4, correction="calibrated", options={"start": start}) for start in (1.0, 4.0)]
    cells += [Cell("dpmpp-2m", nfe, grid, options={"start": 2.0}) for nfe in (4, 5) for grid in GRIDS_COMPARED]
    cells += [Cell("dpmpp-2m", 3, grid) for grid in GRIDS_COMPARED]
    cells += [Cell("dpmpp-2m", 3, correction="calibrated")]
    for solver, budgets in {"ddim": (4, 5), "ipndm-4": (4, 5), "unipc-bh1-3": (4, 5, 8), "heun": (4, 6)}.items():
        cells += [Cell(solver, nfe, correction="calibrated", options={"start": 2.0}) for nfe in budgets]
    return cells


def ablation() -> list[Cell]:
    """One change at a time from the default, 2M at 5 evaluations; the main ones at 8, too."""
    options: list[dict[str, Any]] = [
        *({"power": power} for power in (0.0, 0.1, 0.3, 0.5)),
        *({"seeds": seeds} for seeds in (16, 64, 250)),
        {"band": 1},
        {"probed": 8, "probes": 1},
    ]
    forced = {"within": 0.0}  # corrected where the plain solver would be kept
    main = ("energy alone, self M", "energy alone, Stein M", "alignment alone")
    cells = [Cell("dpmpp-2m", 5), Cell("dpmpp-2m", 8)]  # the Stein grid alone
    cells += [Cell("dpmpp-2m", nfe, correction=name) for nfe in (5, 8) for name in main]
    cells += [Cell("dpmpp-2m", 5, grid, "calibrated") for grid in GRIDS_COMPARED]
    cells += [Cell("dpmpp-2m", 5, correction=name) for name in FITS if name not in ("calibrated", *main)]
    cells += [Cell("dpmpp-2m", 5, correction="calibrated", options=change) for change in options]
    strong = ("dpmpp-3m", "unipc-bh1-3", "ipndm-4")
    return [*cells, *(Cell(solver, nfe, "stein", "calibrated", forced) for solver in strong for nfe in (15, 20))]


PLANS: dict[str, Callable[[], list[Cell]]] = {
    "limit": limit,
    "baseline": baseline,
    "hosts": hosts,
    "calibrated": calibrated,
    "headline": headline,
    "late": late,
    "ablation": ablation,
}


def main() -> None:
    parser = options(__doc__, "cifar10")
    parser.add_argument("plans", nargs="+", choices=PLANS)
    parser.add_argument("--compile", action="store_true", help="compile the network: three times as fast, 30 s to wait")
    parser.add_argument("--calibrations", type=Path, help="folder to keep the calibrations of the default fit in")
    args = parser.parse_args()

    begun = time.monotonic()
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    network = load("cifar10", device=args.device).to(dtype).to(memory_format=torch.channels_last)
    bench = Bench(
        torch.compile(network) if args.compile else network,
        args.inception or datasets.inception(),
        args.device,
        args.samples,
        args.batch,
        args.tf32,
        args.calibrations,
    )
    if args.calibrations is not None:
        args.calibrations.mkdir(parents=True, exist_ok=True)
    cells = [cell for plan in args.plans for cell in PLANS[plan]()]
    Records(args.out).measure(cells, partial(identity, samples=args.samples), bench.run, begun + args.seconds)


if __name__ == "__main__":
    main()
