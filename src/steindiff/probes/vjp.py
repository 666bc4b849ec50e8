r"""Reverse mode: the default probe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.base import Forms, Hutchinson, dot, flat_step, rebuilt
from steindiff.probes.pullback import Route, by_autograd, by_functional, pullback
from steindiff.tableau import Step

__all__ = ["VARIANTS", "VJP", "by_autograd", "by_functional", "pullback"]


@dataclass(frozen=True)
class VJP(Hutchinson):
    r"""vᵀJv = ⟨Jᵀv, v⟩ by pulling v back through the one forward pass the step makes anyway.

    Costs no network call; m backward passes through every evaluation of the step. The graph of one pass is held while
    the directions are pulled back one after the other.

    Args:
        route: how to linearise: `by_autograd`, or `by_functional` where weights are inference tensors.
    """

    route: Route = by_autograd

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> Forms:
        candidate, tensors, pull = self.route(partial(flat_step, step), x)
        forms = torch.stack([dot(pull(row), row) for row in v])
        return Forms(candidate, rebuilt(step, tensors), forms, 0, len(v) * len(step.tableau.stages))


VARIANTS = {"vjp": VJP(), "vjp-functional": VJP(route=by_functional)}
