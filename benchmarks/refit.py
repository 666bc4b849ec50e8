"""Calibrations at the levels of records, their weights fitted anew: what a search found, without searching again.

    python benchmarks/refit.py --model networks.strong:load --nfe 5 8 --folder calibrations

Reads the levels and tellings of the method `calibrated` in `results/comparison.json`, runs the fine trajectory of the
default recipe's seeds and fits every step to it. `comparison.py --methods from-file --calibrations FOLDER` replays it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comparison import load_model
from steindiff import SOLVERS
from steindiff.calibrating import Budget, Recipe, step_weights
from steindiff.calibration import Calibration
from steindiff.levels import Levels
from steindiff.model import Model
from steindiff.reference import reference_run

RECORDS = Path(__file__).parent / "results" / "comparison.json"


def refitted(model: Model, record: Mapping[str, Any], recipe: Recipe, batch: int) -> Calibration:
    """The calibration of a record's levels, by the fit of a recipe."""
    chosen, solver, schedule = record["chosen"], SOLVERS[record["solver"]], model.schedule
    levels = Levels(tuple(schedule.at(-math.log(ratio)) for ratio in chosen["sigmas"]), schedule).tell(chosen["told"])
    steps = recipe.reference_steps([record["nfe"]])
    reference = reference_run(model, recipe.seeds, steps=steps, batch=batch)
    fitted = Budget(reference, solver, record["nfe"], recipe).refit(levels, reference.denoiser())
    return Calibration(
        solver=solver,
        levels=levels,
        basis=reference.basis,
        steps=tuple(map(step_weights, fitted)),
        fingerprint=model.fingerprint,
        conditions=dict(model.conditions),
        provenance={"levels": "of results/comparison.json", "seeds": [recipe.seeds[0], len(recipe.seeds)]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="cifar10", help="of the zoo, or module:function(device, half, compiled)")
    parser.add_argument("--solver", default="dpmpp-2m")
    parser.add_argument("--nfe", nargs="+", type=int, help="default: every budget there is a record of")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, args.device, half=False, compiled=False)
    wanted = (model.name, args.solver, "calibrated")
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    found = {r["nfe"]: r for r in records if (r["model"], r["solver"], r["method"]) == wanted}
    budgets = args.nfe or sorted(found)
    if not found:
        parser.error(f"{RECORDS.name} has no record of {args.solver} calibrated on {model.name}")
    if unknown := sorted({*budgets} - {*found}):
        parser.error(f"nfe must be of {', '.join(map(str, sorted(found)))}, which have records, got {unknown[0]}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for nfe in budgets:
        path = args.folder / f"{model.name}-{args.solver}-{nfe}.json"
        refitted(model, found[nfe], Recipe(), args.batch).save(path)
        print(path, flush=True)


if __name__ == "__main__":
    main()
