"""One-dimensional signals: nothing in SteinDiff asks for pictures.

    python examples/signals_1d.py            # a minute on two CPU cores
    python examples/signals_1d.py --tiny     # seconds

The data are bursts: a tone of random pitch under a bump at a random place, on a faint hiss. The denoiser is exact (a
mixture of 400 of them), so nothing is trained; a network of yours goes in its place, wrapped in what it predicts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

import steindiff as sd


def bursts(num: int, length: int = 64) -> Tensor:
    """Signals `(num, 1, length)` in [−1, 1]."""
    generator = torch.Generator().manual_seed(0)
    place, pitch, phase = torch.rand(3, num, 1, 1, generator=generator)
    t = torch.linspace(0, 1, length)
    bump = torch.exp(-0.5 * ((t - 0.2 - 0.6 * place) / 0.1) ** 2)
    return bump * torch.sin(2 * math.pi * ((4 + 8 * pitch) * t + phase))


def exact(data: Tensor, hiss: float, x: Tensor, sigma: Tensor) -> Tensor:
    """E[x* | x] for signals of variance `hiss` about those of `data`, both `(…, 1, length)`, at noise levels `(B,)`."""
    total = hiss + sigma[:, None] ** 2
    weights = (-0.5 * torch.cdist(x.flatten(1), data.flatten(1)) ** 2 / total).softmax(1)
    share = (hiss / total)[:, :, None]
    return share * x + (1 - share) * torch.einsum("bk,kcl->bcl", weights, data)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Calibrate and compare; returns each sampler's distance to the many-step signals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="search for seconds only")
    tiny = parser.parse_args(argv).tiny

    data = bursts(400)
    model = sd.Model(sd.EDMDenoiser(partial(exact, data, 0.05)), sd.EDM(t_max=20.0), shape=(1, 64), name="bursts")

    recipe = sd.Recipe(seeds=range(1000, 1064), search=None) if tiny else sd.Recipe(seeds=range(1000, 1128))
    samplers = {
        "plain, EDM grid": sd.Sampler("ddim", grid="edm", nfe=6),
        "plain, log-SNR grid": sd.Sampler("ddim", grid="logsnr", nfe=6),
        "calibrated": sd.calibrate(model, 6, "ddim", recipe=recipe, batch=128).sampler(),
    }
    seeds = range(200)
    many = sd.Sampler("dpmpp-2m", grid="edm", nfe=100)(model, seeds).x
    errors = {name: float((s(model, seeds).x - many).square().mean().sqrt()) for name, s in samplers.items()}
    for name, error in errors.items():
        print(f"{name:20} 6 evaluations, distance to 100: {error:.4f}")
    return errors


if __name__ == "__main__":
    main()
