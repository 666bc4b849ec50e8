"""`steindiff sample`."""

from __future__ import annotations

import io
import json as jsons
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from torch import Tensor

from steindiff.cli import options
from steindiff.cli.output import note, print_json, progress, results
from steindiff.compare import METHODS, Plan, Subject, sample_parts
from steindiff.discovery import named
from steindiff.files import folder, write_bytes, write_text
from steindiff.report.picture import png, to_bytes
from steindiff.solvers import SOLVERS
from steindiff.solvers.base import Solver

EXAMPLES = (
    "steindiff sample --num 64 --out samples",
    "steindiff sample --nfe 8 --solver dpmpp-3m --method edm --num 64 --out samples.npz",
    "steindiff sample --calibration my.json --num 1000 --seed 5000 --device cuda --batch 250 --out more",
)

RECORD = "sampling.json"
"""The file beside the images that says how they were made."""


class Images:
    """A folder with one PNG for each seed, and a record of how they were made."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = folder(path)
        record = path / RECORD
        if record.exists():
            check_same(record, jsons.loads(record.read_text(encoding="utf-8")), facts)
        else:
            write_text(record, jsons.dumps(dict(facts), indent=1) + "\n")

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The seeds that have no image yet."""
        return [seed for seed in seeds if not self._file(seed).exists()]

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Write the images of some seeds."""
        for seed, image in zip(seeds, images, strict=True):
            write_bytes(self._file(seed), png(image))

    def close(self) -> None:
        """Nothing is left to do."""

    def _file(self, seed: int) -> Path:
        return self.path / f"{seed:06d}.png"


class Archive:
    """One `.npz` file: `images`, bytes `(N, H, W, C)`, their `seeds`, and `settings` as JSON."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self.path = path
        self.facts = dict(facts)
        self.images: dict[int, np.ndarray] = {}
        folder(path.parent)
        if path.exists():
            try:
                with np.load(path) as old:
                    known = jsons.loads(str(old["settings"]))
                    self.images = dict(zip(old["seeds"].tolist(), old["images"], strict=True))
            except (ValueError, KeyError, OSError, EOFError) as error:
                raise ValueError(f"{path}: not an archive of samples ({error})") from None
            check_same(path, known, facts)
        self.known = len(self.images)

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The seeds that have no image yet."""
        return [seed for seed in seeds if seed not in self.images]

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Keep the images of some seeds until the archive is written."""
        self.images.update(zip(seeds, to_bytes(images), strict=True))

    def close(self) -> None:
        """Write the archive with all there is, whole."""
        if len(self.images) == self.known:
            return
        order = sorted(self.images)
        buffer = io.BytesIO()
        stacked = np.stack([self.images[seed] for seed in order])
        np.savez_compressed(buffer, images=stacked, seeds=np.array(order), settings=np.array(jsons.dumps(self.facts)))
        write_bytes(self.path, buffer.getvalue())


def check_same(path: Path, known: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to mix samples made differently.

    Raises:
        ValueError: naming what differs.
    """
    differing = [
        f"{name} {known.get(name)!r}, not {value!r}" for name, value in wanted.items() if known.get(name) != value
    ]
    if differing:
        raise ValueError(f"out: {path} holds samples made with {'; '.join(differing)}: choose another --out")


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
    out: Annotated[Path, typer.Option(help="Folder for one PNG per seed, or a .npz file for all.")],
    model: options.Model = "cifar10",
    solver: options.Solver = "dpmpp-2m",
    nfe: options.Nfe = 5,
    method: options.Method = "calibrated",
    calibration: options.Calibrations = None,
    num: options.Num = 16,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    guidance: options.Guidance = 1.0,
    batch: options.Batch = 16,
    json: options.Json = False,
) -> None:
    """Sample images, one file per seed or one .npz for all; run it again to go on where it stopped.

    With `--calibration` solver and number of evaluations are the file's own.
    """
    seeds = options.seeds(num, seed)
    subject = options.subject(model, guidance, device)
    chosen = named("solver", solver, SOLVERS)
    if calibration:
        subject, loaded = options.with_calibrations(subject, calibration, guidance)
        chosen, nfe, method = loaded[-1].solver, loaded[-1].nfe, "calibrated"
    planned = plan(subject, method, chosen, nfe)
    facts = {"model": model, "solver": repr(chosen), "nfe": nfe, "method": method, "guidance": guidance}
    store = (Archive if out.suffix == ".npz" else Images)(out, facts)
    missing = store.missing(seeds)
    seconds = 0.0
    with progress() as bar:
        task = bar.add_task(f"{model}, {method}, {nfe} evaluations", total=planned.effort * len(missing))
        try:
            for part in sample_parts(
                subject, chosen, planned, missing, batch, advance=lambda amount: bar.advance(task, amount), note=note
            ):
                store.add(part.seeds, part.images)
                seconds += part.seconds
        finally:
            store.close()
    if json:
        print_json(
            {**facts, "out": str(out), "new": len(missing), "kept": len(seeds) - len(missing), "seconds": seconds}
        )
        return
    kept = f", {len(seeds) - len(missing)} were there" if len(missing) < len(seeds) else ""
    results.print(f"[bold]{out}[/]: {len(missing)} new images in {seconds:.1f} s{kept}", soft_wrap=True)
