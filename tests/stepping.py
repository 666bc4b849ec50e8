"""Steps in the middle of a run, and the digits problem, shared by the tests of probes and corrections."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from problems import FLOAT
from steindiff.denoisers import Denoiser, Empirical
from steindiff.levels import Level, Levels
from steindiff.solvers import SOLVERS, Solver
from steindiff.tableau import Evaluation, Step

PAPER_SOLVERS: dict[str, Solver] = {
    name: SOLVERS[name] for name in ("ddim", "dpmpp-2m", "dpmpp-3m", "unipc-bh1-2", "unipc-bh2-3", "heun")
}
"""The hosts of the paper."""


def step_at(solver: Solver, denoiser: Denoiser, levels: Levels, i: int, x: Tensor) -> tuple[Step, Tensor]:
    """Step i of a plain run from `x`, with the state it starts at."""
    history: tuple[Evaluation, ...] = ()
    for k in range(i):
        x, evaluations = Step(solver.tableau(levels, k), denoiser, history)(x)
        history = (*reversed(evaluations), *history)[: solver.memory]
    return Step(solver.tableau(levels, i), denoiser, history), x


def coupled(clean: Tensor, level: Level, generator: torch.Generator) -> Tensor:
    """States α x* + σ ε for clean data x*, `(B, *)`."""
    return level.alpha * clean + level.sigma * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)


def step_from_coupling(
    solver: Solver, denoiser: Denoiser, levels: Levels, i: int, clean: Tensor, generator: torch.Generator
) -> Step:
    """Step i with a history drawn from the forward coupling: every past state has fresh noise on the same x*."""
    history: list[Evaluation] = []
    for k in range(i):
        tableau = solver.tableau(levels, k)
        for stage in tableau.stages:
            x = coupled(clean, stage.level, generator)
            history.insert(0, Evaluation(x, denoiser(x, stage.level), stage.level))
    return Step(solver.tableau(levels, i), denoiser, tuple(history[: solver.memory]))


@cache
def digits() -> Tensor:
    """1,797 real 8×8 images in [−1, 1], `(1797, 64)`."""
    return torch.from_numpy(load_digits().data).to(FLOAT) / 8.0 - 1.0


def digits_denoiser() -> Empirical:
    return Empirical(digits())
