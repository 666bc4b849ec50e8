"""Data flows one way: every module may import only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import steindiff

SOURCE = Path(steindiff.__file__).parent
LAYERS = (
    ("_version", "_files", "_checks", "_environment", "_progress"),
    ("_serialization", "_discovery", "_distributed", "_weights"),
    ("levels",),
    ("tableau", "schedules"),
    ("grids", "solvers", "seeding", "bases", "images"),
    ("denoisers",),
    ("model", "probes"),
    ("corrections",),
    ("loop",),
    ("sampler", "calibration_file"),
    ("calibration",),
    ("reference",),
    ("search", "stein"),
    ("calibrating",),
    ("zoo", "datasets", "diagnostics"),
    ("models", "metrics"),
    ("comparison", "production"),
    ("yardsticks", "report"),
    ("integrations", "cli"),
)
"""From the bottom up; modules of one layer may import each other only within a package, or as ALONGSIDE says."""
ALONGSIDE = {("grids", "solvers"), ("_discovery", "_checks"), ("yardsticks", "report")}
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def unit(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path) -> set[str]:
    """The units of this package a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "steindiff":
                names = [f"steindiff.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("steindiff.")}
    return found


def for_typing_only(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    return {n.module.split(".")[1] for b in blocks for n in ast.walk(b) if isinstance(n, ast.ImportFrom) and n.module}


FILES = sorted(p for p in SOURCE.rglob("*.py") if p != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_import_points_up(path: Path):
    own = unit(path)
    assert own in HEIGHT, f"give {own} a layer"
    for name in imported(path) - for_typing_only(path) - {own}:
        assert name in HEIGHT, f"{path}: imports steindiff.{name}, which has no layer"
        lower = HEIGHT[name] < HEIGHT[own] or (HEIGHT[name] == HEIGHT[own] and own in ("zoo", "grids", "cli"))
        assert lower, f"{path.relative_to(SOURCE)} (layer {HEIGHT[own]}) imports {name} (layer {HEIGHT[name]})"
