"""The architectures of the shipped models: one entry per name."""

from __future__ import annotations

from collections.abc import Callable

from steindiff.zoo.preconditioning import EDMPrecond, VPNoise
from steindiff.zoo.unet import UNet, UNetConfig


def cifar10() -> EDMPrecond:
    """EDM denoiser of 32×32 RGB images (9.65M parameters)."""
    return EDMPrecond(UNet(UNetConfig((3, 32, 32), 10, (128, 192, 192), blocks=2, attention=(False, True, False))))


def fashion() -> VPNoise:
    """Discrete VP noise predictor of 28×28 grey images (2.42M parameters)."""
    attention = (False, False, True)
    return VPNoise(UNet(UNetConfig((1, 28, 28), 10, (64, 96, 96), 2, attention, head=32, embedding=128)))


ARCHITECTURES: dict[str, Callable[[], EDMPrecond | VPNoise]] = {"cifar10": cifar10, "fashion": fashion}
"""Name → network with fresh parameters."""
