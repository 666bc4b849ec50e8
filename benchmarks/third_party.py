"""Networks that are not pictures of things: fields and signals, calibrated against plain, power spectra as the measure.

    python benchmarks/third_party.py cosmology --device cuda
    python benchmarks/third_party.py electricity --samples 2048  # and electricity-unclipped
    python benchmarks/third_party.py superresolution
    python benchmarks/third_party.py signals --samples 2048

For every solver and number of evaluations: the plain solver on three grids, the calibrated one, and the calibrated one
with a single band. All are sampled from seeds 0 to samples − 1, apart from those of calibration, and measured by

- rms: to the many-step field of the same seed, over the spread of many-step fields within a condition;
- spread: within a condition, over that of the many-step fields. 1 is right;
- spectrum: root mean square over frequency rings of ln(power/power of many-step fields), powers of deviations from the
  condition's mean. 0 is right;
- honest: Fréchet distance (random features) to the model's own many-step fields of other seeds under the same
  conditions, as deviations from the condition's mean in units of their spread; the mean over several such sets, beside
  the floor, the same of the many-step fields, and the range of distances between two many-step sets. One set will not
  do: sets of a thousand signals differ by 1 % in spread, and whatever errs the way one set does falls below the floor.

Cells already in `--out` are skipped. `--summary` tells how often calibrated is worse than the best plain grid.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from networks import cosmology, electricity, signals, superresolution
from recording import Records, machine, options
from steindiff import DCT, SOLVERS, Calibration, Model, Recipe, ReferenceRun, Sampler, calibrate_budgets, reference_run
from steindiff.corrections.alignment import Groups
from steindiff.metrics import Moments, RandomFeatures, frechet_distance, spread

PERIOD = 8 * 4096
"""Seeds this far apart have the same condition in every model here, and other noise."""
CALIBRATION_SEED = 31 * PERIOD + 8 * 256
"""The conditions of these seeds come after the first 256, which are measured."""
MODELS: dict[str, Callable[..., Model]] = {
    cosmology.NAME: cosmology.load,
    electricity.NAME: electricity.load,
    electricity.UNCLIPPED: partial(electricity.load, bound=None),
    superresolution.NAME: superresolution.load,
    signals.NAME: signals.load,
}
PLAIN = ("logsnr", "edm", "uniform")
CALIBRATED = {"calibrated": 64, "one-band": 1}
"""Name → rings of frequencies for each channel."""
TARGETS = 5
"""Sets of many-step fields of other seeds that honest distances are averaged over."""
MEASURES = ("rms", "spread", "spectrum", "honest")


class Cell(NamedTuple):
    """One row of the table."""

    solver: str
    nfe: int
    method: str


@dataclasses.dataclass
class Bench:
    """A model with its many-step fields and calibrations, each made when first needed."""

    model: Model
    samples: int
    batch: int
    seeds: int
    many: int
    budgets: Sequence[int]

    def __post_init__(self) -> None:
        self.made: dict[tuple[str, str], dict[int, Calibration]] = {}
        self.references: dict[str, ReferenceRun] = {}
        self.prepared: dict[tuple[str, str], float] = {}

    def fields(self, sampler: Sampler, first: int) -> tuple[Tensor, dict[str, int]]:
        result = sampler(self.model, range(first, first + self.samples), batch=self.batch)
        calls = {"network_calls": result.network_calls, "backward_passes": result.backward_passes}
        return result.x.cpu(), calls

    @cached_property
    def conditions(self) -> list[Any]:
        return [self.model.condition_of(seed) for seed in range(self.samples)]

    @cached_property
    def groups(self) -> Groups:
        return Groups.of(self.conditions)

    @cached_property
    def many_step(self) -> tuple[Tensor, ...]:
        """Many-step fields: of the seeds measured; of others, for means; then sets of others, to be compared with."""
        sampler = Sampler("dpmpp-3m", "logsnr", self.many)
        return tuple(self.fields(sampler, k * PERIOD)[0] for k in range(2 + TARGETS))

    @cached_property
    def scale(self) -> float:
        """Spread of many-step fields within a condition."""
        same = self.many_step[0]
        return float((same - self.groups.means(same)).square().mean().sqrt())

    def deviations(self, x: Tensor) -> Tensor:
        """From the mean of other many-step fields of the same condition, in units of their spread."""
        return (x - self.groups.means(self.many_step[1])) / self.scale

    def moments(self, x: Tensor) -> Moments:
        """Of random features; a signal counts as a picture of equal rows."""
        pictures = self.deviations(x)
        if pictures.ndim == 3:
            pictures = pictures[:, :, None].expand(-1, -1, 8, -1)
        return Moments.stream(pictures.split(64), RandomFeatures(pictures.shape[1]))

    @cached_property
    def targets(self) -> list[Moments]:
        return [self.moments(x) for x in self.many_step[2:]]

    def honest(self, x: Tensor) -> float:
        """Mean distance to the sets of other seeds."""
        moments = self.moments(x)
        return sum(frechet_distance(target, moments) for target in self.targets) / TARGETS

    @cached_property
    def floor(self) -> dict[str, Any]:
        """Of the many-step fields themselves, and between any two sets of others."""
        pairs = [frechet_distance(a, b) for a, b in combinations(self.targets, 2)]
        return {"floor": self.honest(self.many_step[0]), "floor_range": [min(pairs), max(pairs)]}

    def power(self, x: Tensor) -> Tensor:
        """Power of deviations from the condition's own mean for each ring, (K,)."""
        basis = DCT(self.model.shape)
        return basis.average(basis.forward(x - self.groups.means(x)).square()).mean(0)

    def calibration(self, solver: str, nfe: int, method: str) -> Calibration:
        """The budget's calibration; all budgets of a solver are made together."""
        if (solver, method) not in self.made:
            begun = time.monotonic()
            recipe = Recipe(seeds=range(CALIBRATION_SEED, CALIBRATION_SEED + self.seeds))
            if method not in self.references:
                basis, steps = DCT(self.model.shape, rings=CALIBRATED[method]), recipe.reference_steps(self.budgets)
                self.references[method] = reference_run(
                    self.model, recipe.seeds, steps=steps, batch=self.batch, basis=basis
                )
            reference = self.references[method]
            budgets = [n for n in self.budgets if spendable(solver, n)]
            self.made[solver, method] = calibrate_budgets(
                self.model, budgets, solver, recipe=recipe, reference=reference, batch=self.batch
            )
            self.prepared[solver, method] = time.monotonic() - begun
        return self.made[solver, method][nfe]

    def identity(self, cell: Cell) -> dict[str, Any]:
        return {"model": self.model.name, **cell._asdict(), "samples": self.samples, "many_step": self.many}

    def run(self, cell: Cell) -> dict[str, Any]:
        same = self.many_step[0]
        kept: dict[str, Any] = {}
        if cell.method in CALIBRATED:
            calibration = self.calibration(cell.solver, cell.nfe, cell.method)
            sampler = calibration.sampler()
            kept = {
                "calibration_seeds": self.seeds,
                "preparation_seconds": round(self.prepared[cell.solver, cell.method], 1),
                "levels": [(level.sigma, level.alpha, level.told) for level in calibration.levels],
                "provenance": dict(calibration.provenance),
            }
        else:
            sampler = Sampler(cell.solver, cell.method, cell.nfe)
        begun = time.monotonic()
        x, calls = self.fields(sampler, 0)
        seconds = time.monotonic() - begun
        ratio = (self.power(x) / self.power(same)).log()
        return {
            **self.identity(cell),
            **calls,
            "seed": 0,
            "rms": float((x - same).square().mean().sqrt()) / self.scale,
            "spread": spread(x, same, self.conditions),
            "spectrum": float(ratio.square().mean().sqrt()),
            "log_power": [round(v, 4) for v in ratio.tolist()],
            "honest": self.honest(x),
            **self.floor,
            "scale": self.scale,
            "seconds": round(seconds, 2),
            **kept,
            **machine(torch.device(self.model.device).type),
        }


