"""Options shared by the commands: one name, one meaning, one help text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from steindiff._checks import LARGEST_INT, integer
from steindiff._devices import available
from steindiff._discovery import named
from steindiff.calibration import Calibration
from steindiff.cli.process_group import own_gpu
from steindiff.comparison import METHODS, Subject
from steindiff.grids import GRIDS
from steindiff.models import MODELS
from steindiff.solvers import SOLVERS

Model = Annotated[str, typer.Option(help=f"Embedded model: {', '.join(MODELS)}.", autocompletion=lambda: list(MODELS))]
Solver = Annotated[
    str,
    typer.Option(
        help="Solver, e.g. ddim, dpmpp-2m, dpmpp-3m, heun, unipc-bh2-2.", autocompletion=lambda: list(SOLVERS)
    ),
]
Grid = Annotated[str, typer.Option(help=f"Grid: {', '.join(GRIDS)}.", autocompletion=lambda: list(GRIDS))]
Nfe = Annotated[int, typer.Option(help="Network evaluations per image.")]
Nfes = Annotated[str, typer.Option("--nfe", help="Network evaluations per image; several as 4,5,6,8.")]
Num = Annotated[int, typer.Option(help="Number of images.")]
Seed = Annotated[int, typer.Option(help="First seed; image i has seed SEED + i.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU where there is one.")]
Guidance = Annotated[float, typer.Option(help="Scale of classifier-free guidance; 1 is the conditional model.")]
Batch = Annotated[int, typer.Option(help="Images evaluated together.")]
Method = Annotated[
    str, typer.Option(help=f"How to sample: {', '.join(METHODS)}.", autocompletion=lambda: list(METHODS))
]
Calibrations = Annotated[
    list[Path] | None, typer.Option("--calibration", help="Calibration file to use instead of a shipped one.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def device(name: str) -> str:
    """The device meant, checked to be there.

    Raises:
        ValueError: if there is no such device, or fewer GPUs than processes.
    """
    there = available()
    if name == "auto":
        name = next((kind for kind in there if kind != "cpu"), "cpu")
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in there or (index and not (index.isdigit() and int(index) < count)):
        raise ValueError(f"device = {name!r}: allowed here are auto, {', '.join(there)}")
    return own_gpu(count) if name == "cuda" else name


def numbers(argument: str, text: str) -> list[int]:
    """The whole numbers of a list such as `4,5,6`, in order and once each.

    Raises:
        ValueError: if something in it is not a whole number.
    """
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{argument} = {text!r}: allowed are whole numbers >= 1, several as 4,5,6") from None


def seeds(num: int, seed: int) -> range:
    """The seeds of a run.

    Raises:
        ValueError: if there are none, or one is negative or above 2⁶³ − 1.
    """
    integer("num", num, 1)
    integer("seed", seed, 0, LARGEST_INT - num)
    return range(seed, seed + num)


def subject(model: str, guidance: float, device_name: str, *, compiled: bool = False) -> Subject:
    """The model meant, on its device."""
    return named("model", model, MODELS)(guidance=guidance, device=device(device_name), compiled=compiled)


def with_calibrations(subject: Subject, paths: Sequence[Path], guidance: float) -> tuple[Subject, list[Calibration]]:
    """The subject with calibrations from files before the shipped ones, and what the files held.

    Raises:
        ValueError: if a file is damaged or was measured for something else.
    """
    loaded = [Calibration.load(path) for path in paths]
    for path, own in zip(paths, loaded, strict=True):
        seed = own.settings.get("seed", 0)  # its label is the one the model was recognised by
        try:
            own.check(
                denoiser=subject.denoisers([seed]),
                shape=subject.shape,
                settings={"guidance": guidance},
                device=subject.device,
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    table = {(own.solver, own.nfe): own for own in loaded}
    shipped = subject.calibrations
    return (
        dataclasses.replace(subject, calibrations=lambda solver, nfe: table.get((solver, nfe)) or shipped(solver, nfe)),
        loaded,
    )
