"""A DDPM network: it predicts the noise and looks whole timesteps 0 … 999 up in a table. Needs scikit-learn.

    python examples/own_ddpm.py            # minutes on two CPU cores
    python examples/own_ddpm.py --tiny     # seconds

Trains on 8×8 digits, checks wrapper and schedule, calibrates six evaluations and prints the distance to the many-step
images of the same seeds. `t.round().long()` is all a table of embeddings needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import steindiff as sd

SCHEDULE = sd.Discrete.linear()


class Network(nn.Module):
    """ε(x, t) with an embedding table for t = 0, …, 999."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        angles = torch.arange(1000)[:, None] * 0.001 ** (torch.arange(width // 2) / (width // 2))
        self.times = nn.Embedding.from_pretrained(torch.cat([angles.sin(), angles.cos()], 1), freeze=False)
        self.mix = nn.Linear(width, width)
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Predict the noise in `(B, 1, 8, 8)` states at whole times `(B,)`."""
        h = self.first(x) + self.mix(self.times(t))[:, :, None, None]
        for layer in self.layers:
            h = h + layer(nn.functional.silu(h))
        return self.last(nn.functional.silu(h))


def train(data: Tensor, steps: int) -> Network:
    """The DDPM loss: mean-square error of the noise at random times."""
    torch.manual_seed(0)
    network = Network()
    bars = torch.tensor(SCHEDULE.alphas_cumprod)
    adam = torch.optim.Adam(network.parameters(), lr=2e-3)
    for step in range(steps):
        adam.param_groups[0]["lr"] = 2e-3 * (1 - step / steps)
        clean = data[torch.randint(len(data), (128,))]
        t = torch.randint(1000, (len(clean),))
        bar, noise = bars[t].reshape(-1, 1, 1, 1), torch.randn_like(clean)
        loss = (network(bar.sqrt() * clean + (1 - bar).sqrt() * noise, t) - noise).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network.eval().requires_grad_(False)


def denoising_error(model: sd.Model, images: Tensor, t: float) -> float:
    """Root mean square error of denoised images: what goes wrong if wrapper, schedule and t do not fit."""
    level = model.schedule.level(t)
    x = level.alpha * images + level.sigma * torch.randn_like(images)
    return float((model.denoiser_for(range(len(images)))(x, level) - images).square().mean().sqrt())


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, check, calibrate; returns each method's distance to the many-step images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="train and search for seconds only")
    tiny = parser.parse_args(argv).tiny

    data = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    network = train(data, steps=60 if tiny else 1500)
    model = sd.Model(sd.Epsilon(lambda x, t: network(x, t.round().long())), SCHEDULE, shape=(1, 8, 8), name="ddpm")
    mean = float(data.var(0).mean().sqrt())
    for t in (100, 400):
        error = denoising_error(model, data[:256], t)
        print(f"t = {t}: denoising error {error:.2f}, always guessing the mean image {mean:.2f}")

    recipe = sd.Recipe(seeds=range(1000, 1032), search=None) if tiny else sd.Recipe(seeds=range(1000, 1096))
    samplers = {
        "plain, log-SNR grid": sd.Sampler("dpmpp-2m", grid="logsnr", nfe=6),
        "plain, uniform grid": sd.Sampler("dpmpp-2m", grid="uniform", nfe=6),
        "calibrated": sd.calibrate(model, nfe=6, recipe=recipe, batch=96).sampler(),
    }
    seeds = range(64)
    many = sd.Sampler("dpmpp-2m", grid="logsnr", nfe=60)(model, seeds).x
    errors = {name: float((s(model, seeds).x - many).square().mean().sqrt()) for name, s in samplers.items()}
    for name, error in errors.items():
        print(f"{name:20} 6 evaluations, distance to 60: {error:.4f}")
    return errors


if __name__ == "__main__":
    main()
