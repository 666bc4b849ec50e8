"""Calibrations at the levels of records, their weights fitted anew: what a search found, without searching again.

    python benchmarks/refit.py --model networks.strong:load --nfe 3 5 8 --folder calibrations

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

from comparison import BUDGETS, load_model
from steindiff import SOLVERS
from steindiff.calibrating import Recipe, step_weights
from steindiff.calibration import Calibration
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.model import Model
from steindiff.reference import reference_run

RECORDS = Path(__file__).parent / "results" / "comparison.json"


def refitted(model: Model, record: Mapping[str, Any], recipe: Recipe, batch: int) -> Calibration:
    """The calibration of a record's levels, by the fit of a recipe."""
    chosen, solver, schedule = record["chosen"], SOLVERS[record["solver"]], model.schedule
    levels = Levels(tuple(schedule.at(-math.log(ratio)) for ratio in chosen["sigmas"]), schedule).tell(chosen["told"])
    steps = recipe.reference_steps([record["nfe"]])
    reference = reference_run(model, recipe.seeds, steps=steps, batch=batch)
    x = model.noise(reference.local_seeds, levels[0])
    fitted = sample(reference.denoiser(), x, levels, solver, recipe.fit(reference, levels.steps)).statistics
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
    parser.add_argument("--nfe", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    model = load_model(args.model, args.device, half=False, compiled=False)
    args.folder.mkdir(parents=True, exist_ok=True)
    wanted = (model.name, args.solver, "calibrated")
    for record in json.loads(RECORDS.read_text(encoding="utf-8")):
        if (record["model"], record["solver"], record["method"]) == wanted and record["nfe"] in args.nfe:
            path = args.folder / f"{model.name}-{args.solver}-{record['nfe']}.json"
            refitted(model, record, Recipe(), args.batch).save(path)
            print(path, flush=True)


if __name__ == "__main__":
    main()
