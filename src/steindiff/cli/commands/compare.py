"""`steindiff compare`, the main job."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

import steindiff
from steindiff import comparison as comparing
from steindiff._devices import device_name
from steindiff._discovery import named
from steindiff._files import folder
from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, results
from steindiff.comparison import REFERENCE, Comparison
from steindiff.models import FEATURES
from steindiff.report import write
from steindiff.report.build import results as as_json
from steindiff.report.page import BLUR, best
from steindiff.solvers import SOLVERS

EXAMPLES = (
    "steindiff compare",
    "steindiff compare --nfe 4,5,6,8 --num 256 --device cuda",
    "steindiff compare --features inception --num 5000 --device cuda",
    "steindiff compare --model fashion --solver ddim --out fashion-report",
    "steindiff compare --guidance 2 --nfe 6 --calibration guided/cifar10-dpmpp-2m-6.json",
    "steindiff compare --num 16 --json | jq '.rows[] | [.title, .frechet]'",
)

NUMS = {"cpu": 40, "cuda": 1000, "mps": 256}
"""How many images to compare unless told: a minute or two's worth on a small processor."""
BATCHES = {"cpu": 16, "cuda": 250, "mps": 64}


def settings(
    model: str, solver: str, nfe: str, seeds: range, guidance: float, batch: int, device: str
) -> dict[str, Any]:
    """What the report says about how it was made."""
    return {
        "model": model,
        "solver": solver,
        "evaluations": nfe,
        "seeds": f"{seeds.start} to {seeds.stop - 1}",
        "guidance": guidance,
        "batch": batch,
        "device": device_name(torch.device(device)),
        "processor cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "steindiff": steindiff.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def table(comparison: Comparison) -> Table:
    """The comparison for the terminal."""
    caption = (
        f"Fréchet: distance of {comparison.features} to {comparison.against}, lower is better. Energy: high-frequency "
        f"power over that of the many-step images, 1 is right. Distance: root mean square, to the same seed's "
        f"many-step image. Calls and backward passes are per image, seconds for all {len(comparison.seeds)}."
    )
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    out.add_column("method", no_wrap=True)
    for title in ("NFE", "Fréchet", "energy", "distance", "calls", "backward", "seconds"):
        out.add_column(title, justify="right", no_wrap=True)
    good = best(comparison)
    for i, row in enumerate(comparison.rows):
        cells = {
            "frechet": f"{row.frechet:.1f}",
            "energy_ratio": f"{row.energy_ratio:.2f}",
            "distance": f"{row.distance:.3f}",
        }
        marked = [f"[bold green]{text}[/]" if i in good[key] else text for key, text in cells.items()]
        if row.method == REFERENCE or (i and row.nfe != comparison.rows[i - 1].nfe):
            out.add_section()
        out.add_row(
            row.title, str(row.nfe), *marked, str(row.network_calls), str(row.backward_passes), f"{row.seconds:.1f}"
        )
    return out


def command(
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfes = "5",
    num: Annotated[int | None, typer.Option(help=f"Number of images (default: {NUMS['cpu']}, on a GPU more).")] = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    batch: Annotated[int | None, typer.Option(help="Images evaluated together; halved where memory runs out.")] = None,
    calibration: options.Calibrations = None,
    features: Annotated[
        str,
        typer.Option(
            help="Features of the Fréchet distance: random (nothing to download) or inception (FID; needs thousands "
            "of images).",
            autocompletion=lambda: list(FEATURES),
        ),
    ] = "random",
    out: Annotated[Path, typer.Option(help="Folder for report.html, grid.png and results.json.")] = Path(
        "steindiff-out"
    ),
    json: options.Json = False,
) -> None:
    """Sample the same seeds without and with SteinDiff; print the numbers, write a report.

    Rows: the plain solver on the EDM and the log-SNR grid, the paper's relaxation, Stein calibration, and a many-step
    reference.
    """
    nfes = options.numbers("nfe", nfe)
    method = named("solver", solver, SOLVERS)
    place = options.device(device)
    kind = place.partition(":")[0]
    num, batch = NUMS[kind] if num is None else num, BATCHES[kind] if batch is None else batch
    seeds = options.seeds(num, seed)
    subject, _ = options.with_calibrations(options.subject(model, guidance, place), calibration or [], guidance)
    subject = named("features", features, FEATURES)(subject)
    folder(out)
    with progress() as bar:
        task = bar.add_task(f"{model}, {len(seeds)} seeds", total=None)
        comparison = comparing.compare(
            subject,
            method,
            nfes,
            seeds,
            batch=batch,
            settings=settings(model, solver, nfe, seeds, guidance, batch, place),
            begin=lambda total: bar.update(task, total=round(total)),
            advance=lambda amount: bar.advance(task, amount),
            note=note,
        )
        paths = write(comparison, out)
    if json:
        print_json(as_json(comparison))
        return
    results.print(table(comparison))
    results.print(f"\n{BLUR}\n")
    for path in paths:
        results.print(f"[bold]{path}[/]", soft_wrap=True)
