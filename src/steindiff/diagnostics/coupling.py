r"""States whose clean image is known: x = α x* + σ ε."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.schedules.base import Schedule
from steindiff.solvers.base import Solver
from steindiff.solvers.heun import Heun
from steindiff.tableau import Evaluation, Step

Flow = Callable[[Tensor, Level, Level], Tensor]
"""The probability flow from one level to another, states `(B, *)` to `(B, *)`."""

REACH = 10.0
"""How far in λ beyond 0 a fine flow goes where an end is infinite: σ/α = e^±10."""


def couple(clean: Tensor, level: Level, generator: torch.Generator) -> Tensor:
    """Draw states α x* + σ ε, `(B, *)`, for clean data of that shape."""
    noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype, device=generator.device)
    return level.alpha * clean + level.sigma * noise.to(clean.device)


def ideal_step(
    denoiser: Denoiser, clean: Tensor, levels: Levels, i: int, solver: Solver, generator: torch.Generator
) -> Step:
    r"""Step i as Theorem 4.7 wants it: every past state is α x* + σ ε on the same x*, with an ε of its own.

    In a real run the past states share their noise with the present one, and Stein's identity with the history held
    fixed is off by the derivative through it.
    """
    history: list[Evaluation] = []
    for k in range(i):
        for stage in solver.tableau(levels, k).stages:
            x = couple(clean, stage.level, generator)
            history.insert(0, Evaluation(x, denoiser(x, stage.level), stage.level))
    return Step(solver.tableau(levels, i), denoiser, tuple(history[: solver.memory]))


def fine_flow(denoiser: Denoiser, schedule: Schedule, steps: int = 64) -> Flow:
    """The probability flow by Heun's method in `steps` small steps, even in log-SNR."""

    def flow(x: Tensor, s: Level, t: Level) -> Tensor:
        last = t.lam if math.isfinite(t.lam) else max(s.lam, 0.0) + REACH
        first = s.lam if math.isfinite(s.lam) else min(t.lam, 0.0) - REACH
        inner = [schedule.at(first + (last - first) * k / steps) for k in range(1, steps)]
        if not math.isfinite(t.lam):
            inner.append(schedule.at(last))
        return sample(denoiser, x, Levels((s, *inner, t), schedule), Heun()).x

    return flow
