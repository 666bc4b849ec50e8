r"""DEIS: exponential Adams–Bashforth on the noise prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.levels import Levels
from steindiff.phi import decay_moment, lagrange
from steindiff.solvers.base import Solver, check_order, euler, order_at
from steindiff.solvers.noise import adams_row
from steindiff.tableau import HERE, Stage, Tableau


@dataclass(frozen=True)
class DEIS(Solver):
    r"""DEIS-ρAB/logρ: ε extrapolated in log σ̃ = −λ, integrated exactly over σ̃ = σ/α.

        x_t/α_t = x/α_s + Σ_k C_k ε_k,   C_k = ∫_{σ̃_s}^{σ̃_t} ℓ_k(log σ̃) dσ̃,   ε_k = (x_k − α_k D_k)/σ_k

    With τ = λ − λ_s the integral is −σ̃_s ∫₀^h e^{−τ} ℓ_k(τ) dτ, a sum of decaying moments.

    Args:
        order: 1 to 4.
        lower_order_final: lower the order on the last steps of runs below 15 steps, as public implementations do.

    References:
        Fast Sampling of Diffusion Models with Exponential Integrator (Zhang & Chen, 2023), arXiv:2204.13902.
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


VARIANTS = {"deis-2": DEIS(2), "deis-3": DEIS(3), "deis-4": DEIS(4)}
