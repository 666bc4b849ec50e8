"""Train the toys of `benchmarks/networks` on a CPU, in minutes.

    python benchmarks/train_toys.py signals --minutes 6
    python benchmarks/train_toys.py superresolution --minutes 15

EDM loss, Adam with warm-up and linear decay, an average over about the last tenth; half-precision weights go to `--out`
after every minute, so that an interrupted run is not lost. The log lies beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import training_data
from networks import pieces, signals, superresolution

P_MEAN, P_STD = -1.2, 1.2


def superresolution_toy() -> tuple[nn.Module, float, Callable[[int], tuple[Tensor, ...]]]:
    """Network, σ_data, and what draws a batch: images and their low-resolution pictures."""
    images = superresolution.prepared(training_data.load("fashion", "train").images)
    network = superresolution.SuperResolution()
    test = superresolution.prepared(training_data.load("fashion", "test").images[: superresolution.PICTURES])
    network.pictures.copy_(superresolution.lowered(test))

    def batch(size: int) -> tuple[Tensor, ...]:
        x = images[torch.randint(len(images), (size,))]
        return x, superresolution.lowered(x)

    return network, superresolution.SIGMA_DATA, batch


def signals_toy() -> tuple[nn.Module, float, Callable[[int], tuple[Tensor, ...]]]:
    """Network, σ_data, and what draws a batch: fresh signals."""
    generator = torch.Generator().manual_seed(1)
    return signals.Signals(), signals.SIGMA_DATA, lambda size: (signals.heartbeats(size, generator),)


TOYS = {superresolution.NAME: (superresolution_toy, 64, 2e-3), signals.NAME: (signals_toy, 256, 2e-3)}
"""Name → what makes it, batch size, learning rate."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("toy", choices=sorted(TOYS))
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "networks")
    parser.add_argument("--init", action="store_true", help="go on from the weights in --out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    make, size, lr = TOYS[args.toy]
    network, sigma_data, batch = make()
    if args.init:
        network.load_state_dict(pieces.read(pieces.found(args.out, args.toy)))
    average = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    adam = torch.optim.Adam(network.parameters(), lr=lr, betas=(0.9, 0.99))
    begun = saved = time.monotonic()
    step, summed, log = 0, 0.0, []
    while (progress := (time.monotonic() - begun) / (60 * args.minutes)) < 1:
        adam.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 100, 2 * (1 - progress))
        x, *conditions = batch(size)
        sigma = (P_MEAN + P_STD * torch.randn(size)).exp()
        around = (-1, *[1] * (x.ndim - 1))
        weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
        denoised = network(x + sigma.reshape(around) * torch.randn_like(x), sigma, *conditions)
        loss = (weight * (denoised - x).square().flatten(1).mean(1)).mean()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()
        step += 1
        summed += loss.item()
        with torch.no_grad():
            for name, tensor in network.state_dict().items():
                average[name].lerp_(tensor, max(1 / (1 + 0.1 * step), 1 / 500))
        if time.monotonic() - saved > 60:
            pieces.write(args.out, args.toy, average)
            saved = time.monotonic()
        if step % 100 == 0:
            log.append({"step": step, "minutes": round((time.monotonic() - begun) / 60, 2), "loss": summed / 100})
            print(json.dumps(log[-1]), flush=True)
            summed = 0.0
    pieces.write(args.out, args.toy, average)


if __name__ == "__main__":
    main()
