"""`steindiff bench`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from steindiff import bench as benching
from steindiff._discovery import named
from steindiff._files import folder
from steindiff.bench.report import rows
from steindiff.bench.writing import write
from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, show, written
from steindiff.solvers import SOLVERS

EXAMPLES = (
    "steindiff bench --out speed",
    "steindiff bench --section loop --batch 1,32 --repeats 15 --out speed",
    "steindiff bench --device cuda --section loop --section precision --section compile --out speed",
    "steindiff bench --section loop --batch 1 --json --out speed | jq '.records[] | [.name, .ratio.median]'",
)

CAPTION = (
    "Time: over that of the plain loop; of the plain loop over that of the network alone; in a sweep over that of its "
    "first row. Median and quartiles of the ratios within each round."
)


def command(
    out: Annotated[Path, typer.Option(help="Folder for bench-<device>.json and its plot.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfe = 5,
    device: options.Device = "auto",
    batch: Annotated[
        str | None, typer.Option(help="Images evaluated together; several as 1,4,32 (default: what suits the device).")
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Rounds; each times every implementation once.")] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(help=f"What to measure: {', '.join(benching.SECTIONS)} (default: what suits the device)."),
    ] = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Measure what sampling costs: implementations side by side in one run, ratios with their spread.

    The plain loop against the bare network and diffusers' own loop, replay and relaxation against the plain loop, time
    and memory against batch, evaluations, resolution and probes. Absolute times are recorded on a GPU only.
    """
    place = options.device(device)
    scope = benching.SCOPES[place.partition(":")[0]]
    if batch is not None:
        sizes = tuple(options.numbers("batch", batch))
        if min(sizes) < 1:
            raise ValueError(f"batch = {batch!r}: allowed are whole numbers >= 1, several as 1,4,32")
        scope = dataclasses.replace(scope, batches=sizes, corrected=sizes)
    if repeats is not None:
        if repeats < 1:
            raise ValueError(f"repeats = {repeats}: allowed are whole numbers >= 1")
        scope = dataclasses.replace(scope, repeats=repeats)
    if seed < 0:
        raise ValueError(f"seed = {seed}: allowed are whole numbers >= 0")
    for name in section or ():
        named("section", name, benching.SECTIONS)
    subject = options.subject(model, 1.0, place)
    folder(out)
    with progress() as bar:
        task = bar.add_task(model, total=None)
        result = benching.bench(
            subject,
            named("solver", solver, SOLVERS),
            nfe,
            scope,
            sections=section,
            seed=seed,
            advance=lambda name: bar.update(task, description=f"{model}, {name}"),
        )
        paths = write(result, out, note)
    if json:
        print_json(result)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=CAPTION, caption_justify="left")
    table.add_column("what", no_wrap=True)
    for title in ("time", "calls", "backward"):
        table.add_column(title, justify="right")
    for what, _, ratio, quartiles, calls, passes in rows(result):
        table.add_row(what, f"{ratio} ({quartiles})", calls, passes)
    show(table)
    for path in paths:
        written(path)
