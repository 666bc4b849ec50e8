"""`steindiff compare`, the main job."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from steindiff._discovery import named
from steindiff._environment import device_name
from steindiff._files import folder
from steindiff._version import __version__
from steindiff.calibrating import Recipe
from steindiff.calibration import Calibration
from steindiff.cli import options, subjects
from steindiff.cli.output import Watch, console, note, print_json, progress, show, text, written
from steindiff.comparison import CompareOptions, Comparison, calibrated, compare, default_methods
from steindiff.models import shipped_calibration
from steindiff.report import write
from steindiff.report.document import best
from steindiff.report.page import BLUR, report_of, results
from steindiff.sampler import out_of_memory
from steindiff.solvers import SOLVERS, Solver
from steindiff.yardsticks import YARDSTICKS

EXAMPLES = (
    "steindiff compare",
    "steindiff compare --quick",
    "steindiff compare --model my_models:celeba --quick --out celeba-report",
    "steindiff compare --model my-pipeline --prompt 'a red fox' --prompt 'a lake in winter' --num 8",
    "steindiff compare --model unet.pt2:epsilon:ddpm --nfe 5,8",
    "steindiff compare --nfe 4,5,6,8 --num 256 --device cuda",
    "steindiff compare --features inception --num 5000 --device cuda",
    "steindiff compare --model fashion --solver ddim --out fashion-report",
    "steindiff compare --guidance 2 --nfe 6 --calibration guided/cifar10-dpmpp-2m-6.json",
    "steindiff compare --num 16 --json | jq '.rows[] | [.title, .frechet]'",
)

NUMS = {"cpu": 32, "cuda": 1000, "mps": 256}
"""How many images to compare unless told: a minute or two's worth on a small processor."""
FEW = 12
"""How many with `--quick`."""
QUICK = Recipe(seeds=range(10**6, 10**6 + 12), steps=12, search=None)
"""How `--quick` calibrates where nothing ships."""
BATCHES = {"cpu": 16, "cuda": 250, "mps": 64}


def settings(model: str, solver: str, nfe: str, seeds: range, batch: int, device: str) -> dict[str, Any]:
    """What the report says about how it was made."""
    return {
        "command": shlex.join(["steindiff", *sys.argv[1:]]),
        "model": model,
        "solver": solver,
        "evaluations": nfe,
        "seeds": f"{seeds.start} to {seeds.stop - 1}",
        "batch": batch,
        "device": device_name(torch.device(device)),
        "processor cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "steindiff": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


SHORT = {
    "nfe": "NFE",
    "honest": "own",
    "frechet": "real",
    "energy_ratio": "energy",
    "spread": "spread",
    "psnr": "PSNR",
    "lpips": "LPIPS",
    "network_calls": "calls",
    "backward_passes": "backward",
    "seconds": "seconds",
}
"""What the terminal calls the report's columns."""


def table(comparison: Comparison) -> Table:
    """The comparison for the terminal: the report's columns under short names."""
    report = report_of(comparison)
    columns = {column.key: column for column in report.columns if column.key in SHORT}
    real_text = "Real: to real images. " if "frechet" in columns else ""
    caption = (
        f"Own: Fréchet distance ({comparison.features}) to the model's own many-step samples of other seeds; two sets "
        f"of them are {comparison.floor:.1f} apart. {real_text}Energy: high-frequency power "
        "over that of the many-step images; spread: variety within a condition likewise; 1 is right. PSNR"
        f"{' and LPIPS' * ('lpips' in columns)}: to the same seed's many-step image. Calls and backward passes are per "
        f"image, seconds for all {len(comparison.seeds)}."
    )
    good, hidden, wide = best(report), list[str](), console().options.update_width(1000)
    while True:
        more = f" For {', '.join(hidden)} the terminal is too narrow: see results.json." if hidden else ""
        out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption + more, caption_justify="left")
        out.add_column("method", overflow="fold", min_width=len("calibrated"))
        for key in columns:
            out.add_column(SHORT[key], justify="right", no_wrap=True)
        for i, entry in enumerate(report.entries):
            if entry.reference or (i and entry.nfe != report.entries[i - 1].nfe):
                out.add_section()
            cells = {key: column.text(entry) for key, column in columns.items()}
            marked = [f"[bold green]{cell}[/]" if i in good.get(key, ()) else cell for key, cell in cells.items()]
            out.add_row(text(entry.title), *marked)
        if len(columns) == 2 or console().measure(out, options=wide).minimum <= console().width:
            return out
        hidden.insert(0, SHORT[columns.popitem()[0]])


