"""Options shared by the commands: one name, one meaning, one help text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

import steindiff.model
from steindiff import zoo
from steindiff._checks import at_least
from steindiff._environment import available
from steindiff.calibration import Calibration
from steindiff.cli.process_group import own_gpu
from steindiff.grids import GRIDS
from steindiff.models import load
from steindiff.solvers import SOLVERS

MODELS: dict[str, Callable[..., steindiff.model.Model]] = {name: partial(load, name) for name in zoo.names()}
"""What `--model` takes: name → function of `guidance`, `device`, `compiled` and `forward_only`."""

Model = Annotated[
    str,
    typer.Option(
        help=f"Embedded model ({', '.join(MODELS)}), folder or hub id of a diffusers pipeline, exported network "
        "FILE.pt2:PREDICTS:SCHEDULE, or module:name, a Model or a function that returns one (its code is run).",
        autocompletion=lambda: list(MODELS),
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="Prompt or class label of a pipeline; several are dealt out by seed."),
]
Solver = Annotated[
    str,
    typer.Option(help="Solver, as ddim, dpmpp-2m, dpmpp-3m, heun, unipc-bh2-2.", autocompletion=lambda: list(SOLVERS)),
]
Grid = Annotated[str, typer.Option(help=f"Grid: {', '.join(GRIDS)}.", autocompletion=lambda: list(GRIDS))]
Nfe = Annotated[int, typer.Option(help="Network evaluations per image.")]
Nfes = Annotated[str, typer.Option("--nfe", help="Network evaluations per image; several as 4,5,6,8.")]
Num = Annotated[int, typer.Option(help="Number of images.")]
Seed = Annotated[int, typer.Option(help="First seed; image i has seed SEED + i.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps; auto takes a GPU where there is one.")]
Guidance = Annotated[
    float,
    typer.Option(help="Scale of classifier-free guidance; 1 is the conditional model, or a pipeline's own scale."),
]
Batch = Annotated[int, typer.Option(help="Images evaluated together.")]
Calibrations = Annotated[list[Path] | None, typer.Option("--calibration", help="File to use instead of a shipped one.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def device(name: str) -> str:
    """The device meant, checked to be there."""
    there = available()
    if name == "auto":
        name = next((kind for kind in there if kind != "cpu"), "cpu")
    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if kind not in there or (index and not (index.isdigit() and int(index) < count)):
        raise ValueError(f"device = {name!r} is not on this machine; choose from auto, {', '.join(there)}")
    return own_gpu(count) if name == "cuda" else name


def numbers(argument: str, text: str) -> list[int]:
    """The whole numbers of a list such as `4,5,6`, in order and once each."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{argument} must be whole numbers >= 1, several as 4,5,6, got {text!r}") from None


def seeds(num: int, seed: int) -> range:
    """The seeds of a run."""
    at_least("num", num, 1)
    at_least("seed", seed, 0)
    if seed + num > 2**31:
        raise ValueError(f"seed must leave all seeds below 2**31, got {seed} for {num} images")
    return range(seed, seed + num)


def calibrations(model: steindiff.model.Model, paths: Sequence[Path]) -> list[Calibration]:
    """What files hold for a model."""
    loaded = [Calibration.load(path) for path in paths]
    for path, own in zip(paths, loaded, strict=True):
        try:
            own.check(model)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return loaded
