r"""iPNDM: classical Adams–Bashforth on the noise prediction."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff.levels import Levels
from steindiff.solvers.base import Solver, check_order, euler
from steindiff.solvers.noise import adams_row
from steindiff.tableau import HERE, Stage, Tableau

ADAMS_BASHFORTH = (
    (1.0,),
    (3.0 / 2.0, -1.0 / 2.0),
    (23.0 / 12.0, -16.0 / 12.0, 5.0 / 12.0),
    (55.0 / 24.0, -59.0 / 24.0, 37.0 / 24.0, -9.0 / 24.0),
)


@dataclass(frozen=True)
class IPNDM(Solver):
    r"""x_t/α_t = x/α_s + (σ̃_t − σ̃_s) Σ_k c_k ε_k with the constant Adams–Bashforth coefficients c.

    The coefficients assume even steps in σ̃ = σ/α: there the order is as claimed; on other smooth grids it is 2 at
    most. In practice this is among the best few-step solvers on the EDM grid all the same. The order rises with
    the history and is not lowered at the end; a step from α = 0 is of first order.

    Args:
        order: 1 to 4.

    References:
        Pseudo Numerical Methods for Diffusion Models on Manifolds (Liu et al., 2022), arXiv:2202.09778;
        Fast Sampling of Diffusion Models with Exponential Integrator (Zhang & Chen, 2023), arXiv:2204.13902.
    """

    order: int = 4

    def __post_init__(self) -> None:
        check_order(self.order, (1, 2, 3, 4))

    @property
    def memory(self) -> int:
        return self.order - 1

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        here = Stage(HERE, s)
        if s.alpha == 0.0:
            return Tableau((here,), euler(s, t))
        used = [levels[i - k] for k in range(min(self.order, i + 1))]
        weights = [(t.ratio - s.ratio) * c for c in ADAMS_BASHFORTH[len(used) - 1]]
        return Tableau((here,), adams_row(used, t, weights))


VARIANTS = {"ipndm-2": IPNDM(2), "ipndm-3": IPNDM(3), "ipndm-4": IPNDM(4)}
