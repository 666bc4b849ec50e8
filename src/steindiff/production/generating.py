"""Making a set of images, or what is left to make of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from steindiff import __version__
from steindiff._distributed import local_only, rank
from steindiff._files import folder as writable
from steindiff._serialization import checksum
from steindiff.calibration import fingerprint
from steindiff.comparison import Plan, Subject, out_of_memory
from steindiff.loop import sample
from steindiff.pixels import to_uint8
from steindiff.production.manifest import Manifest
from steindiff.production.settings import THREADS, machine, setting, threads
from steindiff.production.shards import Shard, examine, write
from steindiff.seeding import noise
from steindiff.solvers.base import Solver

A = TypeVar("A")
B = TypeVar("B")


class GenerateResult(NamedTuple):
    """What this process did: how many of its images it made, and how many were there already."""

    made: int
    kept: int


def recipe(subject: Subject, solver: Solver, plan: Plan) -> dict[str, Any]:
    """How images are made, as JSON.

    Raises:
        ValueError: if a part of it cannot be recorded.
    """
    schedule = plan.levels.schedule
    return {
        "model": subject.name,
        "solver": setting(solver),
        "nfe": solver.calls(plan.levels),
        "levels": setting(plan.levels.levels),
        "schedule": {"kind": type(schedule).__name__, "sha256": checksum(setting(schedule))},
        "correction": setting(plan.correction),
        "compiled": subject.compiled,
        **machine(subject.device),
        "steindiff": __version__,
        "torch": str(torch.__version__),
    }


def generate(
    subject: Subject,
    solver: Solver,
    plan: Plan,
    seeds: range,
    folder: str | Path,
    *,
    shard_size: int = 500,
    batch: int = 100,
    labels: Callable[[int], int] | None = None,
    begin: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda amount: None,
    note: Callable[[str], None] = lambda text: None,
) -> GenerateResult:
    """Write one image for each seed to a folder, in shards; called again, go on where it stopped.

    A shard is there whole, with its SHA-256 beside it, or not at all. Batches are cut at the same places in every run,
    so a set finished after any number of kills is equal to the bit to one made in one go, on the same kind of device.
    On a CPU it is finished with the number of threads it was begun with.

    With `torch.distributed` set up, rank k of n makes shards k, k + n, …; the processes share nothing but the folder,
    do not wait for each other, and no two write the same shard. Their number may change from run to run.

    Args:
        subject: the model.
        solver: the solver.
        plan: levels and correction.
        seeds: consecutive numbers, one image each.
        folder: for this set alone; `Images` reads it.
        shard_size: images in a file.
        batch: images sampled together, within a shard.
        labels: the label of a seed, to be kept beside the images; default none.
        begin: told how many images this process has to make.
        advance: told how many of them were sampled.
        note: told about damaged shards, which are made again, and about another number of threads.

    Raises:
        ValueError: if an argument is out of range, or the folder holds images made with other settings; the message
            names them.
        OSError: if the folder cannot be written to or the disk is full; it names the file.
        RuntimeError: if the network or a state became NaN or infinite, naming seeds and step. Nothing is written of
            that shard.
        MemoryError: if a batch does not fit: it is not made smaller, since the images would change.
    """
    folder = Path(folder)
    numbers = None if labels is None else torch.tensor([labels(seed) for seed in seeds], dtype=torch.int64)
    manifest = Manifest(
        shape=subject.shape,
        seeds=seeds,
        shard_size=shard_size,
        batch=batch,
        labels=None if numbers is None else hashlib.sha256(numbers.numpy().tobytes()).hexdigest(),
        recipe=recipe(subject, solver, plan),
        fingerprint=fingerprint(subject.denoisers([0]), subject.shape, plan.levels.schedule, subject.device),
    )
    writable(folder)
    own, manifest = manifest, manifest.check(folder) or manifest
    if own.recipe[THREADS] != manifest.recipe[THREADS]:
        note(f"threads: the set was begun with {manifest.recipe[THREADS]}, so it is finished with as many")
    place, world = rank()
    condition = examine(folder, manifest, range(place, manifest.shards, world))
    for text in condition.damaged.values():
        note(f"{text}; made again")
    todo = sorted([*condition.missing, *condition.damaged])
    made = sum(len(manifest.part(k)) for k in todo)
    begin(made)
    parts = [part for k in todo for part in manifest.parts(k)]
    states = ahead(lambda part: initial(part, subject, plan), parts)
    for k in todo:
        images = []
        for part in manifest.parts(k):
            with threads(manifest.recipe):
                images.append(make(subject, solver, plan, part, k, states))
            advance(len(part))
        first, last = k * shard_size, (k + 1) * shard_size
        # Only now, so that a run that never gets this far leaves the folder free for other settings.
        manifest.enter(folder)
        ids = torch.arange(manifest.part(k).start, manifest.part(k).stop)
        write(folder, manifest, k, Shard(torch.cat(images), ids, None if numbers is None else numbers[first:last]))
    return GenerateResult(made, sum(len(manifest.part(k)) for k in condition.sound))


def ahead(function: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """The function of every item in turn, the next one computed by a second thread while this one is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = None
        for item in items:
            here, coming = coming, thread.submit(function, item)
            if here is not None:
                yield here.result()
        if coming is not None:
            yield coming.result()


def initial(seeds: range, subject: Subject, plan: Plan) -> Tensor:
    """The noise a batch begins with, on the CPU; pinned where it is to go to a GPU, which then need not wait for it."""
    x = noise(seeds, subject.shape, plan.levels[0])
    return x.pin_memory() if subject.device.type == "cuda" else x


def make(subject: Subject, solver: Solver, plan: Plan, seeds: range, k: int, states: Iterator[Tensor]) -> Tensor:
    """The images of one batch of shard k from the next initial noise, uint8 `(B, C, H, W)` on the CPU.

    Raises:
        RuntimeError: if the network or a state became NaN or infinite, naming seeds and step.
        MemoryError: if the batch does not fit.
    """
    place = f"shard {k}, seeds {seeds[0]} to {seeds[-1]}"
    try:
        x = next(states).to(subject.device, non_blocking=True)
        with local_only():  # the other processes are at other seeds
            out = sample(subject.denoisers(seeds), x, plan.levels, solver, plan.correction)
        return to_uint8(out.x).cpu()
    except (RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise MemoryError(
                f"batch = {len(seeds)}: does not fit in memory ({place}); choose a smaller one"
            ) from error
        raise RuntimeError(f"{place}: {error}") from error
