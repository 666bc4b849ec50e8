"""`steindiff doctor`."""

from __future__ import annotations

import os
import platform

import torch
from rich.table import Table

import steindiff
from steindiff import datasets, zoo
from steindiff._environment import installed
from steindiff.cli.options import Json
from steindiff.cli.output import print_json, show, text
from steindiff.metrics import references

EXAMPLES = ("steindiff doctor", "steindiff doctor --json")

NEEDED = ("torch", "numpy", "safetensors", "typer", "rich", "matplotlib", "pillow")
EXTRAS = {"diffusers": ("diffusers", "accelerate", "transformers")}
"""Packages needed, and those of the optional extras, as in pyproject.toml."""


def extra(name: str, packages: tuple[str, ...]) -> str:
    """The state of an optional extra and how to get it."""
    found = {package: installed(package) for package in packages}
    if None in found.values():
        return f"missing; pip install 'steindiff[{name}]'"
    return ", ".join(f"{package} {number}" for package, number in found.items())


def weights(name: str) -> str:
    """Whether a shipped model loads."""
    try:
        parameters = sum(p.numel() for p in zoo.load(name).parameters())
    except (OSError, RuntimeError) as error:
        return f"broken: {error}"
    return f"shipped, {parameters / 1e6:.1f} million parameters"


def examination() -> dict[str, dict[str, str]]:
    """Everything worth knowing, by topic."""
    cached = (datasets.cache() / "inception-2015-12-05.pt").is_file()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "versions": {
            "steindiff": steindiff.__version__,
            "python": platform.python_version(),
            **{package: installed(package) or "not installed" for package in NEEDED},
        },
        "device": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor cores": str(os.cpu_count()),
            "torch threads": str(torch.get_num_threads()),
            "GPU": ", ".join(gpus) or ("Apple" if torch.backends.mps.is_available() else "none"),
        },
        "optional": {name: extra(name, packages) for name, packages in EXTRAS.items()},
        "offline": {
            **{f"model {name}": weights(name) for name in zoo.names()},
            "reference statistics": ", ".join(sorted(path.stem for path in references.FOLDER.glob("*.npz"))),
            "Inception network": "cached" if cached else "downloaded when first needed",
        },
    }


def command(json: Json = False) -> None:
    """Say what is installed, on which device it runs, and what is available offline."""
    found = examination()
    if json:
        print_json(found)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for topic, facts in found.items():
        table.add_row(f"[bold]{topic}[/]")
        for name, value in facts.items():
            table.add_row(f"  {text(name)}", text(value))
    show(table)
