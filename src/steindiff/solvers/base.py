r"""What a solver is: a rule that maps levels to tables. It contains no tensor code."""

from __future__ import annotations

from abc import ABC, abstractmethod

from steindiff.levels import Level, Levels, linear
from steindiff.tableau import Row, Tableau

FEW_STEPS = 15
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
    if lower_order_final and levels.steps < FEW_STEPS:
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
