r"""DPM-Solver++, singlestep."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff.levels import Level, Levels, linear
from steindiff.phi import phi
from steindiff.solvers.base import Solver, check_order, euler
from steindiff.tableau import HERE, Row, Stage, Tableau


def midpoint(s: Level, middle: Level, t: Level) -> Row:
    r"""DPM-Solver++(2S) from s to t with the second evaluation at `middle`.

    x_t = (σ_t/σ_s) x + α_t h φ₁(−h) (m_0 + (m_1 − m_0)/(2 r)), r = (λ_middle − λ_s)/(λ_t − λ_s).
    """
    r, weight = linear(s, t)
    lean = 0.5 * (t.lam - s.lam) / (middle.lam - s.lam)
    return Row(x=r, d=(weight * (1.0 - lean), weight * lean))


@dataclass(frozen=True)
class DPMSolverSinglestep(Solver):
    r"""DPM-Solver++(2S, 3S): a step evaluates D again at levels inside it and keeps no memory.

    2S evaluates at λ_s + h/2; 3S at λ_s + h/3 and λ_s + 2h/3, the latter reached by 2S, and ends with
    x_t = (σ_t/σ_s) x + α_t h φ₁(−h) m_0 + α_t h φ₂(−h) (m_2 − m_0)/(2/3).
    A step to σ = 0 or from α = 0 has no inside in λ and is of first order.

    Args:
        order: 2 or 3, also the number of evaluations a step costs.

    References:
        DPM-Solver++: Fast Solver for Guided Sampling of Diffusion Probabilistic Models (Lu et al., 2022),
        arXiv:2211.01095.
    """

    order: int = 2

    def __post_init__(self) -> None:
        check_order(self.order, (2, 3))

    @property
    def memory(self) -> int:
        return 0

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        here = Stage(HERE, s)
        if t.sigma == 0.0 or s.alpha == 0.0:
            return Tableau((here,), euler(s, t))
        inner = [levels.between(i, k / self.order) for k in range(1, self.order)]
        first = Stage(euler(s, inner[0]), inner[0])
        if self.order == 2:
            return Tableau((here, first), midpoint(s, inner[0], t))
        second = Stage(midpoint(s, inner[0], inner[1]), inner[1])
        h = t.lam - s.lam
        r, b = linear(s, t)
        slope = t.alpha * h * phi(2, -h) * h / (inner[1].lam - s.lam)
        return Tableau((here, first, second), Row(x=r, d=(b - slope, 0.0, slope)))


VARIANTS = {"dpmpp-2s": DPMSolverSinglestep(2), "dpmpp-3s": DPMSolverSinglestep(3)}
