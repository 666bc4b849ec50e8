"""Trained networks that ship with the package: a denoiser D(x, σ) (EDM) and a noise predictor ε(x, t) (VP).

>>> from steindiff import zoo
>>> net = zoo.load("cifar10")
>>> net.shape, net.num_classes
((3, 32, 32), 10)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from steindiff import _weights as weights
from steindiff._discovery import named
from steindiff.denoisers.prediction import precondition
from steindiff.zoo.unet import UNet, UNetConfig

__all__ = ["EDMPrecond", "UNet", "UNetConfig", "VPNoise", "ZooNetwork", "load", "names"]

_FOLDER = Path(__file__).parent


class ZooNetwork(nn.Module):
    """A network with its configuration, the shape (C, H, W) of one sample, and the number of labels K.

    Label K is the null label.
    """

    def __init__(self, network: UNet) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        self.shape = network.config.shape
        self.num_classes = network.config.num_classes


class EDMPrecond(ZooNetwork):
    r"""EDM-preconditioned denoiser D(x, σ) = E[x* | x] for x = x* + σ ε; see `denoisers.prediction.precondition`.

    The combination is made in float32 (float64 where x is), whatever the precision of the network.

    Shapes: x (B, C, H, W), sigma (B,), labels (B,) or None → (B, C, H, W).

    Reference: Karras et al. (2022), arXiv:2206.00364.
    """

    def __init__(self, network: UNet, sigma_data: float = 0.5) -> None:
        super().__init__(network)
        self.sigma_data = sigma_data

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        """Denoise x."""
        dtype = self.network.enter.weight.dtype
        return precondition(
            lambda z, c_noise: self.network(z.to(dtype), c_noise, labels),
            x.to(torch.promote_types(x.dtype, torch.float32)),
            sigma.to(x.device),
            self.sigma_data,
        )


class VPNoise(ZooNetwork):
    r"""Noise predictor ε(x, t) of the discrete variance-preserving process x = α_t x* + σ_t ε.

    α_t² = ∏_{s ≤ t} (1 − β_s) with β linear from `betas[0]` to `betas[1]` over `steps` steps; t counts from 0,
    need not be a whole number, and reaches the network as 2t/steps − 1.

    Shapes: x (B, C, H, W), t (B,), labels (B,) or None → (B, C, H, W).

    Reference: Ho et al. (2020), arXiv:2006.11239.
    """

    def __init__(self, network: UNet, steps: int = 1000, betas: tuple[float, float] = (1e-4, 0.02)) -> None:
        super().__init__(network)
        self.steps = steps
        self.betas = betas

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict the noise in x."""
        out_dtype = torch.promote_types(x.dtype, torch.float32)
        dtype = self.network.enter.weight.dtype
        position = 2 * t.to(out_dtype) / self.steps - 1
        return self.network(x.to(dtype), position, labels).to(out_dtype)


def cifar10() -> EDMPrecond:
    """EDM denoiser of 32×32 RGB images (9.65M parameters)."""
    return EDMPrecond(UNet(UNetConfig((3, 32, 32), 10, (128, 192, 192), blocks=2, attention=(False, True, False))))


def fashion() -> VPNoise:
    """Discrete VP noise predictor of 28×28 grey images (2.42M parameters)."""
    attention = (False, False, True)
    return VPNoise(UNet(UNetConfig((1, 28, 28), 10, (64, 96, 96), 2, attention, head=32, embedding=128)))


ARCHITECTURES: dict[str, Callable[[], EDMPrecond | VPNoise]] = {"cifar10": cifar10, "fashion": fashion}
"""Name → network with fresh parameters."""


def names() -> tuple[str, ...]:
    """Names that `load` takes."""
    return tuple(sorted(ARCHITECTURES))


def load(name: str, device: torch.device | str = "cpu", *, path: Path | None = None) -> EDMPrecond | VPNoise:
    """A trained network in float32, in evaluation mode, frozen: D(x, σ, labels) or ε(x, t, labels).

    `path` has weights of one's own for the same architecture; None reads the shipped file and checks its SHA-256.
    """
    net = named("name", name, ARCHITECTURES)()
    if path is None:
        path = _FOLDER / "weights" / f"{name}.safetensors"
        record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        tensors = weights.read(path, digest=record["sha256"])
    else:
        tensors = weights.read(path)
    weights.assign(net, tensors, str(path))
    return net.to(device).eval().requires_grad_(False)
