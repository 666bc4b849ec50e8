r"""What a correction is: it wraps a solver's step and decides the next state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from steindiff.levels import Levels
from steindiff.tableau import Evaluation, Step


class Transition(NamedTuple):
    """A corrected step: the next state `(B, *)`, the evaluations made, what was measured, and what it cost."""

    x: Tensor
    evaluations: tuple[Evaluation, ...]
    statistics: Mapping[str, Any] = {}
    backward_passes: int = 0


class Correction(ABC):
    """Turns a solver's proposal T(x) into the next state. Corrections keep no state between steps."""

    @property
    def memory(self) -> int:
        """How many evaluations of earlier steps it wants to see in `step.history`, beside those the solver needs."""
        return 0

    @abstractmethod
    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        """Take step i, from levels[i] to levels[i + 1], at the states `x`, `(B, *)`."""
