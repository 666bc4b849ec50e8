r"""No correction: the solver as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Levels
from steindiff.tableau import Step


@dataclass(frozen=True)
class Plain(Correction):
    r"""x_next = T(x)."""

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        return Transition(*step(x))


VARIANTS = {"plain": Plain()}
