"""Trained networks that ship with the package.

>>> from steindiff import zoo
>>> net = zoo.load("cifar10")
>>> net.shape, net.num_classes
((3, 32, 32), 10)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from steindiff import _weights as weights
from steindiff._discovery import named
from steindiff.zoo.preconditioning import ARCHITECTURES, EDMPrecond, VPNoise, ZooNetwork
from steindiff.zoo.unet import UNet, UNetConfig

__all__ = ["EDMPrecond", "UNet", "UNetConfig", "VPNoise", "ZooNetwork", "load", "names"]

_FOLDER = Path(__file__).parent


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
