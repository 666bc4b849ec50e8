"""Grids, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.grids.base import Grid
from steindiff.grids.rules import Explicit, Karras, LogSNR, UniformTime

GRIDS: Registry[Grid] = Registry(__name__, Grid)

__all__ = ["GRIDS", "Explicit", "Grid", "Karras", "LogSNR", "UniformTime"]
