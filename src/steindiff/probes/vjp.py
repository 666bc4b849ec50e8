r"""Reverse mode: the default probe."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes._pullback import Route, by_autograd, by_functional, pullback
from steindiff.probes.base import Forms, Hutchinson, dot, flat_step, rebuilt
from steindiff.probes.memory import fitting
from steindiff.tableau import Step

__all__ = ["VARIANTS", "VJP", "by_autograd", "by_functional", "check_memory", "pullback"]


def check_memory(memory: int | None) -> None:
    """Refuse a limit below one byte."""
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be >= 1 (bytes) or None, got {memory}")


@dataclass(frozen=True)
class VJP(Hutchinson):
    r"""vᵀJv = ⟨Jᵀv, v⟩ by pulling v back through the one forward pass the step makes anyway.

    Costs no network call; m backward passes through every evaluation of the step. The graph of one pass is held while
    the directions are pulled back, `together` at a time.

    Args:
        route: how to linearise: `by_autograd`, or `by_functional` where weights are inference tensors.
        memory: bytes the linearised pass may take beyond what is held anyway; None: no limit. It sets how many samples
            are linearised at a time (never fewer than one), from the bytes one sample keeps, which are measured on
            the first two samples of the first step (two network calls). See `steindiff.probes.memory`.
        together: directions pulled back in one pass (`vmap`), m at most: the same numbers up to rounding. It pays where
            a batch is too small to fill the device, and costs the memory of so many gradients.
    """

    route: Route = by_autograd
    memory: int | None = None
    together: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_memory(self.memory)
        if self.together < 1:
            raise ValueError(f"together must be >= 1, got {self.together}")

    def samples(self, step: Step, x: Tensor) -> int:
        most = super().samples(step, x)
        return most if self.memory is None else min(most, fitting(step, x, self.memory, self._group))

    @property
    def _group(self) -> int:
        return min(self.together, self.probes)

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> Forms:
        candidate, tensors, pull = self.route(partial(flat_step, step), x)
        if self._group == 1:
            forms = torch.stack([dot(pull(row), row) for row in v])
        else:
            with warnings.catch_warnings():  # fused attention is looped over inside the pass, and torch says so
                warnings.filterwarnings("ignore", message=".*batching rule")
                pulled = torch.cat([torch.func.vmap(pull)(group) for group in v.split(self._group)])
            forms = (pulled * v).flatten(2).sum(2)
        return Forms(candidate, rebuilt(step, tensors), forms, 0, len(v) * len(step.tableau.stages))


VARIANTS = {
    "vjp": VJP(),
    "vjp-functional": VJP(route=by_functional),
    "vjp-together": VJP(together=5),
}
