"""`steindiff sample`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from steindiff._discovery import named
from steindiff._distributed import all_reduce_sum, rank
from steindiff.cli import options, subjects
from steindiff.cli.output import Watch, print_json, progress, written
from steindiff.comparison import default_methods
from steindiff.model import Model
from steindiff.production import Images, Shards, generate, to_npz, to_png
from steindiff.sampler import Sampler
from steindiff.solvers import SOLVERS, Solver

EXAMPLES = (
    "steindiff sample --num 64 --png --out samples",
    "steindiff sample --nfe 8 --solver dpmpp-3m --method edm --num 64 --npz --out samples",
    "steindiff sample --calibration my.json --num 1000 --seed 5000 --device cuda --batch 250 --out more",
    "steindiff sample --num 50000 --batch 500 --compile --out fifty-thousand",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli sample --num 50000 --batch 500 --out fifty-thousand",
)

TOGETHER = True
"""Processes started by torchrun share the work."""


def choose(model: Model, method: str, solver: Solver, nfe: int) -> Sampler:
    """How to sample."""
    made = named("method", method, default_methods()).sampler(model, solver, nfe)
    if made is None:
        guidance = model.conditions.get("guidance", 1.0)
        where = f"at {nfe} evaluations" if guidance == 1.0 else f"with guidance {guidance:g}"
        raise ValueError(
            f"method = {method!r}: no calibration of {model.name} ships for this solver {where}; make one with "
            "`steindiff calibrate` and pass it with --calibration, or choose --method logsnr"
        )
    return made


def command(
    out: Annotated[Path, typer.Option(help="Folder for the set: shards of images with checksums, and a manifest.")],
    model: options.Model = "cifar10",
    solver: Annotated[str | None, typer.Option(help="Solver (default: dpmpp-2m).")] = None,
    nfe: Annotated[int | None, typer.Option(help="Network evaluations per image (default: 5).")] = None,
    method: Annotated[str | None, typer.Option(help="How to sample (default: calibrated).")] = None,
    calibration: options.Calibrations = None,
    num: options.Num = 16,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    prompt: options.Prompts = None,
    batch: Annotated[int, typer.Option(help="Images evaluated together; part of the set's settings.")] = 16,
    shard: Annotated[int, typer.Option(help="Images in a file; a kill loses no more than these.")] = 500,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile first: a minute, then faster on a GPU.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Write one PNG per seed, too, to OUT/png.")] = False,
    npz: Annotated[bool, typer.Option("--npz", help="Write all images, too, to OUT/images.npz.")] = False,
    json: options.Json = False,
) -> None:
    """Sample images, one per seed; run it again to go on where it stopped, with a larger --num to make the set larger.

    Files appear whole or not at all. Killed and run again, with one process or several, it ends with the same bytes;
    other settings in the same folder are refused. With `--calibration` the file decides solver and evaluations.
    """
    if out.suffix == ".npz":
        raise ValueError(f"out = {str(out)!r}: need a folder; --npz writes OUT/images.npz")
    if not str(out).strip("."):
        raise ValueError("out must name a folder of its own")
    seeds = options.seeds(num, seed)
    found = subjects.subject(model, guidance, device, compiled=compiled, prompts=prompt or (), batch=batch)
    if found.pictures is not None:
        way_out = "install the calibration in its pipeline with steindiff.integrations.diffusers.stabilize"
        raise ValueError(f"model = {model!r}: its samples are latents, not images; {way_out}")
    subject = found.model
    if calibration:
        options_given = {"--solver": solver, "--nfe": nfe, "--method": method}
        clash = [name for name, value in options_given.items() if value is not None]
        if clash or len(calibration) > 1:
            raise ValueError(f"{' and '.join(clash) or 'a second file'}: the calibration decides; leave it out")
        (own,) = options.calibrations(subject, calibration)
        sampler, method = own.sampler(), "calibrated"
    else:
        method = method or "calibrated"
        sampler = choose(subject, method, SOLVERS.resolve("solver", solver or "dpmpp-2m"), 5 if nfe is None else nfe)
    begun = time.perf_counter()
    with progress() as bar:
        task = bar.add_task(f"{model}, {method}, {sampler.nfe} evaluations", total=None)
        cut = Shards(size=shard, batch=batch, facts={"compiled": compiled})
        done = generate(subject, sampler, seeds, out, shards=cut, listener=Watch(bar, task))
        new, kept = all_reduce_sum(torch.tensor(done)).tolist()  # waits for the other processes
    seconds = time.perf_counter() - begun
    if rank().rank:
        return
    if png or npz:
        images = Images(out)  # reads and checks every shard: once for both
        if png:
            to_png(images, out / "png")
        if npz:
            to_npz(images, out / "images.npz")
    if json:
        facts = {"model": model, "solver": repr(sampler.solver), "nfe": sampler.nfe, "method": method}
        print_json({**facts, "guidance": guidance, "out": str(out), "new": new, "kept": kept, "seconds": seconds})
        return
    there = f", {kept} were there" if kept else ""
    images_made = "1 new image" if new == 1 else f"{new} new images"
    written(out, f": {images_made} in {seconds:.1f} s{there}")
