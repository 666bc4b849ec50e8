"""What a set of images is: its recipe and how it is cut, in one readable file."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from steindiff._checks import LARGEST_INT, Within, at_least, shown
from steindiff._environment import device_name
from steindiff._files import write_json
from steindiff._serialization import checksum, decode, read_json, record, verified, with_checksum
from steindiff.corrections.replay import Replay
from steindiff.model import fingerprint_gap
from steindiff.seeding import check_seeds

THREADS = "threads"
"""The field of a recipe that says how many CPU threads computed the images; None on a GPU."""


def machine(device: torch.device) -> dict[str, Any]:
    """What the last bits of an image depend on: the kind of device; of a CPU, its instructions and the threads."""
    cpu = device.type == "cpu"
    return {
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability() if cpu else None,
        THREADS: torch.get_num_threads() if cpu else None,
    }


@contextmanager
def threads(recipe: Mapping[str, Any]) -> Iterator[None]:
    """Inside, as many CPU threads compute as the recipe says: a set is finished with those it was begun with."""
    own, wanted = torch.get_num_threads(), recipe.get(THREADS)
    if not isinstance(wanted, int) or not 1 <= wanted <= MOST_THREADS or wanted == own:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(own)


MOST_THREADS = 1024
"""More threads than this are not taken from a file."""


def setting(value: Any) -> Any:
    """A setting as JSON: equal for equal settings in any process, different for different ones.

    Dataclasses become `{"kind": …, field: …}`, functions their names, tensors and replayed weights their checksums.
    """
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, tuple | list):
        return [setting(item) for item in value]
    if isinstance(value, dict):
        return {name: setting(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        digest = hashlib.sha256(value.detach().cpu().contiguous().flatten().numpy().tobytes()).hexdigest()
        return {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": digest}
    if isinstance(value, Replay):  # its weights are many numbers: their checksum says as much
        weights = checksum({"steps": setting(value.steps)})
        return {"kind": "Replay", "basis": setting(value.basis), "weights": weights}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: setting(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"kind": type(value).__name__, **fields}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if getattr(value, "__dict__", None) == {}:  # nothing but its class
        return {"kind": type(value).__name__}
    raise ValueError(
        f"{type(value).__name__}: cannot be recorded, so a later run could not tell whether it is the same; use "
        "numbers, text, sequences, tensors, functions or dataclasses"
    )


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two settings, by name: `solver.nominal_order: 2, not 3`."""
    for name in dict.fromkeys([*known, *wanted]):
        old, new = known.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {shown(old)}, not {shown(new)}"


FORMAT = 3
"""Version of the files; a set of another version is refused."""

MANIFEST = "manifest.json"
"""The file's name in the folder of the set."""

MOST_SHARDS = 100_000
"""Shards are numbered with five digits."""

SAME_MODEL = 1e-4
"""Relative difference up to which fingerprints are the same model's, on the same kind of device."""


Count = Annotated[int, Within(1)]


@dataclass(frozen=True)
class _Seeds:
    first: Annotated[int, Within(0)]
    count: Count


@dataclass(frozen=True)
class Manifest:
    """A set of images: seed by seed in shards, shard by shard in batches, always cut at the same places.

    The annotations are the file's schema.

    Attributes:
        shape: of one image, `(C, H, W)`.
        seeds: one image each, consecutive numbers >= 0.
        shard_size: images in a file; the last may hold fewer.
        batch: images sampled together within a shard; the last batch of a shard may be smaller.
        labels: SHA-256 of the labels of all seeds, None where they have none.
        recipe: how the images are made, by name, as JSON.
        fingerprint: of the model; compared up to rounding.
    """

    shape: tuple[Count, Count, Count]
    seeds: range
    shard_size: Count
    batch: Count
    labels: str | None
    recipe: Mapping[str, Any]
    fingerprint: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape must be (channels, height, width), all >= 1, got {self.shape}")
        if not isinstance(self.seeds, range) or self.seeds.step != 1:
            raise ValueError(f"seeds must be a range of consecutive numbers, got {self.seeds}")
        check_seeds(self.seeds)
        at_least("shard_size", self.shard_size, 1)
        at_least("batch", self.batch, 1)
        if self.shards > MOST_SHARDS:
            least = -(-len(self.seeds) // MOST_SHARDS)
            raise ValueError(f"shard_size must be >= {least} for {len(self.seeds)} images, got {self.shard_size}")

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.seeds) // self.shard_size)

    def part(self, k: int) -> range:
        """The seeds of shard k."""
        return self.seeds[k * self.shard_size : (k + 1) * self.shard_size]

    def settings(self) -> dict[str, Any]:
        """What must be equal in every run: the file without fingerprint and checksum."""
        return {
            "format": FORMAT,
            "shape": list(self.shape),
            "seeds": {"first": self.seeds.start, "count": len(self.seeds)},
            "shard_size": self.shard_size,
            "batch": self.batch,
            "labels": self.labels,
            "recipe": dict(self.recipe),
        }

    @property
    def identity(self) -> str:
        """SHA-256 of what decides a shard's images, the number of shards apart; every shard carries it."""
        return checksum({**self.settings(), "seeds": self.seeds.start, "labels": self.labels is not None})

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        return with_checksum({**self.settings(), "fingerprint": list(self.fingerprint)})

    @classmethod
    def from_dict(cls, content: Any) -> Manifest:
        """Rebuild from a file's content, checking everything."""
        body = verified("manifest", content, FORMAT)
        del body["format"]
        seeds: _Seeds = decode("manifest.seeds", body.pop("seeds", None), _Seeds)
        Within(0, LARGEST_INT - seeds.count)("manifest.seeds.first", seeds.first)
        return record("manifest", body, cls, seeds=range(seeds.first, seeds.first + seeds.count))

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a folder."""
        path = folder / MANIFEST
        try:
            return cls.from_dict(read_json(path))
        except ValueError as error:
            raise ValueError(
                f"{path}: {error}; where the settings are known, remove this file and produce again: sound shards stay"
            ) from None

    def enter(self, folder: Path) -> None:
        """Write the manifest where there is none yet or this one goes on, else make sure that it is the same."""
        known = self.check(folder)
        if known is None or known.seeds != self.seeds:
            write_json(folder / MANIFEST, self.to_dict())

    def check(self, folder: Path) -> Manifest | None:
        """The manifest of the folder, equal to this one but for threads, or its beginning; None if it holds none."""
        try:
            known = Manifest.load(folder)
        except FileNotFoundError:
            return None
        wanted = {**self.settings(), "recipe": {**self.recipe, THREADS: known.recipe.get(THREADS)}}
        if known.seeds.start == self.seeds.start and len(known.seeds) < len(self.seeds):
            wanted |= {"seeds": known.settings()["seeds"], "labels": self.labels and known.labels}
        differing = list(differences(known.settings(), wanted))
        if fingerprint_gap(self.fingerprint, known.fingerprint) > SAME_MODEL:
            differing.append("fingerprint: the model's weights or conditions differ")
        if differing:
            raise ValueError(
                f"folder = {folder}: holds images made with other settings ({'; '.join(differing)}); choose another "
                "folder, or remove this one"
            )
        return known
