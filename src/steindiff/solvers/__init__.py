"""Solvers, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.solvers.adams import DEIS as DEIS
from steindiff.solvers.adams import IPNDM as IPNDM
from steindiff.solvers.base import Solver as Solver
from steindiff.solvers.ddim import DDIM as DDIM
from steindiff.solvers.dpmpp import DPMSolverMultistep as DPMSolverMultistep
from steindiff.solvers.dpmpp import DPMSolverSinglestep as DPMSolverSinglestep
from steindiff.solvers.heun import Heun as Heun
from steindiff.solvers.unipc import UniPC as UniPC
from steindiff.solvers.unipc import UniPCBh1 as UniPCBh1
from steindiff.solvers.unipc import UniPCBh2 as UniPCBh2

SOLVERS: Registry[Solver] = Registry(__name__, Solver)
