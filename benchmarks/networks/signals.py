"""A 1-D model: heartbeats made by a formula, 128 samples long, an EDM denoiser that is a small residual MLP."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import pieces
from steindiff import EDM, EDMDenoiser, Model
from steindiff.denoisers.prediction import precondition
from steindiff.zoo.unet import Fourier

NAME = "signals"
LENGTH = 128
SIGMA_DATA = 0.4
WAVES = ((-0.22, 0.045, 0.18), (-0.03, 0.014, -0.2), (0.0, 0.014, 1.3), (0.03, 0.016, -0.35), (0.3, 0.07, 0.35))
"""Place in the cycle, width and height of each wave of a heartbeat."""


def heartbeats(count: int, generator: torch.Generator) -> Tensor:
    """Signals (N, 1, 128): waves of random rate, phase, heights and widths on a slow drift, with a fine tremor."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    place = torch.arange(LENGTH) / LENGTH
    cycle = (uniform(1.5, 3.5, 1) * place + uniform(0, 1, 1)) % 1.0
    x = 0.15 * torch.sin(2 * math.pi * (uniform(0.2, 1.0, 1) * place + uniform(0, 1, 1)))
    for centre, width, height in WAVES:
        away = (cycle - centre - 0.4 + 0.5) % 1.0 - 0.5
        x = x + height * uniform(0.7, 1.3, 1) * torch.exp(-0.5 * (away / (width * uniform(0.8, 1.2, 1) * 2)) ** 2)
    tremor = uniform(0.005, 0.03, 1) * torch.sin(2 * math.pi * (uniform(25, 45, 1) * place + uniform(0, 1, 1)))
    return (x - 0.15 + tremor)[:, None]


class Signals(nn.Module):
    """D(x, σ): x (B, 1, 128), sigma (B,) → (B, 1, 128)."""

    def __init__(self, width: int = 224, blocks: int = 4, embedding: int = 64) -> None:
        super().__init__()
        self.fourier = Fourier(embedding, (-2.0, 4.0))
        self.noise = nn.Linear(embedding, width)
        self.enter = nn.Linear(LENGTH, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.modulations = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(blocks))
        self.first = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.leave = nn.Linear(width, LENGTH)
        for layer in (*self.second, self.leave):
            nn.init.zeros_(layer.weight)

    def raw(self, x: Tensor, c_noise: Tensor) -> Tensor:
        """The network F."""
        condition = F.silu(self.noise(self.fourier(c_noise).to(x)))
        h = self.enter(x.flatten(1))
        for norm, modulation, first, second in zip(self.norms, self.modulations, self.first, self.second, strict=True):
            scale, shift = modulation(condition).chunk(2, dim=1)
            h = h + second(F.silu(first(norm(h)) * (1 + scale) + shift))
        return self.leave(F.silu(h))[:, None]

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Denoise x."""
        return precondition(self.raw, x, sigma, SIGMA_DATA)


def load(device: torch.device | str = "cpu", folder: Path = Path(__file__).parent) -> Model:
    """The trained network as a model without conditions."""
    network = Signals()
    network.load_state_dict(pieces.read(pieces.found(folder, NAME)))
    network.to(device).eval().requires_grad_(False)
    return Model(EDMDenoiser(network), EDM(), (1, LENGTH), device=device, name=NAME)
