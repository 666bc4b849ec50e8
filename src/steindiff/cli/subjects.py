"""What `--model` takes: an embedded model, a diffusers pipeline, an exported network, or an object of one's own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steindiff._discovery import named
from steindiff.calibrating import Progress, Recipe, calibrate_budgets
from steindiff.calibration import Calibration
from steindiff.cli import options
from steindiff.cli.options import MODELS
from steindiff.cli.output import progress
from steindiff.denoisers import X0, Denoiser, EDMDenoiser, Epsilon, FlowVelocity, Score, Velocity
from steindiff.model import Model
from steindiff.schedules import SCHEDULES
from steindiff.solvers import SOLVERS, Solver

PREDICTIONS: dict[str, Callable[..., Denoiser]] = {
    "epsilon": Epsilon,
    "velocity": Velocity,
    "flow": FlowVelocity,
    "x0": X0,
    "score": Score,
    "edm": EDMDenoiser,
}
"""What an exported network may predict."""
SUFFIX = ".pt2"
"""Of files that `torch.export.save` writes."""

Calibrate = Callable[..., Mapping[int, Calibration]]
"""As `calibrate_budgets` without its model."""


@dataclass(frozen=True)
class Subject:
    """A model, what turns its latents into images in [−1, 1], the images' channels, and the host that calibrates it."""

    model: Model
    pictures: Callable[[Tensor], Tensor] | None = None
    channels: int = 0
    host: Calibrate | None = None

    def calibrate(self, nfes: Sequence[int], solver: Solver, recipe: Recipe, batch: int) -> Mapping[int, Calibration]:
        """Calibrate for several numbers of evaluations, with a progress bar."""
        with progress() as bar:
            task = bar.add_task(self.model.name, total=None)

            def show(told: Progress) -> None:
                best = "" if told.mismatch is None else f", mismatch {told.mismatch:.4f}"
                title = f"{self.model.name}, {told.stage}{best}"
                bar.update(task, description=title, completed=told.done, total=told.total)

            how = self.host or calibrate_budgets
            return how(self.model, nfes, solver, recipe=recipe, batch=batch, callback=show)


def subject(
    name: str,
    guidance: float = 1.0,
    device: str = "auto",
    *,
    compiled: bool = False,
    forward_only: bool = False,
    prompts: Sequence[str] = (),
    batch: int = 16,
) -> Subject:
    """What a name means; arguments as the options of these names say. `batch` bounds one network call of a pipeline.

    `forward_only` promises that no derivative is taken of an embedded model.
    An object's own model decides where it runs, unless its function takes `device`.
    """
    device, embedded = options.device(device), name in MODELS
    pipeline = not embedded and SUFFIX not in name and (Path(name).is_dir() or ("/" in name and ":" not in name))
    for option, given, right in (
        ("--prompt", prompts, pipeline),
        ("--compile", compiled, embedded),
        ("--guidance", guidance != 1.0, embedded or pipeline),
    ):
        if given and not right:
            raise ValueError(f"{option} does nothing for model = {name!r}; leave it out")
    if embedded or (not pipeline and ":" not in name and SUFFIX not in name):
        model = named("model", name, MODELS)(
            guidance=guidance, device=device, compiled=compiled, forward_only=forward_only
        )
    elif pipeline:
        return of_pipeline(name, guidance, device, prompts, batch)
    else:
        model = exported(name, device) if SUFFIX in name else imported(name, device)
    return Subject(model, channels=model.shape[0])


def imported(name: str, device: str) -> Model:
    """The model `module:name` means; the module may lie in the current folder."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model = {name!r}: {error}") from error
    if callable(found) and not isinstance(found, Model):
        takes_device = "device" in inspect.signature(found).parameters
        found = found(device=device) if takes_device else found()
    if not isinstance(found, Model):
        raise ValueError(f"model = {name!r} must be a steindiff.Model or return one, got {type(found).__name__}")
    return found


def exported(name: str, device: str) -> Model:
    """The model of a network `(x, t)` that `torch.export.save` wrote."""
    path, _, rest = name.partition(SUFFIX)
    predicts, _, schedule = rest.lstrip(":").partition(":")
    if not schedule:
        raise ValueError(f"model = {name!r} must say what it predicts and its schedule; write NET.pt2:epsilon:ddpm")
    wrap, process = named("model", predicts, PREDICTIONS), SCHEDULES.resolve("model", schedule)
    program = torch.export.load(path + SUFFIX)
    args, _ = program.example_inputs or ((), {})
    entries = program.graph_signature.user_inputs
    state = next((node.meta["val"].shape for node in program.graph.nodes if node.name in entries), None)
    if len(args) != 2 or state is None or isinstance(state[0], int):
        raise ValueError(
            f"model = {name!r} must take x and t with a batch of any size; export it with "
            "dynamic_shapes=({0: torch.export.Dim('batch')},) * 2"
        )
    network = program.module().to(device)
    return Model(wrap(network), process, tuple(map(int, state[1:])), device=device, name=Path(path).name)


def of_pipeline(name: str, guidance: float, device: str, prompts: Sequence[str], batch: int) -> Subject:
    """A diffusers pipeline, from a folder or the hub."""
    try:
        from steindiff.integrations import diffusers as host
    except ImportError as error:
        raise ValueError(f"model = {name!r} needs diffusers; install steindiff[diffusers] ({error})") from error
    from steindiff.integrations.diffusers.capture import capture
    from steindiff.integrations.diffusers.pipelines import pictures, scheduler_for

    try:
        index = host.DiffusionPipeline.load_config(name)  # names classes of this package, too
        kind: Any = getattr(host, str(index.get("_class_name")), host.DiffusionPipeline)
        pipe = kind.from_pretrained(name).to(device)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"model = {name!r}: diffusers cannot load it: {str(error).splitlines()[0]}") from error
    pipe.set_progress_bar_config(disable=True)
    taken = inspect.signature(pipe.__call__).parameters
    call: dict[str, Any] = {}
    for argument, of in (("class_labels", int), ("prompt", str)):
        if argument not in taken:
            continue
        if not prompts:
            what = "class labels; add --prompt 0" if of is int else "prompts; add --prompt 'a red fox'"
            raise ValueError(f"model = {name!r} needs {what}, several times for several")
        call[argument] = [of(text) for text in prompts]
        break
    if not call:
        call["batch_size"] = min(batch, 4)
    if guidance != 1.0:
        call["guidance_scale"] = guidance
    captured = capture(pipe, scheduler_for(pipe.scheduler, SOLVERS["dpmpp-2m"]), batch=batch, **call)
    model = captured.model(Path(name).name)
    decode, channels = pictures(pipe, model.shape)

    def calibrate(model: Model, nfes: Sequence[int], solver: Solver, recipe: Recipe, batch: int, callback: Any) -> Any:
        settings = {"solver": solver, "recipe": recipe, "batch": batch, "progress": callback}
        return {one.nfe: one for one in host.calibrate(pipe, nfe=list(nfes), **settings, **call).calibrations}

    return Subject(model, decode, channels, calibrate)
