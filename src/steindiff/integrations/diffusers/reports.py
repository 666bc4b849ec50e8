r"""A pipeline with and without its calibration, side by side.

write(report(pipe, calibration, ["a lighthouse", "a dragonfly"]), folder)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from steindiff._progress import bar
from steindiff._version import __version__
from steindiff.calibration import Calibration, CalibrationSet
from steindiff.integrations.diffusers.capture import chunks
from steindiff.integrations.diffusers.pipelines import all_of, scheduler_for, stabilize
from steindiff.report import Entry, Report, of_images


def report(
    pipe: Any,
    calibration: Calibration | CalibrationSet,
    prompts: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = range(8),
    many: int = 24,
    progress: bool = True,
    **call: Any,
) -> Report:
    """Run a pipeline on the same seeds plain, calibrated and with many steps; `steindiff.report.write` writes the page.

    The pipeline decodes, so its images may have any size. Plain is the calibration's solver on the pipeline's own grid.

    Args:
        pipe: the pipeline; it is left as it was.
        calibration: of it; of a set, every number of evaluations is shown.
        prompts: dealt out by seed, and shown as captions; None as in `calibrate`.
        seeds: one image each, none of those it was calibrated on.
        many: steps of the last row, to which the distance of the others is given.
        progress: show a bar with the time left.
        call: arguments of the pipeline's call, those it was calibrated with.
    """
    if prompts is not None:
        call["prompt"] = list(prompts)
    parts, before, known = chunks(call or {"batch_size": 1}, 1), pipe.scheduler, all_of(calibration)

    def images(steps: int) -> list[Any]:
        found = []
        for i, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(int(seed))
            made = pipe(**parts[i % len(parts)], num_inference_steps=steps, generator=generator)
            if not hasattr(made, "images"):
                raise ValueError(f"pipe = {type(pipe).__name__}: makes no images but {', '.join(made)}")
            found.append(made.images[0])
            advance(steps)
        return found

    steps = [one.levels.steps for one in known]
    entries = []
    with bar("sampling", len(seeds) * (many + 2 * sum(steps)), shown=progress) as advance:
        try:
            pipe.scheduler = scheduler_for(before, known[0].solver)
            entries += [Entry("plain", one.nfe, images(one.levels.steps)) for one in known]
            entries.append(Entry(f"many steps ({many})", many, images(many), reference=True))
        finally:
            pipe.scheduler = before
        with stabilize(pipe, calibration):
            entries[-1:-1] = [Entry("calibrated", one.nfe, images(one.levels.steps)) for one in known]
    captions = [str(prompts[i % len(prompts)]) for i in range(len(seeds))] if prompts else []
    name = type(pipe).__name__
    settings = {"pipeline": name, "solver": repr(known[0].solver), "steindiff": __version__}
    return of_images(entries, seeds, title=f"{name}: plain, calibrated", captions=captions, settings=settings)
