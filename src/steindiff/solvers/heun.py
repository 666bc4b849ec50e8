r"""Heun's method in σ/α, the sampler of EDM."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff.levels import Levels
from steindiff.solvers.base import Solver, euler
from steindiff.tableau import HERE, Row, Stage, Tableau


@dataclass(frozen=True)
class Heun(Solver):
    r"""Trapezoidal rule for dy/dσ̃ = (y − D)/σ̃ with y = x/α, σ̃ = σ/α.

    With q = σ̃_t/σ̃_s and D_2 evaluated at the Euler step:

        x_t = (σ_t/σ_s) x + α_t (1 − q)(2 − 1/q)/2 · D_1 + α_t (1/q − 1)/2 · D_2

    A step costs two evaluations; one to σ = 0 or from α = 0 is an Euler step and costs one.

    Reference: Karras et al. (2022), arXiv:2206.00364, Alg. 1.
    """

    order = 2

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        here, predicted = Stage(HERE, s), euler(s, t)
        if t.sigma == 0.0 or s.alpha == 0.0:
            return Tableau((here,), predicted)
        q = t.ratio / s.ratio
        first = 0.5 * t.alpha * (1.0 - q) * (2.0 - 1.0 / q)
        second = 0.5 * t.alpha * (1.0 / q - 1.0)
        return Tableau((here, Stage(predicted, t)), Row(x=predicted.x, d=(first, second)))


VARIANTS = {"heun": Heun()}
