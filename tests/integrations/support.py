"""What the support matrix says of one pipeline: how near our own loop comes to it, or why it is refused."""

from __future__ import annotations

from typing import Any

import torch
from hosts import Host

from steindiff import sample
from steindiff.bases import natural_basis
from steindiff.integrations.diffusers import scheduler_for
from steindiff.integrations.diffusers.capture import Recording, capture, network_of
from steindiff.integrations.diffusers.families import family_of
from steindiff.solvers import Heun

STEPS = 4


def examine(host: Host) -> dict[str, Any]:
    """One row of the matrix."""
    torch.manual_seed(0)
    pipe, call = host.build()
    row: dict[str, Any] = {"pipeline": type(pipe).__name__, "solver": repr(host.solver), "note": host.note}
    try:
        scheduler = scheduler_for(pipe.scheduler, host.solver)
        captured = capture(pipe, scheduler, **call)
    except ValueError as error:
        return {**row, "refused": str(error)}
    module = network_of(pipe)
    recording = Recording(module)
    before, pipe.scheduler = pipe.scheduler, scheduler
    generator = torch.Generator().manual_seed(7)
    try:
        with recording.of(pipe, scheduler), torch.no_grad():
            pipe(**{"num_inference_steps": STEPS, "generator": generator, "output_type": "latent", **call})
    finally:
        pipe.scheduler = before
    steps = recording.steps
    levels = family_of(scheduler).levels(scheduler)
    layout = captured.network.layout
    samples = captured.network.calls[0].batch
    unit = [level.alpha if isinstance(host.solver, Heun) else 1.0 for level in (levels[0], levels[-1])]
    first, last = (layout.unpack(x[:samples]).float() for x in (steps[0].sample, steps[-1].result))
    calls = sum(len(step.calls) for step in steps)
    with torch.no_grad():
        mine = sample(captured.denoiser(range(samples)), first * unit[0], levels, host.solver)
    gap = float((mine.x - last * unit[1]).norm() / mine.x.norm())
    guidance = captured.network.guidance
    return {
        **row,
        "relative_difference": gap,
        "bands": natural_basis(captured.shape).bands,
        "shape": list(captured.shape),
        "calls": calls,
        "calls_per_step": calls // len(steps),
        "weight": guidance.weight if guidance.copies == 2 else guidance.embedded,
    }
