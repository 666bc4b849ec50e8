"""The devices of this machine and the packages installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch


def available() -> list[str]:
    """The kinds of device there are: `cpu`, and `cuda` or `mps`."""
    return ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


def device_name(device: torch.device) -> str:
    """The kind of device, of a GPU its model: images are reproduced to the bit on the same kind only."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def installed(name: str) -> str | None:
    """Version of a package, None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
