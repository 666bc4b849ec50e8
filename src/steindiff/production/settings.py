"""Settings as JSON, so that two runs can be compared field by field."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import singledispatch
from typing import Any

from torch import Tensor

from steindiff._serialization import checksum
from steindiff.corrections.replay import Replay

SHOWN = 60
"""A value is shown by at most so many characters."""


@singledispatch
def setting(value: Any) -> Any:
    """A setting as JSON: equal for equal settings in any process, different for different ones.

    Dataclasses become `{"kind": …, field: …}`, functions their names, tensors and replayed weights their checksums.

    Raises:
        ValueError: if there is no rule for its type.
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


def shown(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two settings, by name: `solver.nominal_order: 2, not 3`."""
    for name in dict.fromkeys([*known, *wanted]):
        old, new = known.get(name), wanted.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}: {shown(old)}, not {shown(new)}"
