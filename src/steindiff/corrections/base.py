r"""What a correction is: it wraps a solver's step and decides the next state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Plain(Correction):
    r"""x_next = T(x)."""

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        return Transition(*step(x))


Hook = Callable[[Step, Tensor, Levels, int], None]
"""Sees step i before it is taken at the states x, `(B, *)`: what a correction sees."""


@dataclass(frozen=True)
class WithHook(Correction):
    r"""Another correction, after `hook` has seen step and state: so diagnostics run in the one sampling loop."""

    hook: Hook
    correction: Correction = field(default_factory=Plain)

    @property
    def memory(self) -> int:
        return self.correction.memory

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        self.hook(step, x, levels, i)
        return self.correction(step, x, levels, i)


VARIANTS = {"plain": Plain()}
