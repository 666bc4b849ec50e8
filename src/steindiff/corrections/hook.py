r"""Watching a run: something is measured at every step, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from steindiff.corrections.base import Correction, Transition
from steindiff.corrections.plain import Plain
from steindiff.levels import Levels
from steindiff.tableau import Step

Hook = Callable[[Step, Tensor, Levels, int], None]
"""Sees step i before it is taken at the states x, `(B, *)`: what a correction sees."""


@dataclass(frozen=True)
class WithHook(Correction):
    r"""Another correction, after `hook` has seen step and state: so diagnostics run in the one sampling loop.

    Args:
        hook: called before every step.
        correction: takes the step.
    """

    hook: Hook
    correction: Correction = field(default_factory=Plain)

    @property
    def memory(self) -> int:
        return self.correction.memory

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        self.hook(step, x, levels, i)
        return self.correction(step, x, levels, i)
