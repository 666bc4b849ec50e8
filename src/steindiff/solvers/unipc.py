r"""UniPC: a predictor and a corrector of one order more, at one evaluation a step."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from steindiff.levels import Level, Levels, linear
from steindiff.solvers.base import Solver, check_order, order_at, phi
from steindiff.tableau import HERE, Row, Stage, Tableau


@dataclass(frozen=True)
class UniPC(Solver):
    r"""Predict, evaluate at the target, correct (the authors' boundary of a step).

    The first step also evaluates at its start, the last one only predicts: N steps cost N evaluations. The
    evaluation at the predicted target serves the next step as its current one. With h = λ_t − λ_s, differences
    D_k = (m_k − m_0)/r_k, r_k = (λ_k − λ_s)/h for past k and r = 1 for the target, and a function B(h) = O(h),

        x_t = (σ_t/σ_s) x + α_t h φ₁(−h) m_0 + α_t |B(h)| Σ_k a_k D_k,   Σ_k a_k r_k^{n−1} = n! h φ_{n+1}(−h)/|B(h)|.

    The predictor sums over past k, the corrector over past k and the target. Predictor order p; with the
    corrector the method is of order p + 1.

    Args:
        predictor_order: 1, 2 or 3.
        corrector: also correct; otherwise this is UniP, which evaluates at the start of every step.
        lower_order_final: lower the order on the last steps, as the public implementations do.

    Reference: Zhao et al. (2023), arXiv:2302.04867.
    """

    predictor_order: int = 2
    corrector: bool = True
    lower_order_final: bool = True

    def __post_init__(self) -> None:
        check_order(self.predictor_order, (1, 2, 3))

    @property
    def order(self) -> int:
        return self.predictor_order + self.corrector

    @property
    def memory(self) -> int:
        return self.predictor_order if self.corrector else self.predictor_order - 1

    @abstractmethod
    def scale(self, h: float) -> float:
        """The function |B(h)|."""

    def weights(self, used: list[Level], t: Level, *, corrected: bool) -> list[float]:
        """Weights of m_0, m_1, … and, if `corrected`, of the target's denoised image last."""
        s = used[0]
        first = linear(s, t).b
        h = t.lam - s.lam
        # A past level at λ = −∞ has r_k = −∞ and D_k = 0: it drops out.
        kept = [k for k in range(1, len(used)) if math.isfinite(used[k].lam)]
        ratios = [(used[k].lam - s.lam) / h for k in kept] + [1.0] * corrected
        total = [first, *[0.0] * (len(used) - 1 + corrected)]
        if len(ratios) < 2:
            a = [0.5] * len(ratios)  # the authors' choice: free of h, still of second order
        else:
            right = [math.factorial(n) * h * phi(n + 1, -h) / self.scale(h) for n in range(1, len(ratios) + 1)]
            a = np.linalg.solve(np.vander(ratios, increasing=True).T, right).tolist()
        for k, weight, ratio in zip([*kept, len(used)][: len(ratios)], a, ratios, strict=True):
            share = t.alpha * self.scale(h) * weight / ratio
            total[k] += share
            total[0] -= share
        return total

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        # Unlike the others, public UniPC lowers the order at the end whatever the number of steps.
        order = order_at(self.predictor_order, levels, i, lower_order_final=False)
        if self.lower_order_final:
            order = min(order, levels.steps - i)
        used = [levels[i - k] for k in range(order)]
        r = linear(s, t).r
        predicted = self.weights(used, t, corrected=False)
        fresh = not self.corrector or i == 0  # is m_0 evaluated in this step?
        stages = (Stage(HERE, s),) if fresh else ()
        row = self._row(r, predicted, fresh=fresh)
        if not self.corrector or i == levels.steps - 1:
            return Tableau(stages, row)
        if s.alpha == 0.0:  # h is infinite: nothing to correct with, but the evaluation serves the next step
            return Tableau((*stages, Stage(row, t)), row)
        *known, target = self.weights(used, t, corrected=True)
        output = self._row(r, known, fresh=fresh)
        return Tableau((*stages, Stage(row, t)), output._replace(d=(*output.d, target)))

    @staticmethod
    def _row(r: float, m: list[float], *, fresh: bool) -> Row:
        """A row with weights m_0, m_1, …, where m_0 is this step's stage or the newest past evaluation."""
        d, past = (m[:1], m[1:]) if fresh else ([], m)
        return Row(x=r, d=tuple(d), past=tuple((0.0, w) for w in past))


@dataclass(frozen=True)
class UniPCBh1(UniPC):
    r"""UniPC with |B(h)| = h, recommended by the authors for unconditional sampling at few steps."""

    def scale(self, h: float) -> float:
        return h


@dataclass(frozen=True)
class UniPCBh2(UniPC):
    r"""UniPC with |B(h)| = 1 − e^{−h}, recommended by the authors for guided sampling."""

    def scale(self, h: float) -> float:
        return -math.expm1(-h)


VARIANTS = {
    **{f"unipc-bh1-{p}": UniPCBh1(p) for p in (1, 2, 3)},
    **{f"unipc-bh2-{p}": UniPCBh2(p) for p in (1, 2, 3)},
    **{f"unip-bh1-{p}": UniPCBh1(p, corrector=False) for p in (2, 3)},
    **{f"unip-bh2-{p}": UniPCBh2(p, corrector=False) for p in (2, 3)},
}
