"""What the mean and the typical sample say of plain and calibrated runs near the limit, beside their own distance.

    python benchmarks/judging.py              # half an hour on two cores
    python benchmarks/figures.py              # the table of docs/method.md

At 15 and 20 evaluations the J of a few seeds is the work of those that take another turn. Plain runs on two grids, and
calibrated ones with the levels and tellings of `comparison.json`, fitted to `FITTED` seeds, are judged by the others
(`steindiff.search.Distances`). Writes `benchmarks/results/judging.json`: J, its standard error, the typical sample's J.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from recording import Records, machine, options
from steindiff import SOLVERS, ReferenceRun, load, reference_run
from steindiff.calibrating import Budget, ByAlignment, Recipe
from steindiff.corrections import Plain
from steindiff.grids import Karras, LogSNR
from steindiff.grids.base import Grid
from steindiff.levels import Levels
from steindiff.search import Mismatch, Trials

FIRST_SEED = 3 * 10**6 + 5000
"""Apart from seeds of calibration and of evaluation."""
SEEDS, FITTED, STEPS = 96, 54, 45
PLAIN: dict[str, Grid] = {"logsnr": LogSNR(), "edm": Karras()}
RESULTS = Path(__file__).parent / "results"


class Run(NamedTuple):
    """A solver, its evaluations, and what is done: a plain grid, or the calibration of a record."""

    solver: str
    nfe: int
    method: str


def runs() -> Iterator[Run]:
    for nfe in (15, 20):
        for solver in ("dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ipndm-4"):
            yield from (Run(solver, nfe, method) for method in (*PLAIN, "calibrated-64"))


def judged(place: int) -> bool:
    """Whether the sample at this place judges: nothing is fitted to it."""
    return place >= FITTED


def ends(reference: ReferenceRun, run: Run) -> Tensor | None:
    """The samples of a run; None where the record kept a plain one."""
    solver = SOLVERS[run.solver]
    budget = Budget(reference, solver, run.nfe, Recipe())
    objective = Mismatch(reference.basis, reference.samples.to(reference.model.device), reference.groups())
    if run.method in PLAIN:
        levels = budget.levels(PLAIN[run.method])
        return Trials(reference, solver, Plain(), objective)(levels).states[-1]
    found = json.loads((RESULTS / "comparison.json").read_text(encoding="utf-8"))
    wanted = {"model": reference.model.name, **run._asdict()}
    (record,) = (record for record in found if wanted.items() <= record.items())
    chosen = record["chosen"]
    if chosen["kept"].startswith("plain"):
        return None
    schedule = reference.model.schedule
    levels = Levels(tuple(schedule.at(-math.log(sigma)) for sigma in chosen["sigmas"]), schedule).tell(chosen["told"])
    fit = ByAlignment()(reference, levels.steps, lambda place: not judged(place))
    return Trials(reference, solver, fit, objective)(levels).states[-1]


def measured(reference: ReferenceRun, run: Run, x: Tensor) -> dict[str, Any]:
    """The record of a run's samples."""
    rows = reference.rows(judged)
    each = Mismatch(reference.basis, reference.samples[rows], reference.groups(judged)).residuals(x[rows]).of_each()
    return {
        "model": reference.model.name,
        **run._asdict(),
        "network_calls": run.nfe,
        "backward_passes": 0,
        "seed": FIRST_SEED,
        "samples": len(each.each),
        "mismatch": each.mean,
        "error": float(each.each.std()) / math.sqrt(len(each.each)),
        "typical": each.typical,
    }


def main() -> None:
    parser = options(__doc__, "judging")
    args = parser.parse_args()
    model = load("cifar10", device=args.device, forward_only=True)
    reference = reference_run(model, range(FIRST_SEED, FIRST_SEED + SEEDS), steps=STEPS, batch=48)
    records = Records(args.out)
    for run in runs():
        if {"model": model.name, **run._asdict()} not in records and (x := ends(reference, run)) is not None:
            records.add({**measured(reference, run, x), **machine(args.device)})


if __name__ == "__main__":
    main()
