"""`steindiff diagnose`."""

from __future__ import annotations

import dataclasses
import io
import json as jsons
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor

from steindiff import diagnostics
from steindiff._checks import at_least
from steindiff._discovery import named
from steindiff._files import folder, write_bytes, write_text
from steindiff.cli import options, subjects
from steindiff.cli.output import print_json, progress, written
from steindiff.comparison import CompareOptions
from steindiff.denoisers.base import Denoiser
from steindiff.grids import GRIDS
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.model import Model
from steindiff.probes import check_gradient
from steindiff.sampler import levels_for
from steindiff.seeding import noise
from steindiff.solvers import SOLVERS
from steindiff.solvers.base import Solver

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXAMPLES = (
    "steindiff diagnose --out diagnostics",
    "steindiff diagnose --model fashion --solver ddim --grid logsnr --nfe 6 --num 8 --out diagnostics",
)


class Coefficients(NamedTuple):
    """γ of every step: on states from the forward coupling, and on the run's own."""

    ideal: tuple[diagnostics.Gammas, ...]
    sampled: tuple[diagnostics.SteinGamma, ...]


@dataclass(frozen=True)
class Diagnosis:
    """A run to look at; the measurements other ones need are made once.

    Clean images x* are the model's own many-step samples, so nothing but the model is needed.
    """

    subject: Model
    solver: Solver
    levels: Levels
    seeds: range
    iterations: int

    @property
    def generator(self) -> torch.Generator:
        """A fresh source of randomness, the same for every measurement."""
        return torch.Generator().manual_seed(0)

    @cached_property
    def denoiser(self) -> Denoiser:
        """D for the seeds' labels."""
        return self.subject.denoiser_for(self.seeds)

    @cached_property
    def start(self) -> Tensor:
        """Initial states."""
        return noise(self.seeds, self.subject.shape, self.levels[0]).to(self.subject.device)

    def check(self) -> None:
        """Refuse a network whose derivatives are not its own: all that follows is made of them."""
        level = self.levels[self.levels.steps // 2]
        one = self.denoiser.subset(slice(0, 1), len(self.seeds))
        x = noise(self.seeds[:1], self.subject.shape, level).to(self.subject.device)
        check_gradient(lambda z: one(z, level), x, 0.02 * level.sigma)

    @cached_property
    def clean(self) -> Tensor:
        """The model's many-step samples."""
        fine = GRIDS["edm"](self.subject.schedule, CompareOptions().reference_nfe)
        x = noise(self.seeds, self.subject.shape, fine[0]).to(self.subject.device)
        return sample(self.denoiser, x, fine, SOLVERS["dpmpp-2m"]).x

    @cached_property
    def lipschitz(self) -> diagnostics.Lipschitz:
        """Local Lipschitz constants along the run (Fig. 4)."""
        return diagnostics.lipschitz(
            self.denoiser, self.start, self.levels, self.solver, self.generator, iterations=self.iterations
        )

    def certificate(self) -> diagnostics.Certificate:
        """What they certify (Prop. 4.1)."""
        worst = (self.lipschitz.denoiser.amax(1).tolist(), self.lipschitz.noise.amax(1).tolist())
        return diagnostics.certificate(self.levels, *worst)

    def gammas(self) -> Coefficients:
        """γ with and without the clean image (Thms 4.3, 4.7), and what a sampler's own states make of it."""
        flow = diagnostics.fine_flow(self.denoiser, self.subject.schedule, steps=16)
        run = (self.denoiser, self.clean, self.levels, self.solver)
        return Coefficients(
            diagnostics.ideal_gammas(*run, self.generator, flow=flow), diagnostics.sampled_gammas(*run, self.generator)
        )

    def decay(self) -> diagnostics.Decay:
        """How the error falls (Thm 4.8)."""
        return diagnostics.decay(self.denoiser, self.clean, self.levels, self.solver, self.generator)

    def oscillation(self) -> diagnostics.Oscillation:
        """A map that neither expands nor converges (Fig. 3)."""
        return diagnostics.oscillation(torch.ones(2), 12, 1.0, self.generator)


DIAGNOSTICS: dict[str, tuple[Callable[[Diagnosis], Any], Callable[[Any, Axes], None]]] = {
    "lipschitz": (lambda run: run.lipschitz, diagnostics.plot_lipschitz),
    "certificate": (Diagnosis.certificate, diagnostics.plot_certificate),
    "gammas": (Diagnosis.gammas, lambda found, axes: diagnostics.plot_gammas(found.ideal, axes, found.sampled)),
    "decay": (Diagnosis.decay, diagnostics.plot_decay),
    "oscillation": (Diagnosis.oscillation, diagnostics.plot_oscillation),
}
"""What is measured and how it is drawn, by the name of the file."""


def plain(value: Any) -> Any:
    """Measurements as JSON has them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
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

    Local Lipschitz constants, the contractivity certificate, γ with and without the clean image, the decay of the
    error, and the oscillation example. Clean images are the model's own many-step samples.
    """
    from matplotlib.figure import Figure

    chosen = named("solver", solver, SOLVERS)
    place = named("grid", grid, GRIDS)
    seeds = options.seeds(num, seed)
    at_least("iterations", iterations, 1)
    subject = subjects.subject(model, guidance, device).model
    run = Diagnosis(subject, chosen, levels_for(chosen, place, subject.schedule, nfe), seeds, iterations)
    run.check()
    folder(out)
    found: dict[str, Any] = {}
    with progress() as bar:
        task = bar.add_task("", total=len(DIAGNOSTICS))
        for name, (measure, plot) in DIAGNOSTICS.items():
            bar.update(task, description=name)
            data = measure(run)
            found[name] = plain(data)
            figure = Figure(figsize=(6, 4), layout="constrained")
            plot(data, figure.add_subplot())
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
