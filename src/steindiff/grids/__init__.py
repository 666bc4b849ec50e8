"""Grids, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.grids.base import Grid
from steindiff.grids.explicit import Explicit
from steindiff.grids.karras import Karras
from steindiff.grids.logsnr import LogSNR
from steindiff.grids.uniform import UniformTime

GRIDS: Registry[Grid] = Registry(__name__, Grid)

__all__ = ["GRIDS", "Explicit", "Grid", "Karras", "LogSNR", "UniformTime"]
