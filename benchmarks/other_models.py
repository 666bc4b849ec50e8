"""Does the gain hold elsewhere? A variance-preserving model of Fashion-MNIST, and guided sampling of CIFAR-10.

    python benchmarks/other_models.py fashion
    python benchmarks/other_models.py guided

Fréchet distances of Inception features, samples of seeds 0 to samples − 1: `fid` to real training images, and
`fd_many_step` to as many samples of the same model by DPM-Solver++(2M) in 32 evaluations, other seeds; where the
model is far from the data, or guided away from it, the second says what few steps cost. Calibrations are measured on
other seeds again. Cells already in `--out` are skipped, so an interrupted run goes on where it stopped. With guidance
an evaluation is two calls of the network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fid import Cell
from recording import Records, machine, options, real_images
from steindiff import GRIDS, SOLVERS, datasets, noise, sample, zoo
from steindiff.calibrating import calibrate
from steindiff.corrections import Correction
from steindiff.corrections.plain import Plain
from steindiff.corrections.replay import Replay
from steindiff.levels import Levels
from steindiff.metrics import InceptionFeatures, Moments, frechet_distance, references
from steindiff.models import by_seed, embedded
from steindiff.pixels import to_uint8
from steindiff.reference import ReferenceRun, reference_run

MANY = Cell("dpmpp-2m", 32, "edm-min")
CALIBRATION_SEED, REFERENCE_SEED = 10**6, 2 * 10**6
"""First seeds of calibration and of the many-step reference, far from those measured."""


@dataclass(frozen=True)
class Study:
    """One model, what is measured of it, and in what precision it samples on a GPU."""

    model: str
    guidance: float
    solvers: tuple[str, ...]
    budgets: tuple[int, ...]
    grids: tuple[str, ...]
    dtype: torch.dtype

    def cells(self) -> list[Cell]:
        pairs = [(solver, nfe) for nfe in self.budgets for solver in self.solvers]
        plain = [Cell(solver, nfe, grid) for solver, nfe in pairs for grid in self.grids]
        return [*plain, *(Cell(solver, nfe, "stein", "calibrated") for solver, nfe in pairs), MANY]


HOSTS = ("ddim", "dpmpp-2m")
PUBLISHED = ("edm", "edm-min", "logsnr", "logsnr-min", "uniform")
STUDIES = {
    # A noise predictor's error is multiplied by σ/α, up to 157: half precision is not enough for it.
    "fashion": [Study("fashion", 1.0, HOSTS, (5,), PUBLISHED, torch.float32)],
    "guided": [Study("cifar10", 2.0, HOSTS, (5,), ("edm-min", "logsnr-min"), torch.float16)],
}


@dataclass
class Bench:
    """A study with its network, survey and references, made when first needed."""

    study: Study
    features: InceptionFeatures
    real: Moments
    device: str
    samples: int
    batch: int
    calibration: int

    @cached_property
    def subject(self) -> Any:
        """The model in float32, for calibration."""
        return embedded(self.study.model, self.study.guidance, self.device)

    @cached_property
    def denoisers(self) -> Any:
        """The model that samples."""
        dtype = self.study.dtype if self.device == "cuda" else torch.float32
        network = zoo.load(self.study.model, self.device).to(dtype).to(memory_format=torch.channels_last)
        return by_seed(network, self.study.guidance)

    @cached_property
    def reference_run(self) -> ReferenceRun:
        return reference_run(
            self.subject.denoisers,
            self.subject.schedule,
            self.subject.shape,
            seeds=range(CALIBRATION_SEED, CALIBRATION_SEED + self.calibration),
            steps=40,
            probe_levels=16,
            probe_samples=max(1, self.calibration // 8),
            probes=4,
            batch=min(self.batch, 250),
            device=self.device,
        )

    def plan(self, cell: Cell) -> tuple[Levels, Correction, dict[str, Any]]:
        """Levels, correction, and how the correction was measured."""
        solver = SOLVERS[cell.solver]
        if cell.correction == "none":
            return solver.levels(GRIDS[cell.grid], self.subject.schedule, cell.nfe), Plain(), {}
        calibration = calibrate(
            self.subject.denoisers,
            solver,
            self.subject.schedule,
            cell.nfe,
            self.subject.shape,
            measured=self.survey,
            batch=min(self.batch, 250),
            device=self.device,
        )
        return calibration.levels, Replay(calibration), calibration.settings

    def images(
        self, cell: Cell, seeds: Sequence[int], levels: Levels, correction: Correction, spent: dict[str, int]
    ) -> Iterator[Tensor]:
        for start in range(0, len(seeds), self.batch):
            part = seeds[start : start + self.batch]
            x = noise(part, self.subject.shape, levels[0]).to(self.device)
            out = sample(self.denoisers(part), x, levels, SOLVERS[cell.solver], correction)
            spent.update(nfe=out.nfe, network_calls=out.network_calls, backward_passes=out.backward_passes)
            yield from to_uint8(out.x).expand(-1, 3, -1, -1).split(500)

    @cached_property
    def many_step(self) -> Moments:
        """The model's own many-step samples."""
        levels, correction, _ = self.plan(MANY)
        seeds = range(REFERENCE_SEED, REFERENCE_SEED + self.samples)
        return Moments.stream(self.images(MANY, seeds, levels, correction, {}), self.features)

    def identity(self, cell: Cell) -> dict[str, Any]:
        """The fields that tell records apart."""
        return {
            "model": self.study.model,
            "guidance": self.study.guidance,
            **asdict(cell),
            "samples": self.samples,
        }

    def run(self, cell: Cell) -> dict[str, Any]:
        many_step = self.many_step
        begun = time.monotonic()
        levels, correction, settings = self.plan(cell)
        spent: dict[str, int] = {}
        moments = Moments.stream(self.images(cell, range(self.samples), levels, correction, spent), self.features)
        return {
            **self.identity(cell),
            **spent,
            "order": SOLVERS[cell.solver].order,
            "seed": 0,
            "fid": round(frechet_distance(self.real, moments), 4),
            "fd_many_step": round(frechet_distance(many_step, moments), 4),
            "tf32": self.features.tf32,
            "real": self.real.count,
            "calibration": settings,
            "seconds": round(time.monotonic() - begun, 2),
            **machine(self.device),
        }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--calibration", type=int, default=1_000, help="samples of the survey")
    parser.add_argument("--real", type=Path, help=".npz with bytes `images` (N, 1, 28, 28) of Fashion-MNIST")
    args = parser.parse_args()

    begun = time.monotonic()
    features = InceptionFeatures.load(args.inception or datasets.inception(), args.device, tf32=args.tf32)
    if args.study == "fashion":
        images = real_images("fashion", args.real, args.samples)
        real = Moments.stream((part.to(args.device) for part in images.split(500)), features)
    else:
        real = references.load("cifar10-train").to(args.device)
    records = Records(args.out or Path(f"benchmarks/results/{args.study}.json"))
    for study in STUDIES[args.study]:
        bench = Bench(study, features, real, args.device, args.samples, args.batch, args.calibration)
        records.measure(study.cells(), bench.identity, bench.run, begun + args.seconds)


if __name__ == "__main__":
    main()
