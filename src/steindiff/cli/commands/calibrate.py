"""`steindiff calibrate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from steindiff._distributed import rank
from steindiff._files import folder
from steindiff.calibrating import FEW_CALLS, Recipe
from steindiff.cli import options, subjects
from steindiff.cli.output import note, print_json
from steindiff.cli.output import written as say_written
from steindiff.solvers import SOLVERS

EXAMPLES = (
    "steindiff calibrate --nfe 5 --out calibrations",
    "steindiff calibrate --solver dpmpp-3m --nfe 4,5,6,8 --num 256 --device cuda --batch 256 --out calibrations",
    "steindiff calibrate --few --nfe 3,4 --out few",
    "steindiff calibrate --guidance 2 --nfe 6 --out guided",
    "steindiff calibrate --model my-pipeline --prompt 'a red fox' --prompt 'a lake' --out mine",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli calibrate --num 512 --batch 64 --out calibrations",
)

TOGETHER = True
"""Processes started by torchrun share the work."""


def recipe_for(seeds: range, search: int | None, few: bool) -> Recipe:
    """How to calibrate."""
    recipe = replace(FEW_CALLS if few else Recipe(), seeds=seeds)
    if few and search == 0:
        raise ValueError("search must be >= 1 with --few, got 0: what --few counts is searched by")
    if search is None or recipe.search is None:
        return recipe
    return replace(recipe, search=replace(recipe.search, iterations=search) if search else None)


def command(
    out: Annotated[Path, typer.Option(help="Folder for the files MODEL-SOLVER-NFE.json.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfes = "5",
    num: options.Num = 64,
    seed: options.Seed = 1_000_000,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    prompt: options.Prompts = None,
    batch: options.Batch = 16,
    search: Annotated[
        int | None,
        typer.Option(help="Iterations of the search, at most; 0: do not search. [default: 2, below 4 steps 3]", min=0),
    ] = None,
    few: Annotated[
        bool,
        typer.Option("--few", help="For 3 or 4 evaluations: nearer to the model as a set, less like the same seeds."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Measure a model once, so that sampling with few evaluations loses less; replaying costs nothing.

    Only forward passes are made. One run of many steps serves all the numbers of evaluations asked for. Calibrate on
    seeds you do not evaluate on. Ctrl-C during the search keeps the best found so far.
    """
    nfes = options.numbers("nfe", nfe)
    chosen = SOLVERS.resolve("solver", solver)
    recipe = recipe_for(options.seeds(num, seed), search, few)
    subject = subjects.subject(model, guidance, device, forward_only=True, prompts=prompt or (), batch=batch)
    folder(out)
    made = subject.calibrate(nfes, chosen, recipe, batch)
    if rank().rank:
        return
    written = {budget: out / f"{subject.model.name}-{solver}-{budget}.json" for budget in made}
    for budget, calibration in made.items():
        calibration.save(written[budget])
    if json:
        found = {}
        for budget, own in made.items():
            levels = {"ratio": [level.ratio for level in own.levels], "told": [level.told for level in own.levels]}
            found[str(written[budget])] = {"nfe": budget, **levels, **own.provenance}
        print_json(found)
        return
    for budget, calibration in made.items():
        steps = " → ".join(f"{level.ratio:.3g}" for level in calibration.levels)
        say_written(written[budget], f": σ/α {steps}")
        if calibration.provenance["kept"].startswith("plain"):
            note(f"{budget} evaluations: the plain solver on its best grid is as near; it is kept uncorrected")
