"""Your own network: train a toy denoiser of Gaussian bumps, calibrate it, compare it, write the report.

    python examples/own_network.py

Writes `own_network/report.html`. Replace `Bumps` and `train` by your data and model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from steindiff import SOLVERS
from steindiff.calibrating import calibrate
from steindiff.comparison import RandomFeatures, Subject, compare
from steindiff.denoisers import EDMDenoiser, Preconditioned
from steindiff.metrics import Moments
from steindiff.report import write
from steindiff.schedules import EDM

SHAPE = (1, 16, 16)


def bumps(num: int, generator: torch.Generator) -> Tensor:
    """Images of one bright bump at a random place, `(num, 1, 16, 16)` in [−1, 1]."""
    centre = 4 + 8 * torch.rand(num, 2, 1, 1, generator=generator)
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    return 2 * torch.exp(-0.25 * (grid - centre).square().sum(1, keepdim=True)) - 1


class Network(nn.Module):
    """A small convolutional network F(x, c_noise)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 32, 5, padding=2), nn.SiLU(), nn.Conv2d(32, 32, 5, padding=2), nn.SiLU(),
            nn.Conv2d(32, 32, 5, padding=2), nn.SiLU(), nn.Conv2d(32, 1, 5, padding=2),
        )  # fmt: skip

    def forward(self, x: Tensor, c_noise: Tensor) -> Tensor:
        """Evaluate the network on states `(B, 1, 16, 16)` and noise conditions `(B,)`."""
        return self.layers(torch.cat([x, c_noise.reshape(-1, 1, 1, 1).expand_as(x)], dim=1))


def train(steps: int, generator: torch.Generator) -> Preconditioned:
    """Train by the EDM loss, whose weight makes every noise level count alike."""
    torch.manual_seed(0)
    network = Network()
    denoise = Preconditioned(network)
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(steps):
        clean = bumps(32, generator)
        sigma = torch.exp(-1.2 + 1.2 * torch.randn(len(clean), generator=generator))
        s = sigma.reshape(-1, 1, 1, 1)
        error = denoise(clean + s * torch.randn(clean.shape, generator=generator), sigma) - clean
        loss = ((s**2 + 0.25) / (0.5 * s) ** 2 * error.square()).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    network.requires_grad_(False)
    return denoise


def main() -> None:
    """Train, calibrate, compare."""
    generator = torch.Generator().manual_seed(0)
    denoiser = EDMDenoiser(train(150, generator))
    solver, schedule, features = SOLVERS["dpmpp-2m"], EDM(t_max=20.0), RandomFeatures(1)
    calibration = calibrate(denoiser, solver, schedule, 5, SHAPE, seeds=range(1000, 1064))
    subject = Subject(
        name="bumps",
        denoisers=lambda seeds: denoiser,
        schedule=schedule,
        shape=SHAPE,
        features=features,
        reference=Moments.of(features(bumps(2000, generator))),
        calibrations=lambda solver, nfe: calibration,
    )
    result = compare(subject, solver, [5], range(32), batch=32)
    out = Path("own_network")
    out.mkdir(exist_ok=True)
    write(result, out)
    for row in result.rows:
        print(f"{row.title:16} {row.nfe:3} evaluations, Fréchet {row.frechet:8.2f}, energy {row.energy_ratio:.2f}")


if __name__ == "__main__":
    main()
