r"""All coordinates: the exact divergence, for small dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes._pullback import Route, by_autograd
from steindiff.probes.base import Probe, Probed, flat_step, linear, rebuilt
from steindiff.tableau import Step


@dataclass(frozen=True)
class Exact(Probe):
    r"""div T = Σ_i ⟨Jᵀe_i, e_i⟩: one backward pass per coordinate.

    Args:
        limit: largest dimension d of one sample it accepts.
        route: how to linearise.
    """

    limit: int = 1024
    route: Route = by_autograd

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        d = x[0].numel()
        if d > self.limit:
            raise ValueError(f"x must have at most limit = {self.limit} dimensions, got {d}; each is a backward pass")
        if not step.tableau.stages:
            return linear(step, x, error=0.0)
        candidate, tensors, pull = self.route(partial(flat_step, step), x)
        divergence = x.new_zeros(len(x))
        for i in range(d):
            e = x.new_zeros(d)
            e[i] = 1.0
            divergence += pull(e.reshape(x.shape[1:]).expand_as(x)).flatten(1)[:, i]
        return Probed(
            candidate,
            rebuilt(step, tensors),
            divergence,
            torch.zeros_like(divergence),
            backward_passes=d * len(step.tableau.stages),
        )


VARIANTS = {"exact": Exact()}
