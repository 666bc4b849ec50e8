"""Solvers, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.solvers.adams import DEIS, IPNDM
from steindiff.solvers.base import Solver
from steindiff.solvers.ddim import DDIM
from steindiff.solvers.dpmpp import DPMSolverMultistep, DPMSolverSinglestep
from steindiff.solvers.heun import Heun
from steindiff.solvers.unipc import UniPC, UniPCBh1, UniPCBh2

SOLVERS: Registry[Solver] = Registry(__name__, Solver)

__all__ = [
    "DDIM",
    "DEIS",
    "IPNDM",
    "SOLVERS",
    "DPMSolverMultistep",
    "DPMSolverSinglestep",
    "Heun",
    "Solver",
    "UniPC",
    "UniPCBh1",
    "UniPCBh2",
]
