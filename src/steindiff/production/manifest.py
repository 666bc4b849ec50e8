"""What a set of images is: its recipe and how it is cut, in one readable file written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steindiff._files import write_text
from steindiff._serialization import checksum, verified, with_checksum
from steindiff.production.settings import differences

FORMAT = 1
"""Version of the files; a set of another version is refused."""

MANIFEST = "manifest.json"
"""The file's name in the folder of the set."""

FIELDS = {"format", "shape", "seeds", "shard_size", "batch", "labels", "recipe", "fingerprint"}
"""What the file must hold, beside its checksum."""

MOST_SHARDS = 100_000
"""Shards are numbered with five digits."""

SAME_MODEL = 1e-4
"""Relative difference up to which fingerprints are the same model's, on the same kind of device."""


@dataclass(frozen=True)
class Manifest:
    """A set of images: seed by seed in shards, shard by shard in batches, always cut at the same places.

    Attributes:
        shape: of one image, `(C, H, W)`.
        seeds: one image each, consecutive numbers >= 0.
        shard_size: images in a file; the last may hold fewer.
        batch: images sampled together within a shard; the last batch of a shard may be smaller.
        labels: SHA-256 of the labels of all seeds, None where they have none.
        recipe: how the images are made, by name, as JSON.
        fingerprint: of the model; compared up to rounding.
    """

    shape: tuple[int, int, int]
    seeds: range
    shard_size: int
    batch: int
    labels: str | None
    recipe: Mapping[str, Any]
    fingerprint: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ValueError(f"shape = {self.shape}: need (channels, height, width), all >= 1")
        if not isinstance(self.seeds, range) or self.seeds.step != 1 or not len(self.seeds) or self.seeds.start < 0:
            raise ValueError(f"seeds = {self.seeds}: allowed are non-empty ranges of consecutive numbers >= 0")
        if self.seeds.stop > 2**63:
            raise ValueError(f"seeds = {self.seeds}: allowed are numbers below 2**63")
        for name, value in (("shard_size", self.shard_size), ("batch", self.batch)):
            if value < 1:
                raise ValueError(f"{name} = {value}: allowed are whole numbers >= 1")
        if self.shards > MOST_SHARDS:
            raise ValueError(
                f"shard_size = {self.shard_size}: makes {self.shards} shards of {len(self.seeds)} images, "
                f"allowed are at most {MOST_SHARDS}"
            )

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-len(self.seeds) // self.shard_size)

    def part(self, k: int) -> range:
        """The seeds of shard k."""
        return self.seeds[k * self.shard_size : (k + 1) * self.shard_size]

    def parts(self, k: int) -> list[range]:
        """The seeds of shard k by batches."""
        seeds = self.part(k)
        return [seeds[i : i + self.batch] for i in range(0, len(seeds), self.batch)]

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
        """SHA-256 of the settings; every shard carries it."""
        return checksum(self.settings())

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, checksum included."""
        content = {**self.settings(), "fingerprint": list(self.fingerprint)}
        return with_checksum(content)

    @classmethod
    def from_dict(cls, content: Any) -> Manifest:
        """Rebuild from a file's content, checking everything.

        Raises:
            ValueError: if anything is missing, altered or of another version.
        """
        body = verified("manifest", content, FORMAT)
        if set(body) != FIELDS:
            raise ValueError(f"fields: {', '.join(sorted(body))}, need {', '.join(sorted(FIELDS))}")
        seeds, labels, recipe = body["seeds"], body["labels"], body["recipe"]
        if not isinstance(seeds, dict) or set(seeds) != {"first", "count"}:
            raise ValueError(f"seeds = {seeds!r}: need 'first' and 'count'")
        if not isinstance(body["shape"], list):
            raise ValueError(f"shape = {body['shape']!r}: need a list")
        numbers = [*body["shape"], seeds["first"], seeds["count"], body["shard_size"], body["batch"]]
        if any(type(number) is not int or abs(number) >= 2**63 for number in numbers):
            raise ValueError("shape, seeds, shard_size, batch: need whole numbers below 2**63")
        if not isinstance(labels, str | None) or not isinstance(recipe, dict):
            raise ValueError("labels, recipe: need a checksum or null, and an object")
        fingerprint = body["fingerprint"]
        if not isinstance(fingerprint, list) or not all(isinstance(value, float) for value in fingerprint):
            raise ValueError(f"fingerprint = {fingerprint!r}: need a list of numbers")
        return cls(
            shape=tuple(body["shape"]),
            seeds=range(seeds["first"], seeds["first"] + seeds["count"]),
            shard_size=body["shard_size"],
            batch=body["batch"],
            labels=labels,
            recipe=recipe,
            fingerprint=tuple(fingerprint),
        )

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a folder.

        Raises:
            OSError: if there is none or it cannot be read.
            ValueError: if it is not a sound manifest of this format; the message names the file.
        """
        path = folder / MANIFEST
        data = path.read_bytes()
        try:
            return cls.from_dict(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}: {error}; where the settings are known, remove this file and produce again: sound shards stay"
            ) from None

    def enter(self, folder: Path) -> None:
        """Write the manifest where there is none yet, else make sure that it is the same.

        Raises:
            OSError: if it cannot be written.
            ValueError: if the folder holds another set; the message names what differs.
        """
        if self.check(folder) is None:
            text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
            write_text(folder / MANIFEST, text + "\n")

    def check(self, folder: Path) -> Manifest | None:
        """The manifest of the folder, equal to this one; None if it holds none.

        Raises:
            ValueError: if the folder holds another set; the message names what differs.
        """
        try:
            known = Manifest.load(folder)
        except FileNotFoundError:
            return None
        differing = list(differences(known.settings(), self.settings()))
        if not same_model(known.fingerprint, self.fingerprint):
            differing.append("fingerprint: the model's weights or conditions differ")
        if differing:
            raise ValueError(
                f"folder = {folder}: holds images made with other settings ({'; '.join(differing)}); choose another "
                "folder, or remove this one"
            )
        return known


def same_model(known: Sequence[float], found: Sequence[float]) -> bool:
    """Whether two fingerprints are equal up to the rounding of a device that sums in varying order."""
    if len(known) != len(found):
        return False
    a, b = torch.tensor(known, dtype=torch.float64), torch.tensor(found, dtype=torch.float64)
    return bool((a - b).norm() <= SAME_MODEL * a.norm())