def calibrate_now(
    found: subjects.Subject, nfes: list[int], solver: Solver, recipe: Recipe, batch: int
) -> Mapping[int, Calibration]:
    """Calibrate, halving the batch where memory runs out."""
    try:
        return found.calibrate(nfes, solver, recipe, batch)
    except (RuntimeError, MemoryError) as error:
        if batch == 1 or not out_of_memory(error):
            raise
        note(f"out of memory: the batch of {batch} is halved")
    return calibrate_now(found, nfes, solver, recipe, batch // 2)


def command(
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfes = "5",
    num: Annotated[int | None, typer.Option(help=f"Number of images (default: {NUMS['cpu']}, on a GPU more).")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    prompt: options.Prompts = None,
    batch: Annotated[int | None, typer.Option(help="Images evaluated together; halved where memory runs out.")] = None,
    calibration: options.Calibrations = None,
    features: Annotated[
        str,
        typer.Option(
            help="Features of the Fréchet distance: random (nothing to download) or inception (FID; needs thousands "
            "of images).",
            autocompletion=lambda: list(YARDSTICKS),
        ),
    ] = "random",
    quick: Annotated[bool, typer.Option("--quick", help="A look in a minute: few images, rough calibration.")] = False,
    lipschitz: Annotated[
        bool | None, typer.Option("--lipschitz/--no-lipschitz", help="Measure Lipschitz constants (not if quick).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, grid.png, results.json.")] = Path("steindiff-out"),
    json: options.Json = False,
) -> None:
    """Sample the same seeds without and with SteinDiff; print the numbers, write a report.

    Rows: the plain solver on the EDM and the log-SNR grid, the paper's relaxation (of UniPC-3 where the solver is
    DPM-Solver++, whose steps it does not change), calibration, and a many-step reference. Where no calibration ships
    and no file is given, one is made first.
    """
    nfes = options.numbers("nfe", nfe)
    place = options.device(device)
    kind = place.partition(":")[0]
    num, batch = (FEW if quick else NUMS[kind]) if num is None else num, BATCHES[kind] if batch is None else batch
    seeds = options.seeds(num, seed)
    measure, chosen = named("features", features, YARDSTICKS), SOLVERS.resolve("solver", solver)
    found = subjects.subject(model, guidance, place, prompts=prompt or (), batch=batch)
    subject = found.model
    folder(out)
    methods, facts = default_methods(chosen), settings(model, solver, nfe, seeds, batch, place)
    facts["guidance"] = subject.conditions.get("guidance", 1.0)
    given = {(one.solver, one.nfe): one for one in options.calibrations(subject, calibration or [])}
    for fitted, budget in given:
        if fitted != chosen or budget not in nfes:
            its = f"{SOLVERS.name_of(fitted)} at {budget} evaluations"
            raise ValueError(f"calibration: one is for {its}; choose these, or leave it out")
    own = {n: given.get((chosen, n)) or shipped_calibration(subject, chosen, n) for n in nfes}
    recipe = QUICK if quick else Recipe()
    if missing := [n for n in nfes if own[n] is None]:
        note(
            f"no calibration of {subject.name} is at hand for {solver} at {', '.join(map(str, missing))} evaluations: "
            f"calibrating on {len(recipe.seeds)} seeds now; `steindiff calibrate` keeps the file"
        )
        own |= calibrate_now(found, missing, chosen, recipe, batch)
        facts["calibrated now"] = f"{missing}, {len(recipe.seeds)} seeds"
    methods["calibrated"] = calibrated(lambda model, solver, nfe: own[nfe])
    if quick:
        methods = {name: method for name, method in methods.items() if name not in ("unipc", "relaxation")}
    with progress() as bar:
        task = bar.add_task(f"{subject.name}, {len(seeds)} seeds", total=None)
        how = CompareOptions(
            batch=batch,
            reference_nfe=16 if quick else 24,
            lipschitz_seeds=int(not quick if lipschitz is None else lipschitz),
            listener=Watch(bar, task),
            pictures=found.pictures,
        )
        seen = measure(subject, found.channels)
        comparison = compare(subject, nfes, seeds, solver=chosen, methods=methods, yardstick=seen, options=how)
        comparison = dataclasses.replace(comparison, settings={**facts, **comparison.settings})
        paths = write(comparison, out)
    if json:
        print_json(results(comparison))
        return
    show(table(comparison))
    if any(row.honest < comparison.floor for row in comparison.rows):
        note(f"{num} images are too few to rank by own distance: some lie below the floor; take a larger --num")
    show(f"\n{BLUR}\n")
    for path in paths:
        written(path)
