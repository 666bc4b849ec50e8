"""Steps in the middle of a run, and the digits problem, shared by the tests of probes and corrections."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from networks.mixture import Empirical
from problems import FLOAT
from steindiff.denoisers import Denoiser
from steindiff.levels import Levels
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


@cache
def digits() -> Tensor:
    """1,797 real 8×8 images in [−1, 1], `(1797, 64)`."""
    return torch.from_numpy(load_digits().data).to(FLOAT) / 8.0 - 1.0


def digits_denoiser() -> Empirical:
    return Empirical(digits())
