r"""DPM-Solver++, multistep and singlestep."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Level, Levels, linear
from steindiff.solvers.base import Solver, check_order, euler, order_at, phi
from steindiff.tableau import HERE, Row, Stage, Tableau


@dataclass(frozen=True)
class DPMSolverMultistep(Solver):
    r"""DPM-Solver++(1, 2M, 3M): D is extrapolated in λ from the evaluations of earlier steps.

    With h = λ_t − λ_s, m_k the denoised images (m_0 now, m_1 one step ago), r_k = (λ_k − λ_{k+1})/h and the divided
    differences D¹_k = (m_k − m_{k+1})/r_k:

        order 1:  x_t = (σ_t/σ_s) x + α_t h φ₁(−h) m_0
        order 2:  … + α_t (h φ₁(−h)/2) D¹_0                                   (the "midpoint" form)
        order 3:  … + α_t h φ₂(−h) D¹ + α_t h φ₃(−h) D²,
                  D¹ = D¹_0 + r_0/(r_0 + r_1) (D¹_0 − D¹_1),  D² = (D¹_0 − D¹_1)/(r_0 + r_1)

    The published third-order form weighs D² with half of what the quadratic through three points asks for, and so
    converges at order 2 (measured: tests/contracts/test_solvers.py); we keep it, since it is what everybody runs
    under that name. `UniPC(3, corrector=False)` is the same idea at true third order.

    Args:
        nominal_order: 1, 2 (2M) or 3 (3M), the number of evaluations combined.
        lower_order_final: lower the order on the last steps of runs below 15 steps, as public implementations do.

    Reference: Lu et al. (2022), arXiv:2211.01095.
    """

    nominal_order: int = 2
    lower_order_final: bool = True

    def __post_init__(self) -> None:
        check_order(self.nominal_order, (1, 2, 3))

    @property
    def order(self) -> int:
        return min(self.nominal_order, 2)

    @property
    def memory(self) -> int:
        return self.nominal_order - 1

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        order = order_at(self.nominal_order, levels, i, lower_order_final=self.lower_order_final)
        h = t.lam - s.lam
        r, first = linear(s, t)  # first = α_t h φ₁(−h), also right where λ is infinite
        m = [first, 0.0, 0.0]
        if order >= 2:
            # A past level at λ = −∞ (pure noise) has r_k = ∞: its divided difference vanishes.
            r0 = (s.lam - levels[i - 1].lam) / h
            if order == 2:
                m[0] += 0.5 * first / r0
                m[1] -= 0.5 * first / r0
            else:
                r1 = (levels[i - 1].lam - levels[i - 2].lam) / h
                d10 = (1.0 / r0, -1.0 / r0, 0.0)
                d11 = (0.0, 1.0 / r1, -1.0 / r1)
                gap = [a - b for a, b in zip(d10, d11, strict=True)]
                lean, bend = (0.0, 0.0) if math.isinf(r1) else (r0 / (r0 + r1), 1.0 / (r0 + r1))
                w1, w2 = t.alpha * h * phi(2, -h), t.alpha * h * phi(3, -h)
                m = [m[k] + w1 * (d10[k] + lean * gap[k]) + w2 * bend * gap[k] for k in range(3)]
        past = tuple((0.0, w) for w in m[1:order])
        return Tableau((Stage(HERE, s),), Row(x=r, d=(m[0],), past=past))


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

    Reference: Lu et al. (2022), arXiv:2211.01095.
    """

    order: int = 2

    def __post_init__(self) -> None:
        check_order(self.order, (2, 3))

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


VARIANTS = {
    "dpmpp-1": DPMSolverMultistep(1),
    "dpmpp-2m": DPMSolverMultistep(2),
    "dpmpp-3m": DPMSolverMultistep(3),
    "dpmpp-2s": DPMSolverSinglestep(2),
    "dpmpp-3s": DPMSolverSinglestep(3),
}
