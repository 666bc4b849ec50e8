"""Finding what a folder offers: every module's `VARIANTS` table, name → ready-made object."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


def variants(package: str, path: Iterable[str], kind: type[T]) -> dict[str, T]:
    """Collect the `VARIANTS` tables of a package's modules, in order of name.

    Raises:
        TypeError: if an entry is not of the expected kind or a name is given twice.
    """
    found: dict[str, T] = {}
    for info in pkgutil.iter_modules(path):
        table: dict[str, Any] = getattr(importlib.import_module(f"{package}.{info.name}"), "VARIANTS", {})
        for name, value in table.items():
            if not isinstance(value, kind):
                raise TypeError(f"{package}.{info.name}.VARIANTS[{name!r}] is not a {kind.__name__}: {value!r}")
            if name in found:
                raise TypeError(f"{package}.{info.name}.VARIANTS: the name {name!r} is already taken")
            found[name] = value
    return dict(sorted(found.items()))


def named(argument: str, name: str, table: dict[str, T]) -> T:
    """Look `name` up, or say what is allowed.

    Raises:
        ValueError: naming the argument, the value and the allowed names.
    """
    if name not in table:
        raise ValueError(f"{argument} = {name!r}: allowed are {', '.join(table)}")
    return table[name]
