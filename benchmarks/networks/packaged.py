"""Parts of installed packages, by path: the packages themselves import what sampling does not need."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch


def folder(name: str, requirement: str) -> Path:
    """Where a package lies, which is not imported.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed; pip install --no-deps {requirement}")
    return Path(found.origin).parent


def module(name: str, path: Path) -> ModuleType:
    """One module of a package, known from then on by its name, by which others of the package import it."""
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    with torch.random.fork_rng():  # some seed PyTorch when they are imported
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
