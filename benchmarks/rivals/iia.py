r"""IIA: scalar weights of a step by least squares to the model's own fine steps from the same state.

Written as our alignment with one band: no weights of samples, no ridge, no test of significance, no energy balance.
What differs from our own fit is one band for all frequencies, and that the goal starts at the coarse state.

References:
    On Accelerating Diffusion-Based Sampling Process via Improved Integration Approximation (Zhang et al., 2024),
    arXiv:2304.11328.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.bases import Identity
from steindiff.corrections import Correction
from steindiff.corrections.alignment import Alignment, Groups
from steindiff.corrections.base import Transition
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.solvers.base import Solver
from steindiff.solvers.dpmpp import DPMSolverMultistep
from steindiff.tableau import Step


def least_squares(shape: tuple[int, ...], goal: Tensor, terms: int) -> Alignment:
    """Plain least squares with scalar weights towards `goal`, `(N, *)`."""
    everyone = Groups.of([None] * len(goal))
    return Alignment(
        Identity(shape), lambda level: goal, everyone, below=0.0, significance=0.0, terms=terms, tail=1e5, ridge=0.0
    )


@dataclass(frozen=True)
class IIA(Correction):
    """Fit a step's weights to `substeps` fine steps from the state it starts at; run once, then replay.

    Args:
        substeps: fine steps in each coarse one, evenly in log-SNR.
        terms: how many differences of denoised images may be used beside the solver's own image.
        fine: the solver of the fine steps.
    """

    substeps: int = 8
    terms: int = 2
    fine: Solver = field(default_factory=lambda: DPMSolverMultistep(2))

    @property
    def memory(self) -> int:
        return self.terms + 1

    @torch.no_grad()
    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        s, t = levels[i], levels[i + 1]
        # log-SNR is infinite at σ = 0: go there from the schedule's smallest level, where that is still below.
        end = t if t.sigma > 0.0 else levels.schedule.level(levels.schedule.t_min)
        lams = [s.lam + (end.lam - s.lam) * k / self.substeps for k in range(1, self.substeps)]
        inner = [*map(levels.schedule.at, lams), *[end] * (end is not t)] if end.ratio < s.ratio else []
        fine = Levels((s, *inner, t), levels.schedule)
        goal = sample(step.denoiser, x, fine, self.fine).x
        return least_squares(tuple(x.shape[1:]), goal, self.terms)(step, x, levels, i)
