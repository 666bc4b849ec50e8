"""Stein's identity on the embedded CIFAR-10 network, level by level.

    python benchmarks/stein_identity.py --images 48 --batch 16

For x = x* + σ ε and a denoiser D(x) = E[x* | x], Stein's identity gives E‖x − D‖² = σ² (d − E div D). The script
noises real test images, estimates div D by Rademacher probes vᵀ(Jᵀv) (one VJP each) and writes the ratio of the two
sides, with its standard error over images, to `--out` (JSON) and a plot beside it (PNG). Where the network is the
conditional mean, the ratio is 1.

References:
    | A Stochastic Estimator of the Trace of the Influence Matrix for Laplacian Smoothing Splines (Hutchinson, 1989)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

import training_data
from recording import machine
from steindiff import zoo
from steindiff._files import atomic, write_json


def sides(net: zoo.EDMPrecond, x: Tensor, sigma: float, labels: Tensor, vs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """‖x − D‖² and σ² (d − div D) of each sample: x (B, C, H, W) → two of (B,)."""
    x = x.detach().requires_grad_()
    denoised = net(x, torch.full((len(x),), sigma, device=x.device), labels)
    pulled = [torch.autograd.grad(denoised, x, v, retain_graph=True)[0] for v in vs]
    divergence = torch.stack([(v * jv).flatten(1).sum(dim=1) for v, jv in zip(vs, pulled, strict=True)]).mean(dim=0)
    residual = (x - denoised).detach().double().flatten(1).square().sum(dim=1)
    return residual, sigma**2 * (x[0].numel() - divergence.double())


def ratio(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Σ left / Σ right and its standard error over samples, by the delta method."""
    value = left.sum() / right.sum()
    error = (left - value * right).std() / right.mean() / math.sqrt(len(left))
    return float(value), float(error)


def plot(path: Path, records: list[dict[str, Any]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    axes.axhspan(0.97, 1.03, color="tab:green", alpha=0.15, label="within 3 %")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.errorbar(
        [r["sigma"] for r in records],
        [r["ratio"] for r in records],
        yerr=[r["standard_error"] for r in records],
        fmt="o-",
        markersize=3.5,
        capsize=2,
    )
    axes.set(xscale="log", xlabel="σ", ylabel="E‖x − D‖² / σ²(d − E div D)", title="Stein's identity, CIFAR-10 network")
    axes.legend()
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=160, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stein_identity.json"))
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--probes", type=int, default=1)
    parser.add_argument("--levels", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="other weights of the same network")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    net = zoo.load("cifar10", args.device, path=args.weights)
    data = training_data.load("cifar10", "test")
    clean = (data.images[: args.images].float() / 127.5 - 1).to(args.device)
    labels = data.labels[: args.images].to(args.device)
    generator = torch.Generator().manual_seed(args.seed)
    records: list[dict[str, Any]] = []
    for sigma in torch.logspace(math.log10(0.01), math.log10(80), args.levels, dtype=torch.float64).tolist():
        begun = time.monotonic()
        parts = []
        for x, y in zip(clean.split(args.batch), labels.split(args.batch), strict=True):
            noise = torch.randn(x.shape, generator=generator).to(x)
            vs = [torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1 for _ in range(args.probes)]
            parts.append(sides(net, x + sigma * noise, sigma, y, vs))
        left, right = (torch.cat(side) for side in zip(*parts, strict=True))
        value, error = ratio(left, right)
        records.append(
            {
                "model": "cifar10",
                "sigma": sigma,
                "ratio": value,
                "standard_error": error,
                "samples": args.images,
                "probes": args.probes,
                "seed": args.seed,
                "seconds": round(time.monotonic() - begun, 1),
                **machine(args.device),
            }
        )
        print(json.dumps({k: records[-1][k] for k in ("sigma", "ratio", "standard_error", "seconds")}), flush=True)
    write_json(args.out, records)
    plot(args.out.with_suffix(".png"), records)


if __name__ == "__main__":
    main()
