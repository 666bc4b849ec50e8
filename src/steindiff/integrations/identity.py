r"""Which network a calibration belongs to, told from its architecture and a few projections of its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steindiff._serialization import decode

SAMPLED = 16
"""How many of a network's parameters are looked at."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def weights_of(module: nn.Module, name: str) -> Tensor:
    """A parameter's values, also where they have been moved out of the module (sequential offload)."""
    *path, leaf = name.split(".")
    owner = module.get_submodule(".".join(path))
    value: Tensor = getattr(owner, leaf)
    if not value.is_meta:
        return value
    hook = getattr(owner, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        store = getattr(candidate, "weights_map", None)
        if store is not None:
            kept: Tensor = store[leaf]
            return kept
    raise ValueError(f"network: its parameter {name} holds no values (meta device)")


def identify(module: nn.Module) -> dict[str, Any]:
    """Class and projections of a network, as a calibration records them.

    The projections (random signs on the first 4,096 numbers of 16 matrices) survive half precision, another device,
    compilation and offloading up to rounding.
    """
    module = uncompiled(module)
    # Matrices only: the weights of normalisations are near 1 in every network.
    names = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    chosen = [names[k * (len(names) - 1) // max(1, SAMPLED - 1)] for k in range(min(SAMPLED, len(names)))]
    generator = torch.Generator().manual_seed(16)
    signs = torch.randint(0, 2, (4096,), generator=generator).double() * 2 - 1
    projections = []
    for name in chosen:
        values = weights_of(module, name).detach().flatten()[:4096].double().cpu()
        projections.append(float(f"{float(values @ signs[: len(values)]) / len(values) ** 0.5:.6g}"))
    return {"class": type(module).__name__, "weights": projections}


def check_identity(known: dict[str, Any], module: nn.Module, tolerance: float = 0.02) -> None:
    """Refuse a network that is not the one `identify` recorded, up to a relative `tolerance` for half precision."""
    found, fields = identify(module), decode("network", known, dict[str, Any])
    name = decode("network.class", fields.get("class"), str)
    weights = decode("network.weights", fields.get("weights"), tuple[float, ...])
    if found["class"] != name or len(found["weights"]) != len(weights):
        raise ValueError(f"network: the calibration was measured on {name}, the pipeline has {found['class']}")
    a, b = torch.tensor(found["weights"]), torch.tensor(weights)
    gap = float((a - b).norm() / b.norm().clamp(min=1e-12))
    if not gap <= tolerance:  # NaN is not close
        raise ValueError(f"network: its weights differ by {gap:.1%} from those the calibration was measured on")
