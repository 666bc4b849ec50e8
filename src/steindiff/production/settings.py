"""Settings as JSON, so that two runs can be compared field by field."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from steindiff._checks import shown
from steindiff._devices import device_name
from steindiff._serialization import checksum
from steindiff.corrections.replay import Replay

THREADS = "threads"
"""The field of a recipe that says how many CPU threads computed the images; None on a GPU."""


def machine(device: torch.device) -> dict[str, Any]:
    """What the last bits of an image depend on: the kind of device; of a CPU, its instructions and the threads."""
    cpu = device.type == "cpu"
    return {
        "device": device_name(device),
        "instructions": torch.backends.cpu.get_cpu_capability() if cpu else None,
        THREADS: torch.get_num_threads() if cpu else None,
    }


@contextmanager
def threads(recipe: Mapping[str, Any]) -> Iterator[None]:
    """Inside, as many CPU threads compute as the recipe says: a set is finished with those it was begun with."""
    own, wanted = torch.get_num_threads(), recipe.get(THREADS)
    if not isinstance(wanted, int) or not 1 <= wanted <= MOST_THREADS or wanted == own:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(own)


MOST_THREADS = 1024
"""More threads than this are not taken from a file."""


@singledispatch
def setting(value: Any) -> Any:
    """A setting as JSON: equal for equal settings in any process, different for different ones.

    Dataclasses become `{"kind": …, field: …}`, functions their names, tensors and replayed weights their checksums.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: setting(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"kind": type(value).__name__, **fields}
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if getattr(value, "__dict__", None) == {}:  # nothing but its class
        return {"kind": type(value).__name__}
    raise ValueError(
        f"{type(value).__name__}: cannot be recorded, so a later run could not tell whether it is the same; allowed "
        "are numbers, text, sequences, tensors, functions and dataclasses"
    )


@setting.register(type(None))
@setting.register(bool)
@setting.register(int)
@setting.register(str)
def _(value: Any) -> Any:
    return value


@setting.register
def _(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


@setting.register(tuple)
@setting.register(list)
def _(value: Any) -> list[Any]:
    return [setting(item) for item in value]


@setting.register
def _(value: Tensor) -> dict[str, Any]:
    data = value.detach().cpu().contiguous()
    digest = hashlib.sha256(data.flatten().numpy().tobytes()).hexdigest()
    return {"dtype": str(value.dtype), "shape": list(value.shape), "sha256": digest}


@setting.register(dict)
def _(value: Any) -> dict[str, Any]:
    return {name: setting(item) for name, item in value.items()}


@setting.register
def _(value: Replay) -> dict[str, Any]:
    # Its weights are many numbers: their checksum says as much.
    weights = [setting(step) for step in value.steps]
    return {"kind": "Replay", "basis": setting(value.basis), "weights": checksum({"steps": weights})}


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two settings, by name: `solver.nominal_order: 2, not 3`."""
    for name in dict.fromkeys([*known, *wanted]):
        old, new = known.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {shown(old)}, not {shown(new)}"
