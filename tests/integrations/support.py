"""The support matrix: how near our own loop comes to a pipeline, or why the pipeline is refused.

`python tests/integrations/support.py` writes `benchmarks/results/support.json` and the table of `docs/diffusers.md`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch

from steindiff import sample
from steindiff._files import write_json
from steindiff.bases import natural_basis
from steindiff.integrations.diffusers import scheduler_for
from steindiff.integrations.diffusers.capture import Recording, capture
from steindiff.integrations.diffusers.families import family_of
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh2

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests"), str(ROOT / "benchmarks")]
from hosts import HOSTS, Host  # noqa: E402

from pages import fill, rows  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks/results/support.json", ROOT / "docs/diffusers.md"
STEPS = 4
TOLERANCE = 1e-5
SOLVERS: dict[type[Solver], str] = {DPMSolverMultistep: "DPM-Solver++(2M)", UniPCBh2: "UniPC", Heun: "Heun"}


def examine(name: str, host: Host) -> dict[str, Any]:
    """One row of the matrix."""
    torch.manual_seed(0)
    pipe, call = host.build()
    row: dict[str, Any] = {
        "name": name,
        "pipeline": type(pipe).__name__,
        "solver": SOLVERS[type(host.solver)],
        "note": host.note,
        "seed": 0,
        "device": platform.machine(),
        "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
    }
    try:
        scheduler = scheduler_for(pipe.scheduler, host.solver)
        captured = capture(pipe, scheduler, **call)
    except ValueError as error:
        return {**row, "refused": str(error)}
    recording = Recording(pipe)
    before, pipe.scheduler = pipe.scheduler, scheduler
    generator = torch.Generator().manual_seed(0)  # the capture's: some pipelines draw conditions as well
    try:
        with recording.of(scheduler):
            pipe(**{"num_inference_steps": STEPS, "generator": generator, "output_type": "latent", **call})
    finally:
        pipe.scheduler = before
    steps, network = recording.steps, captured.network
    levels = family_of(scheduler).levels(scheduler)
    first, last = (network.layout.unpack(x[: network.calls[0].batch]) for x in (steps[0].sample, steps[-1].result))
    start = levels[0].alpha if isinstance(host.solver, Heun) else 1.0  # its state is x/α
    with torch.no_grad():
        mine = sample(captured.denoiser(range(len(first))), first * start, levels, host.solver)
    calls = sum(len(step.calls) for step in steps)
    return {
        **row,
        "relative_difference": float(f"{float((mine.x - last).norm() / mine.x.norm()):.2g}"),
        "shape": list(captured.shape),
        "bands": natural_basis(captured.shape).bands,
        "nfe": mine.nfe,
        "network_calls": calls,
        "extra_calls": calls - mine.nfe * len(network.calls),
        "backward_passes": 0,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """The matrix in Markdown: what is verified, then what is refused."""
    body = []
    for row in sorted(found, key=lambda row: ("refused" in row, row["pipeline"])):
        verified, bands = "refused", "–"
        if "refused" not in row:
            verified, bands = f"{row['relative_difference']:.0e}", f"{row['bands']} of {tuple(row['shape'])}"
        body.append([row["pipeline"], row["solver"], verified, bands, row["note"]])
    return rows(["pipeline", "solver", "verified to", "bands", "notes"], body)


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    found = [examine(name, host) for name, host in HOSTS.items()]
    write_json(RESULTS, found)
    fill(PAGE, "support", table(found))
