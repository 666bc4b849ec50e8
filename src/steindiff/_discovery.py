"""Finding what is offered by name: the `VARIANTS` tables of a package, what others registered, and entry points.

A package of somebody else's offers a solver by an entry point, loaded when a name is not known otherwise,

    [project.entry-points."steindiff.solvers"]
    my-solver = "my_package:MySolver"

or at run time by `steindiff.register("my-solver", MySolver())`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from steindiff._checks import nearest, shown

T = TypeVar("T")

REGISTRIES: list[Registry[Any]] = []
"""All of them, so that `register` finds the one a thing belongs to."""


class Registry(Mapping[str, T], Generic[T]):
    """Named objects of one kind: those of a package's modules, then those registered, then entry points."""

    def __init__(self, package: str, kind: type[T]) -> None:
        self.package = package
        self.kind = kind
        self._found: dict[str, T] = {}
        self._classes: dict[str, type[T]] = {}
        module = importlib.import_module(package)
        modules = [
            importlib.import_module(f"{package}.{m.name}")
            for m in pkgutil.iter_modules(getattr(module, "__path__", []))
        ]
        for source in modules or [module]:
            for value in vars(source).values():
                self._remember(value)
            for name, value in getattr(source, "VARIANTS", {}).items():
                self.add(name, value)
        self._found = dict(sorted(self._found.items()))
        self._external = False
        REGISTRIES.append(self)

    def _remember(self, cls: Any) -> None:
        """Keep a concrete dataclass of the kind: files may name it."""
        ours = isinstance(cls, type) and issubclass(cls, self.kind) and dataclasses.is_dataclass(cls)
        if ours and not getattr(cls, "__abstractmethods__", None):
            self._classes[cls.__name__] = cls

    def add(self, name: str, value: T) -> None:
        """Offer `value` under a name."""
        if not isinstance(value, self.kind):
            raise TypeError(f"{name!r} must be a {self.kind.__name__}, got {value!r}")
        if self._found.get(name, value) != value:
            raise ValueError(f"the name {name!r} is taken by {self._found[name]!r}; choose another")
        if (known := self._classes.get(type(value).__name__)) not in (None, type(value)):
            raise ValueError(f"a class {type(value).__name__} is known already ({known.__module__}); rename yours")
        self._found[name] = value
        self._remember(type(value))

    def _load_external(self) -> None:
        """Look for entry points, once, and only when a name or the whole list is asked for."""
        if not self._external:
            self._external = True
            for point in entry_points(group=self.package):
                made = point.load()
                self.add(point.name, made() if isinstance(made, type) else made)

    def classes(self) -> dict[str, type[T]]:
        """Classes a file may name, by name."""
        self._load_external()
        return self._classes

    def __getitem__(self, name: str) -> T:
        if name not in self._found:
            self._load_external()
        if name not in self._found:
            raise KeyError(f"unknown {self.kind.__name__.lower()} {name!r}{nearest(name, self._found)}")
        return self._found[name]

    def resolve(self, argument: str, given: T | str) -> T:
        """The object meant by a name or itself."""
        if isinstance(given, str):
            if given not in self:
                raise ValueError(f"{argument} = {given!r} is not known{nearest(given, self)}")
            return self[given]
        if isinstance(given, type) and issubclass(given, self.kind):
            raise TypeError(f"{argument} must be an instance, got the class; write {given.__name__}(...)")
        if not isinstance(given, self.kind):
            raise TypeError(f"{argument} must be a {self.kind.__name__} or its name, got {shown(given)}")
        return given

    def name_of(self, value: T) -> str | None:
        """The name an equal object is offered under."""
        return next((name for name, known in self._found.items() if known == value), None)

    def __iter__(self) -> Iterator[str]:
        self._load_external()
        return iter(self._found)

    def __len__(self) -> int:
        self._load_external()
        return len(self._found)


def register(name: str, value: Any) -> None:
    """Offer a solver, schedule, grid, basis, probe or correction, a frozen dataclass, by name, in files too."""
    for registry in REGISTRIES:
        if isinstance(value, registry.kind):
            registry.add(name, value)
            return
    kinds = ", ".join(registry.kind.__name__ for registry in REGISTRIES)
    raise TypeError(f"value must be one of {kinds}, got {value!r}")


def named(argument: str, name: str, table: Mapping[str, T]) -> T:
    """Look `name` up, or say which is nearest."""
    if name not in table:
        raise ValueError(f"{argument} = {name!r} is not known{nearest(name, table)}")
    return table[name]
