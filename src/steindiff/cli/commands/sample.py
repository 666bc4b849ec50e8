"""`steindiff sample`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from steindiff._discovery import named
from steindiff._distributed import all_reduce_sum, rank
from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, results
from steindiff.comparison import METHODS, Plan, Subject
from steindiff.production import Images, generate, to_npz, to_png
from steindiff.solvers import SOLVERS
from steindiff.solvers.base import Solver

EXAMPLES = (
    "steindiff sample --num 64 --png --out samples",
    "steindiff sample --nfe 8 --solver dpmpp-3m --method edm --num 64 --npz --out samples",
    "steindiff sample --calibration my.json --num 1000 --seed 5000 --device cuda --batch 250 --out more",
    "steindiff sample --num 50000 --batch 500 --compile --out fifty-thousand",
    "torchrun --nproc_per_node=8 -m -- steindiff.cli sample --num 50000 --batch 500 --out fifty-thousand",
)

TOGETHER = True
"""Processes started by torchrun share the work."""


def plan(subject: Subject, method: str, solver: Solver, nfe: int) -> Plan:
    """How to sample.

    Raises:
        ValueError: if the method is unknown or there is no calibration for it.
    """
    made = named("method", method, METHODS).plan(subject, solver, nfe)
    if made is None:
        raise ValueError(
            f"method = {method!r}: no calibration of {subject.name} ships for this solver at {nfe} evaluations; "
            "make one with `steindiff calibrate`, or choose --method edm"
        )
    return made


def command(
    out: Annotated[Path, typer.Option(help="Folder for the set: shards of images with checksums, and a manifest.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfe = 5,
    method: options.Method = "calibrated",
    calibration: options.Calibrations = None,
    num: options.Num = 16,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    batch: Annotated[int, typer.Option(help="Images evaluated together; part of the set's settings.")] = 16,
    shard: Annotated[int, typer.Option(help="Images in a file; a kill loses no more than these.")] = 500,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the network first: a minute or so, then faster on a GPU.")
    ] = False,
    png: Annotated[bool, typer.Option("--png", help="Write one PNG per seed, too, to OUT/png.")] = False,
    npz: Annotated[bool, typer.Option("--npz", help="Write all images, too, to OUT/images.npz.")] = False,
    json: options.Json = False,
) -> None:
    """Sample images, one per seed; run it again to go on where it stopped.

    Files appear whole or not at all. Killed and run again, with one process or several, it ends with the same bytes;
    other settings in the same folder are refused. With `--calibration` solver and number of evaluations are the file's
    own.
    """
    if out.suffix == ".npz":
        raise ValueError(f"out = {str(out)!r}: need a folder; --npz writes OUT/images.npz")
    seeds = options.seeds(num, seed)
    subject = options.subject(model, guidance, device, compiled=compiled)
    chosen = named("solver", solver, SOLVERS)
    if calibration:
        subject, loaded = options.with_calibrations(subject, calibration, guidance)
        chosen, nfe, method = loaded[-1].solver, loaded[-1].nfe, "calibrated"
    planned = plan(subject, method, chosen, nfe)
    begun = time.perf_counter()
    with progress() as bar:
        task = bar.add_task(f"{model}, {method}, {nfe} evaluations", total=None)
        done = generate(
            subject,
            chosen,
            planned,
            seeds,
            out,
            shard_size=shard,
            batch=batch,
            begin=lambda images: bar.update(task, total=images),
            advance=lambda images: bar.advance(task, images),
            note=note,
        )
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
        facts = {"model": model, "solver": repr(chosen), "nfe": nfe, "method": method, "guidance": guidance}
        print_json({**facts, "out": str(out), "new": new, "kept": kept, "seconds": seconds})
        return
    there = f", {kept} were there" if kept else ""
    results.print(f"[bold]{out}[/]: {new} new images in {seconds:.1f} s{there}", soft_wrap=True)
