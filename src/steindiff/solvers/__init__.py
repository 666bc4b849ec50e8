"""Solvers, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.solvers.base import Solver
from steindiff.solvers.ddim import DDIM
from steindiff.solvers.deis import DEIS
from steindiff.solvers.dpmpp import DPMSolverMultistep
from steindiff.solvers.dpmpp_singlestep import DPMSolverSinglestep
from steindiff.solvers.heun import Heun
from steindiff.solvers.ipndm import IPNDM
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
