"""Problems with closed-form solutions, shared by the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from networks.mixture import Mixture
from steindiff.bases import Basis, natural_basis
from steindiff.calibration import Calibration
from steindiff.corrections.replay import StepWeights
from steindiff.denoisers import Denoiser, Gaussian
from steindiff.levels import Level, Levels
from steindiff.solvers import Solver
from steindiff.zoo import EDMPrecond, UNet, UNetConfig

FLOAT = torch.float64


@dataclass(frozen=True)
class Problem:
    """A denoiser whose probability flow is known exactly: `flow(x, s, t)`."""

    denoiser: Denoiser
    flow: Callable[[Tensor, Level, Level], Tensor]


class Spectral(Gaussian):
    """Gaussian data whose covariance is diagonal in a basis, one variance for each band."""

    def __init__(self, basis: Basis, spectrum: Tensor) -> None:
        super().__init__(torch.zeros(basis.shape, dtype=FLOAT), basis.spread(spectrum))
        self.basis = basis

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        return self.basis.inverse(super().denoise(self.basis.forward(x), level))

    def draw(self, num: int, level: Level, seed: int = 0) -> Tensor:
        """States of the exact marginal at a level."""
        generator = torch.Generator().manual_seed(seed)
        clean = self.basis.inverse(self.sample(num, generator))
        return level.alpha * clean + level.sigma * torch.randn(clean.shape, generator=generator, dtype=FLOAT)


def gaussian() -> Problem:
    denoiser = Gaussian(torch.tensor([0.3, -0.7, 0.0], dtype=FLOAT), torch.tensor([0.25, 0.04, 1.5], dtype=FLOAT))
    return Problem(denoiser, denoiser.flow)


def mixture() -> Problem:
    """A mixture on the line, where the flow keeps quantiles: F_t(x_t) = F_s(x_s)."""
    denoiser = Mixture(
        torch.tensor([[-1.0], [0.8]], dtype=FLOAT),
        torch.tensor([0.09, 0.16], dtype=FLOAT),
        torch.tensor([0.4, 0.6], dtype=FLOAT),
    )

    def cdf(x: Tensor, level: Level) -> Tensor:
        std = (level.alpha**2 * denoiser.variances + level.sigma**2).sqrt()
        return (denoiser.weights * torch.special.ndtr((x - level.alpha * denoiser.flat[:, 0]) / std)).sum(
            -1, keepdim=True
        )

    def flow(x: Tensor, s: Level, t: Level) -> Tensor:
        target = cdf(x, s)
        low, high = torch.full_like(x, -50.0), torch.full_like(x, 50.0)
        for _ in range(64):  # halves 100 to less than float64 can tell
            middle = 0.5 * (low + high)
            below = cdf(middle, t) < target
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return 0.5 * (low + high)

    return Problem(denoiser, flow)


PROBLEMS: dict[str, Callable[[], Problem]] = {"gaussian": gaussian, "mixture": mixture}


class Nonlinear(torch.nn.Module):
    """A small smooth network (x, t) → output of the same shape, deterministic, for equivalence tests."""

    def __init__(self, dim: int = 6, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = torch.randn(dim, 16, generator=generator, dtype=dtype) / dim**0.5
        self.b = torch.randn(16, dim, generator=generator, dtype=dtype) / 4

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = (t.to(x.dtype) / 300.0).reshape(-1, *[1] * (x.ndim - 1))
        return torch.tanh(x @ self.a + torch.sin(angle)) @ self.b + 0.1 * torch.cos(angle) * x


def random_unet(resolution: int) -> EDMPrecond:
    """A U-Net of the zoo with random weights, for images of any size."""
    attention = (False, False, False, True)
    config = UNetConfig((3, resolution, resolution), 1, channels=(32, 64, 64, 64), blocks=1, attention=attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = EDMPrecond(UNet(config))
        for module in network.modules():
            if isinstance(module, torch.nn.Conv2d):  # those that start as zero would hide the derivative
                torch.nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    return network.eval().requires_grad_(False)


def random_calibration(levels: Levels, solver: Solver, shape: tuple[int, ...]) -> Calibration:
    """A calibration that does something at every step, with as many differences as a run has made by then."""
    steps, basis, generator = levels.steps, natural_basis(shape), torch.Generator().manual_seed(1)
    rho = 0.8 + 0.5 * torch.rand(steps, basis.bands, generator=generator, dtype=FLOAT)
    gamma = 0.9 + 0.1 * torch.rand(steps, generator=generator, dtype=FLOAT)
    tau = 0.2 * torch.randn(steps, 2, basis.bands, generator=generator, dtype=FLOAT)
    weights = (
        StepWeights(rho=tuple(r), tau=tuple(map(tuple, t[:i])), gamma=g)
        for i, (r, t, g) in enumerate(zip(rho.tolist(), tau.tolist(), gamma.tolist(), strict=True))
    )
    return Calibration(solver=solver, levels=levels, basis=basis, steps=tuple(weights))