def spendable(solver: str, nfe: int) -> bool:
    """Whether a solver can spend exactly this many evaluations: Heun needs an odd number."""
    return solver != "heun" or nfe % 2 == 1


def badness(record: dict[str, Any], measure: str) -> float:
    """A number that is smaller where a record is better; spread is best at 1."""
    value = record[measure]
    return abs(torch.tensor(value).log().item()) if measure == "spread" else value


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """For every model and measure: in how many cells calibrated is more than 1 % worse than the best plain grid."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in records:
        key = (record["model"], record["solver"], record["nfe"], record["samples"])
        cells.setdefault(key, {})[record["method"]] = record
    out: dict[str, Any] = {}
    for (model, *_), cell in cells.items():
        plain = [cell[grid] for grid in PLAIN if grid in cell]
        for method in CALIBRATED:
            if method not in cell or not plain:
                continue
            for measure in MEASURES:
                worse, total = out.setdefault(f"{model} {method} {measure}", (0, 0))
                best = min(badness(record, measure) for record in plain)
                slack = 0.01 if measure == "spread" else 0.01 * best
                out[f"{model} {method} {measure}"] = (
                    worse + (badness(cell[method], measure) > best + slack),
                    total + 1,
                )
    return {key: f"worse in {worse} of {total}" for key, (worse, total) in sorted(out.items())}


def main() -> None:
    parser = options(__doc__, "third_party")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--solvers", nargs="+", default=["dpmpp-2m", "ddim", "unipc-bh1-3"], choices=sorted(SOLVERS))
    parser.add_argument("--nfe", type=int, nargs="+", default=[3, 4, 5, 6, 8, 10])
    parser.add_argument("--methods", nargs="+", default=[*PLAIN, *CALIBRATED], choices=[*PLAIN, *CALIBRATED])
    parser.add_argument("--calibration", type=int, default=64, help="seeds of calibration")
    parser.add_argument("--many", type=int, default=60, help="evaluations of the many-step fields")
    parser.add_argument("--summary", action="store_true", help="only count what is in the records")
    parser.set_defaults(samples=512, batch=256)
    args = parser.parse_args()
    begun = time.monotonic()
    records = Records(args.out)
    if not args.summary:
        model = MODELS[args.model](args.device)
        bench = Bench(model, args.samples, args.batch, args.calibration, args.many, args.nfe)
        cells = [
            Cell(solver, nfe, method)
            for solver in args.solvers
            for method in args.methods
            for nfe in args.nfe
            if spendable(solver, nfe)
        ]
        records.measure(cells, bench.identity, bench.run, begun + args.seconds)
    print(json.dumps(summary(records.records), indent=1))


if __name__ == "__main__":
    main()
