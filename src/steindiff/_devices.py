"""The devices of this machine, by the names torch gives them."""

from __future__ import annotations

import torch


def available() -> list[str]:
    """The kinds of device there are: `cpu`, and `cuda` or `mps`."""
    return ["cpu"] + ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


def device_name(device: torch.device) -> str:
    """The kind of device, of a GPU its model: images are reproduced to the bit on the same kind only."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
