r"""Adams–Bashforth methods on noise predictions ε_k = (x_k − α_k D_k)/σ_k: DEIS and iPNDM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steindiff.levels import Level, Levels
from steindiff.solvers.base import Solver, check_order, decay_moment, euler, lagrange, order_at
from steindiff.tableau import HERE, Row, Stage, Tableau


def adams_row(used: Sequence[Level], t: Level, weights: Sequence[float]) -> Row:
    r"""The row of x_t = α_t (x/α_s + Σ_k w_k ε_k), ε_0 at the current state, ε_k at the k-th past evaluation."""
    s = used[0]
    x = t.alpha * (1.0 / s.alpha + weights[0] / s.sigma)
    d = -t.alpha * weights[0] * s.alpha / s.sigma
    past = tuple(
        (t.alpha * w / level.sigma, -t.alpha * w * level.alpha / level.sigma)
        for w, level in zip(weights[1:], used[1:], strict=True)
    )
    return Row(x=x, d=(d,), past=past)


@dataclass(frozen=True)
class DEIS(Solver):
    r"""DEIS-ρAB/logρ: ε extrapolated in log σ̃ = −λ, integrated exactly over σ̃ = σ/α.

        x_t/α_t = x/α_s + Σ_k C_k ε_k,   C_k = ∫_{σ̃_s}^{σ̃_t} ℓ_k(log σ̃) dσ̃,   ε_k = (x_k − α_k D_k)/σ_k

    With τ = λ − λ_s the integral is −σ̃_s ∫₀^h e^{−τ} ℓ_k(τ) dτ, a sum of decaying moments.

    Reference: Zhang & Chen (2023), arXiv:2204.13902.
    """

    order: int = 3
    lower_order_final: bool = True

    def __post_init__(self) -> None:
        check_order(self.order, (1, 2, 3, 4))

    @property
    def memory(self) -> int:
        return self.order - 1

    def tableau(self, levels: Levels, i: int) -> Tableau:
        s, t = levels[i], levels[i + 1]
        order = order_at(self.order, levels, i, lower_order_final=self.lower_order_final)
        if order == 1:
            return Tableau((Stage(HERE, s),), euler(s, t))
        # A past level at λ = −∞ (pure noise) is infinitely far away: its polynomial vanishes, it drops out.
        used = [level for level in (levels[i - k] for k in range(order)) if math.isfinite(level.lam)]
        nodes = [level.lam - s.lam for level in used]
        moments = [decay_moment(k, t.lam - s.lam) for k in range(len(used))]
        factorial = [1.0, 1.0, 2.0, 6.0]
        weights = [
            -s.ratio * sum(c * factorial[k] * moments[k] for k, c in enumerate(lagrange(nodes, j)))
            for j in range(len(used))
        ]
        return Tableau((Stage(HERE, s),), adams_row(used, t, weights))


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

    References: Liu et al. (2022), arXiv:2202.09778; Zhang & Chen (2023), arXiv:2204.13902.
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


VARIANTS = {
    "deis-2": DEIS(2),
    "deis-3": DEIS(3),
    "deis-4": DEIS(4),
    "ipndm-2": IPNDM(2),
    "ipndm-3": IPNDM(3),
    "ipndm-4": IPNDM(4),
}
