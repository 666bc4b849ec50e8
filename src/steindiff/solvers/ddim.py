r"""DDIM, the first-order exponential integrator."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff.levels import Levels
from steindiff.solvers.base import Solver, euler
from steindiff.tableau import HERE, Stage, Tableau


@dataclass(frozen=True)
class DDIM(Solver):
    r"""x_t = (σ_t/σ_s) x + (α_t − α_s σ_t/σ_s) D(x, s); the paper's update operator at first order.

    In EDM coordinates this is Euler's method in σ.

    Reference: Song et al. (2021), arXiv:2010.02502.
    """

    order = 1

    def tableau(self, levels: Levels, i: int) -> Tableau:
        return Tableau((Stage(HERE, levels[i]),), euler(levels[i], levels[i + 1]))


VARIANTS = {"ddim": DDIM()}
