r"""At which steps a correction acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from steindiff._checks import at_least
from steindiff.levels import Levels


class Activation(ABC):
    """Which steps are corrected. Children are frozen dataclasses."""

    @abstractmethod
    def __call__(self, levels: Levels, i: int) -> bool:
        """Whether step i, from levels[i] to levels[i + 1], is corrected."""


def inner(levels: Levels, i: int) -> bool:
    """Whether step i starts with signal and ends with noise: α > 0 before it, σ > 0 after it."""
    return levels[i].alpha > 0.0 and levels[i + 1].sigma > 0.0


@dataclass(frozen=True)
class EveryStep(Activation):
    r"""Every step, except the one to σ = 0 unless asked for.

    A relaxed step to σ = 0 keeps a share 1 − γ of a noisy state in the final sample; at γ = 1 there is none.

    Args:
        to_zero: also act on the step to σ = 0, as the paper's algorithm reads.
    """

    to_zero: bool = False

    def __call__(self, levels: Levels, i: int) -> bool:
        return self.to_zero or levels[i + 1].sigma > 0.0


@dataclass(frozen=True)
class FirstSteps(Activation):
    r"""The first K steps: the paper's sparse activation, "K <= 3 for early/high-noise stages".

    Steps from α = 0 or to σ = 0 are not counted.

    Args:
        k: how many steps.
    """

    k: int = 3

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def __call__(self, levels: Levels, i: int) -> bool:
        return inner(levels, i) and sum(inner(levels, j) for j in range(i)) < self.k
