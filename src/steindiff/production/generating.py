"""Making a set of images, or what is left to make of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from steindiff._distributed import local_only, rank
from steindiff._files import folder as writable
from steindiff._progress import Listener
from steindiff._serialization import checksum
from steindiff._version import __version__
from steindiff.images import to_uint8
from steindiff.model import Model
from steindiff.production.manifest import THREADS, Manifest, machine, setting, threads
from steindiff.production.shards import Shard, examine, write
from steindiff.sampler import Sampler


class GenerateResult(NamedTuple):
    """What this process did: how many of its images it made, and how many were there already."""

    made: int
    kept: int


def recipe(model: Model, sampler: Sampler) -> dict[str, Any]:
    """How images are made, as JSON."""
    levels = sampler.levels_for(model.schedule)
    return {
        "model": model.name,
        "conditions": setting(dict(model.conditions)),
        "solver": setting(sampler.solver),
        "nfe": sampler.nfe,
        "levels": setting(levels.levels),
        "schedule": {"kind": type(model.schedule).__name__, "sha256": checksum(setting(model.schedule))},
        "correction": setting(sampler.correction),
        **machine(torch.device(model.device)),
        "steindiff": __version__,
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True)
class Shards:
    """How a set is cut.

    Args:
        size: images in a file.
        batch: images sampled together, within a shard; part of the settings, since images depend on it by rounding.
        labels: the label of a seed, to be kept beside the images; default none.
        facts: what else must be equal in every run, by name, such as whether the network is compiled.
    """

    size: int = 500
    batch: int = 100
    labels: Callable[[int], int] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def digest(labels: Tensor) -> str:
    """SHA-256 of labels."""
    return hashlib.sha256(labels.numpy().tobytes()).hexdigest()


def generate(
    model: Model,
    sampler: Sampler,
    seeds: range,
    folder: str | Path,
    *,
    shards: Shards | None = None,
    listener: Listener | None = None,
) -> GenerateResult:
    """Write one image for each seed to a folder, in shards; called again, also for more seeds, go on where it stopped.

    A shard is there whole, with its SHA-256 beside it, or not at all. Batches are cut at the same places in every run,
    so a set finished after any number of kills is equal to the bit to one made in one go, on the same kind of device.
    On a CPU it is finished with the number of threads it was begun with.

    With `torch.distributed` set up, rank k of n makes shards k, k + n, …; the processes share nothing but the folder,
    do not wait for each other, and no two write the same shard. Their number may change from run to run.

    Args:
        model: what to sample from.
        sampler: how.
        seeds: consecutive numbers, one image each.
        folder: for this set alone; `Images` reads it.
        shards: how the set is cut.
        listener: told what happens.

    Raises:
        ValueError: if an argument is out of range, the sampler was calibrated for another model, or the folder holds
            images made with other settings; the message names them.
        OSError: if the folder cannot be written to or the disk is full; it names the file.
        RuntimeError: if the network or a state became NaN or infinite, naming seeds and step. Nothing is written of
            that shard.
        MemoryError: if a batch does not fit: it is not made smaller, since the images would change.
    """
    shards, told = shards or Shards(), listener or Listener()
    shard_size, batch, labels = shards.size, shards.batch, shards.labels
    folder = Path(folder)
    numbers = None if labels is None else torch.tensor([labels(seed) for seed in seeds], dtype=torch.int64)
    manifest = Manifest(
        shape=cast(Any, model.shape),
        seeds=seeds,
        shard_size=shard_size,
        batch=batch,
        labels=None if numbers is None else digest(numbers),
        recipe={**recipe(model, sampler), **shards.facts},
        fingerprint=model.fingerprint,
    )
    writable(folder)
    known = manifest.check(folder)
    if known is not None:
        if numbers is not None and known.labels != digest(numbers[: len(known.seeds)]):
            raise ValueError(f"folder = {folder}: holds images with other labels; choose another folder")
        if manifest.recipe[THREADS] != known.recipe[THREADS]:
            told.note(f"threads: the set was begun with {known.recipe[THREADS]}, so it is finished with as many")
        manifest = replace(manifest, recipe=known.recipe)
    place, world = rank()
    condition = examine(folder, manifest, range(place, manifest.shards, world))
    for k, text in condition.damaged.items():
        if known is None or known.part(k) == manifest.part(k):  # else it was the last, and is to be filled
            told.note(f"{text}; made again")
    todo = sorted([*condition.missing, *condition.damaged])
    made = sum(len(manifest.part(k)) for k in todo)
    told.begin(made)
    for k in todo:
        images = []
        with local_only(), threads(manifest.recipe):  # the other processes are at other seeds
            try:
                for part in sampler.batches(model, manifest.part(k), batch, shrink=False):
                    images.append(to_uint8(part.result.x).cpu())
                    told.advance(len(part.seeds))
            except (RuntimeError, MemoryError) as error:
                done = sum(map(len, images))
                here = manifest.part(k)[done : done + batch]
                raise type(error)(f"shard {k}, seeds {here[0]} to {here[-1]}: {error}") from error
        first, last = k * shard_size, (k + 1) * shard_size
        # Only now, so that a run that never gets this far leaves the folder free for other settings.
        manifest.enter(folder)
        ids = torch.arange(manifest.part(k).start, manifest.part(k).stop)
        write(folder, manifest, k, Shard(torch.cat(images), ids, None if numbers is None else numbers[first:last]))
    return GenerateResult(made, sum(len(manifest.part(k)) for k in condition.sound))
