r"""What a solver is: a rule that maps levels to tables. It contains no tensor code.

Below it the scalar functions of exponential integrators, exact to rounding for every step size, ∞ included.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from steindiff.levels import Level, Levels, linear
from steindiff.tableau import Row, Tableau

LOWERED_BELOW = 15
"""Below this number of steps public multistep implementations lower the order at the end of a run."""


class Solver(ABC):
    """A numerical method for the probability-flow ODE. Children are frozen dataclasses."""

    @property
    @abstractmethod
    def order(self) -> int:
        """Order of convergence in the step size, history at hand, as claimed and checked by the contract tests."""

    @property
    def memory(self) -> int:
        """How many past evaluations a table may refer to."""
        return 0

    @abstractmethod
    def tableau(self, levels: Levels, i: int) -> Tableau:
        """The table of step i, from levels[i] to levels[i + 1], given the evaluations of all steps before it."""

    def calls(self, levels: Levels) -> int:
        """How often a run over `levels` evaluates the denoiser."""
        return sum(len(self.tableau(levels, i).stages) for i in range(levels.steps))


def order_at(order: int, levels: Levels, i: int, *, lower_order_final: bool) -> int:
    """Order of step i of a multistep method: limited by the history there is and, if asked, by the steps left.

    A step to σ = 0 is of first order: there λ is infinite, and the exact first-order step is x = D.
    """
    allowed = min(order, i + 1)
    if levels[i + 1].sigma == 0.0:
        return 1
    if lower_order_final and levels.steps < LOWERED_BELOW:
        allowed = min(allowed, levels.steps - i)
    return allowed


def euler(s: Level, t: Level) -> Row:
    r"""The first-order step T = r x + (α_t − r α_s) D with r = σ_t/σ_s (DDIM), D the step's first stage."""
    r, b = linear(s, t)
    return Row(x=r, d=(b,))


def check_order(order: int, allowed: tuple[int, ...]) -> None:
    """Refuse an order outside `allowed`."""
    if order not in allowed:
        raise ValueError(f"order must be one of {', '.join(map(str, allowed))}, got {order!r}")


def phi(k: int, z: float) -> float:
    r"""φ_k(z) for z <= 0: φ_0 = e^z, φ_{k+1}(z) = (φ_k(z) − 1/k!)/z, φ_k(0) = 1/k!.

    The recurrence cancels near 0, so there the series Σ_j z^j/(j + k)! takes over.

    Reference: Hochbruck & Ostermann (2010), Acta Numerica 19.
    """
    if z < -1.0:
        value = math.exp(z)
        for j in range(k):
            value = (value - 1.0 / math.factorial(j)) / z
        return value
    term = total = 1.0 / math.factorial(k)
    for j in range(1, 24):
        term *= z / (j + k)
        total += term
    return total


def decay_moment(k: int, h: float) -> float:
    r"""∫₀^h e^{−τ} τ^k/k! dτ = 1 − e^{−h} Σ_{j ≤ k} h^j/j!; equals 1 at h = ∞."""
    if math.isinf(h):
        return 1.0
    # e^{−h} h^{k+1} Σ_j h^j/(j + k + 1)!: all terms positive, nothing cancels; converges fast for h of a step.
    if h > 30.0:
        return 1.0 - math.exp(-h) * sum(h**j / math.factorial(j) for j in range(k + 1))
    term = total = h ** (k + 1) / math.factorial(k + 1)
    j = k + 2
    while term > total * 1e-18:
        term *= h / j
        total += term
        j += 1
    return math.exp(-h) * total


def lagrange(nodes: list[float], j: int) -> list[float]:
    r"""Coefficients (lowest power first) of the Lagrange polynomial that is 1 at nodes[j] and 0 at the others."""
    poly = [1.0]
    for m, node in enumerate(nodes):
        if m == j:
            continue
        scale = 1.0 / (nodes[j] - node)
        shifted = [0.0, *poly]
        poly = [scale * (a - node * b) for a, b in zip(shifted, [*poly, 0.0], strict=True)]
    return poly
