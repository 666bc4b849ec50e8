"""`steindiff calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steindiff._discovery import named
from steindiff._distributed import rank
from steindiff._files import folder
from steindiff.calibrating import Recipe, calibrate
from steindiff.cli import options
from steindiff.cli.output import print_json, progress, results
from steindiff.reference_run import reference_run
from steindiff.solvers import SOLVERS

EXAMPLES = (
    "steindiff calibrate --nfe 5 --out calibrations",
    "steindiff calibrate --solver dpmpp-3m --nfe 4,5,6,8 --num 512 --device cuda --batch 256 --out calibrations",
    "steindiff calibrate --nfe 3,4,5 --start 2 --out late",
    "steindiff calibrate --guidance 2 --nfe 6 --out guided",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli calibrate --num 512 --batch 64 --out calibrations",
)

TOGETHER = True
"""Processes started by torchrun share the work."""


def command(
    out: Annotated[Path, typer.Option(help="Folder for the files MODEL-SOLVER-NFE.json.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfes = "5",
    num: options.Num = 64,
    seed: options.Seed = 1_000_000,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    batch: options.Batch = 16,
    power: Annotated[float, typer.Option(help="Exponent of the Stein grid; 0 is the log-SNR grid.")] = 0.2,
    start: Annotated[
        float | None,
        typer.Option(
            help="Begin where the noise is so many times the model's strongest band, not at the schedule's largest "
            "level; 2 pays for 5 evaluations and fewer."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure a model once, so that sampling with few evaluations loses less; replaying costs nothing.

    One survey (many steps, a few backward passes) serves all the numbers of evaluations asked for. Calibrate on seeds
    you do not evaluate on.
    """
    nfes = options.numbers("nfe", nfe)
    chosen = named("solver", solver, SOLVERS)
    seeds = options.seeds(num, seed)
    subject = options.subject(model, guidance, device)
    recipe = Recipe(power=power, start=start)
    folder(out)
    written = []
    with progress() as bar:
        task = bar.add_task(f"{model}, survey", total=recipe.steps + 2 * sum(nfes))

        def step(moment: object) -> None:
            bar.advance(task)

        measured = reference_run(
            subject.denoisers,
            subject.schedule,
            subject.shape,
            **recipe.reference_run(seeds),
            batch=batch,
            device=subject.device,
            callback=step,
        )
        for budget in nfes:
            bar.update(task, description=f"{model}, {budget} evaluations")
            made = calibrate(
                subject.denoisers,
                chosen,
                subject.schedule,
                budget,
                subject.shape,
                recipe=recipe,
                measured=measured,
                batch=batch,
                device=subject.device,
                settings={"model": model, "guidance": guidance},
                callback=step,
            )
            path = out / f"{model}-{solver}-{budget}.json"
            if rank().rank == 0:
                made.save(path)
                written.append((path, made))
    if rank().rank:
        return
    if json:
        print_json(
            {
                str(path): {"nfe": made.nfe, "sigma": [level.sigma for level in made.levels], **made.settings}
                for path, made in written
            }
        )
        return
    for path, made in written:
        sigmas = " → ".join(f"{level.sigma:.3g}" for level in made.levels)
        results.print(f"[bold]{path}[/]: σ {sigmas}", soft_wrap=True)
