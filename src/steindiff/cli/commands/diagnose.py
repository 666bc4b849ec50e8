"""`steindiff diagnose`."""

from __future__ import annotations

import dataclasses
import io
import json as jsons
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from steindiff import diagnostics
from steindiff._checks import at_least
from steindiff._discovery import named
from steindiff._files import folder, write_bytes, write_text
from steindiff.cli import options, subjects
from steindiff.cli.output import print_json, progress, written
from steindiff.grids import GRIDS
from steindiff.levels import Levels
from steindiff.model import Model
from steindiff.probes import check_gradient
from steindiff.sampler import levels_for
from steindiff.solvers import SOLVERS, Solver

EXAMPLES = (
    "steindiff diagnose --out diagnostics",
    "steindiff diagnose --model fashion --solver ddim --grid logsnr --nfe 6 --num 8 --out diagnostics",
)
PLOTS: dict[str, Any] = {
    "lipschitz": diagnostics.plot_lipschitz,
    "certificate": diagnostics.plot_certificate,
    "gammas": diagnostics.plot_gammas,
}
"""How each measurement is drawn, by the name of its file."""


def measurements(
    model: Model, solver: Solver, levels: Levels, seeds: range, iterations: int
) -> Iterator[tuple[str, Any]]:
    """What a run does to errors, by name, after a check that the network's derivatives are its own."""
    denoiser, level = model.denoiser_for(seeds), levels[levels.steps // 2]
    one = denoiser.subset(slice(0, 1), len(seeds))
    check_gradient(lambda z: one(z, level), model.noise(seeds[:1], level), 0.02 * level.sigma)
    run = (denoiser, model.noise(seeds, levels[0]), levels, solver)
    constants = diagnostics.lipschitz(*run, torch.Generator().manual_seed(0), iterations=iterations)
    yield "lipschitz", constants
    worst = (constants.denoiser.amax(1).tolist(), constants.noise.amax(1).tolist())
    yield "certificate", diagnostics.certificate(levels, *worst)
    yield "gammas", diagnostics.sampled_gammas(*run, torch.Generator().manual_seed(0))


def plain(value: Any) -> Any:
    """Measurements as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def command(
    out: Annotated[Path, typer.Option(help="Folder for one plot per diagnostic and diagnostics.json.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    grid: options.Grid = "edm",
    nfe: options.Nfe = 5,
    num: options.Num = 4,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    iterations: Annotated[int, typer.Option(help="Power iterations of a Lipschitz constant, at most.")] = 20,
    json: options.Json = False,
) -> None:
    """Measure what the steps of a run do to errors, and plot it: the paper's diagnostics.

    Local Lipschitz constants, the contractivity certificate they give, and the relaxation coefficient γ of every step.
    """
    from matplotlib.figure import Figure

    chosen = named("solver", solver, SOLVERS)
    place = named("grid", grid, GRIDS)
    seeds = options.seeds(num, seed)
    at_least("iterations", iterations, 1)
    subject = subjects.subject(model, guidance, device).model
    levels = levels_for(chosen, place, subject.schedule, nfe)
    folder(out)
    found: dict[str, Any] = {}
    with progress() as bar:
        task = bar.add_task(model, total=len(PLOTS))
        for name, data in measurements(subject, chosen, levels, seeds, iterations):
            found[name] = plain(data)
            figure = Figure(figsize=(6, 4), layout="constrained")
            PLOTS[name](data, figure.add_subplot())
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            write_bytes(out / f"{name}.png", buffer.getvalue())
            bar.advance(task)
    write_text(out / "diagnostics.json", jsons.dumps(found, indent=1) + "\n")
    if json:
        print_json(found)
        return
    for name in found:
        written(out / f"{name}.png")
