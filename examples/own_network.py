"""Your own network, from training to a calibrated sampler and a report. Needs scikit-learn for its data.

    python examples/own_network.py            # a few minutes on two CPU cores
    python examples/own_network.py --tiny     # seconds, a network that has hardly learned

Trains a small EDM network on 8×8 digits, calibrates five evaluations, compares with the plain solver and writes
`own_network/report.html`. Replace `digits`, `Network` and `train` with your data and model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steindiff as sd
from steindiff.comparison import calibrated, on_grid
from steindiff.denoisers import Preconditioned
from steindiff.report import write


def digits() -> Tensor:
    """1,797 digits, `(N, 1, 8, 8)` in [−1, 1]."""
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


class Network(nn.Module):
    """A small convolutional network F(x, c_noise)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        """Evaluate on states `(B, 1, 8, 8)` and noise conditions `(B,)`."""
        h = self.first(x) + self.embed(c_noise[:, None])[:, :, None, None]
        for layer in self.layers:
            h = h + layer(nn.functional.silu(h))
        return self.last(nn.functional.silu(h))


def train(data: Tensor, steps: int) -> Network:
    """Train by the EDM loss, whose weight makes every noise level count alike."""
    torch.manual_seed(0)
    network = Network()
    denoise = Preconditioned(network)
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        clean = data[torch.randint(len(data), (128,))]
        sigma = torch.exp(-0.8 + 1.3 * torch.randn(len(clean)))
        s = sigma.reshape(-1, 1, 1, 1)
        error = denoise(clean + s * torch.randn_like(clean), sigma) - clean
        loss = ((s**2 + 0.25) / (0.5 * s) ** 2 * error.square()).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network.eval().requires_grad_(False)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, calibrate, compare; returns each method's distance to the many-step images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="train and search for seconds only")
    tiny = parser.parse_args(argv).tiny

    network = train(digits(), steps=60 if tiny else 1000)
    model = sd.Model(sd.EDMDenoiser(Preconditioned(network)), sd.EDM(t_max=20.0), shape=(1, 8, 8), name="digits")

    recipe = sd.Recipe(seeds=range(1000, 1032), search=None) if tiny else sd.Recipe(seeds=range(1000, 1096))
    calibration = sd.calibrate(model, nfe=5, recipe=recipe, batch=96)
    calibration.save("digits-5.json")

    result = sd.compare(
        model,
        nfes=[5],
        seeds=range(64 if tiny else 256),
        methods={
            "edm": on_grid("plain, EDM grid", "edm"),
            "logsnr": on_grid("plain, log-SNR grid", "logsnr"),
            "calibrated": calibrated(lambda model, solver, nfe: calibration),
        },
        options=sd.CompareOptions(batch=256, lipschitz_seeds=0),
    )
    out = Path("own_network")
    out.mkdir(exist_ok=True)
    print(
        f"{'':20} evaluations  Fréchet  PSNR   (Fréchet distance of two sets of many-step samples: {result.floor:.1f})"
    )
    for row in result.rows:
        print(f"{row.title:20} {row.nfe:3} evaluations  Fréchet {row.honest:6.1f}  PSNR {row.psnr:5.1f} dB")
    print(write(result, out)[0])
    return {row.method: row.distance for row in result.rows}


if __name__ == "__main__":
    main()
