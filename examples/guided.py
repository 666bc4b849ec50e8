"""Labels and classifier-free guidance on a flow-matching network. Needs scikit-learn.

    python examples/guided.py            # minutes on two CPU cores
    python examples/guided.py --tiny     # seconds

Trains on 8×8 digits with labels that are dropped one time in ten, guides with scale 2, calibrates five evaluations and
writes `guided/report.html` with the label as each picture's caption.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steindiff as sd
from steindiff.report import of_samplers, write

NONE = 10
"""The label that says there is none."""


class Network(nn.Module):
    """Velocity ε − x* of a rectified flow, given x, t in [0, 1] and a label."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(NONE + 1, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Evaluate on `(B, 1, 8, 8)` states, `(B,)` times and `(B,)` labels."""
        h = self.first(x) + (self.time(t[:, None]) + self.label(labels))[:, :, None, None]
        for layer in self.layers:
            h = h + layer(nn.functional.silu(h))
        return self.last(nn.functional.silu(h))


def train(data: Tensor, labels: Tensor, steps: int) -> Network:
    """The flow-matching loss, labels dropped one time in ten."""
    torch.manual_seed(0)
    network = Network()
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        pick = torch.randint(len(data), (128,))
        clean, noise, t = data[pick], torch.randn(len(pick), 1, 8, 8), torch.rand(len(pick))
        known = torch.where(torch.rand(len(pick)) < 0.1, NONE, labels[pick])
        s = t.reshape(-1, 1, 1, 1)
        loss = (network((1 - s) * clean + s * noise, t, known) - (noise - clean)).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network.eval().requires_grad_(False)


def label(seed: int) -> int:
    """The label of a seed: a seed shows the same digit in every batch."""
    return seed % 10


def guided(network: Network, scale: float, seeds: Sequence[int]) -> sd.Denoiser:
    """The guided denoiser of a batch with these seeds."""
    wanted = torch.tensor([label(seed) for seed in seeds])
    none = torch.full_like(wanted, NONE)
    conditional, unconditional = (sd.FlowVelocity(partial(network, labels=each)) for each in (wanted, none))
    return sd.Guided(conditional, unconditional, scale)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, calibrate under guidance, report; returns each method's PSNR to the many-step images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="train and search for seconds only")
    tiny = parser.parse_args(argv).tiny

    digits = load_digits()
    data = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    network = train(data, torch.tensor(digits.target), steps=60 if tiny else 1500)
    model = sd.Model(partial(guided, network, 2.0), sd.Flow(), shape=(1, 8, 8), name="guided digits", condition=label)

    recipe = sd.Recipe(seeds=range(1000, 1040), search=None) if tiny else sd.Recipe(seeds=range(1000, 1100))
    samplers = {
        "plain": sd.Sampler("dpmpp-2m", grid="uniform", nfe=5),
        "calibrated": sd.calibrate(model, nfe=5, recipe=recipe, batch=100).sampler(),
        "many steps": sd.Sampler("dpmpp-2m", grid="uniform", nfe=60),
    }
    seeds = range(40)
    captions = [f"digit {label(seed)}" for seed in seeds]
    report = of_samplers(model, samplers, seeds, captions=captions, reference="many steps")
    for entry in report.entries[:-1]:
        print(f"{entry.title:12} {entry.nfe} evaluations, PSNR to 60: {entry.numbers['psnr']:.1f} dB")
    out = Path("guided")
    out.mkdir(exist_ok=True)
    print(write(report, out)[0])
    return {entry.title: entry.numbers["psnr"] for entry in report.entries[:-1]}


if __name__ == "__main__":
    main()
