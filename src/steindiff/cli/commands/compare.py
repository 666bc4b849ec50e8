"""`steindiff compare`, the main job."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from steindiff._devices import device_name
from steindiff._discovery import named
from steindiff._files import folder
from steindiff._version import __version__
from steindiff.cli import options
from steindiff.cli.output import Watch, print_json, progress, show, written
from steindiff.comparison import REFERENCE, CompareOptions, Comparison, compare, default_methods
from steindiff.report import write
from steindiff.report.build import results as as_json
from steindiff.report.page import BLUR, best
from steindiff.solvers import SOLVERS
from steindiff.yardsticks import YARDSTICKS

EXAMPLES = (
    "steindiff compare",
    "steindiff compare --nfe 4,5,6,8 --num 256 --device cuda",
    "steindiff compare --features inception --num 5000 --device cuda",
    "steindiff compare --model fashion --solver ddim --out fashion-report",
    "steindiff compare --guidance 2 --nfe 6 --calibration guided/cifar10-dpmpp-2m-6.json",
    "steindiff compare --num 16 --json | jq '.rows[] | [.title, .frechet]'",
)

NUMS = {"cpu": 32, "cuda": 1000, "mps": 256}
"""How many images to compare unless told: a minute or two's worth on a small processor."""
BATCHES = {"cpu": 16, "cuda": 250, "mps": 64}


def settings(
    model: str, solver: str, nfe: str, seeds: range, guidance: float, batch: int, device: str
) -> dict[str, Any]:
    """What the report says about how it was made."""
    return {
        "command": shlex.join(["steindiff", *sys.argv[1:]]),
        "model": model,
        "solver": solver,
        "evaluations": nfe,
        "seeds": f"{seeds.start} to {seeds.stop - 1}",
        "guidance": guidance,
        "batch": batch,
        "device": device_name(torch.device(device)),
        "processor cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "steindiff": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def table(comparison: Comparison) -> Table:
    """The comparison for the terminal."""
    real = any(row.frechet is not None for row in comparison.rows)
    real_text = "Real: to real images. " if real else ""
    caption = (
        f"Own: Fréchet distance ({comparison.features}) to the model's own many-step samples of other seeds; two sets "
        f"of them are {comparison.floor:.1f} apart. {real_text}Energy: high-frequency power "
        "over that of the many-step images; spread: variety within a condition likewise; 1 is right. PSNR: to the same "
        f"seed's many-step image. Calls and backward passes are per image, seconds for all {len(comparison.seeds)}."
    )
    out = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    out.add_column("method", overflow="fold")
    columns = ["NFE", "own", *(["real"] if real else []), "energy", "spread", "PSNR", "calls", "backward", "seconds"]
    for title in columns:
        out.add_column(title, justify="right", no_wrap=True)
    good = best(comparison)
    for i, row in enumerate(comparison.rows):
        cells = {
            "honest": f"{row.honest:.1f}",
            **({"frechet": f"{row.frechet:.1f}"} if row.frechet is not None else {}),
            "energy_ratio": f"{row.energy_ratio:.2f}",
            "spread": f"{row.spread:.2f}",
            "psnr": f"{row.psnr:.1f}" if row.method != REFERENCE else "–",
        }
        marked = [f"[bold green]{text}[/]" if i in good.get(key, ()) else text for key, text in cells.items()]
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
            autocompletion=lambda: list(YARDSTICKS),
        ),
    ] = "random",
    lipschitz: Annotated[bool, typer.Option(help="Measure local Lipschitz constants on one seed.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for report.html, grid.png and results.json.")] = Path(
        "steindiff-out"
    ),
    json: options.Json = False,
) -> None:
    """Sample the same seeds without and with SteinDiff; print the numbers, write a report.

    Rows: the plain solver on the EDM and the log-SNR grid, the paper's relaxation (of UniPC-3 where the solver is
    DPM-Solver++, whose steps it does not change), Stein calibration, and a many-step reference.
    """
    nfes = options.numbers("nfe", nfe)
    place = options.device(device)
    kind = place.partition(":")[0]
    num, batch = NUMS[kind] if num is None else num, BATCHES[kind] if batch is None else batch
    seeds = options.seeds(num, seed)
    subject = options.model(model, guidance, place)
    replayed, _ = options.calibrated(subject, calibration or [])
    folder(out)
    with progress() as bar:
        task = bar.add_task(f"{model}, {len(seeds)} seeds", total=None)
        comparison = compare(
            subject,
            nfes,
            seeds,
            solver=solver,
            methods=default_methods(SOLVERS.resolve("solver", solver)) | {"calibrated": replayed},
            yardstick=named("features", features, YARDSTICKS)(subject),
            options=CompareOptions(batch=batch, lipschitz_seeds=int(lipschitz), listener=Watch(bar, task)),
        )
        facts = settings(model, solver, nfe, seeds, guidance, batch, place)
        comparison = dataclasses.replace(comparison, settings={**facts, **comparison.settings})
        paths = write(comparison, out)
    if json:
        print_json(as_json(comparison))
        return
    show(table(comparison))
    show(f"\n{BLUR}\n")
    for path in paths:
        written(path)
