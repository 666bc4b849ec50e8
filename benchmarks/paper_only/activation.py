r"""Other choices of the steps to correct than the paper's first K."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from steindiff._checks import at_least
from steindiff.corrections.relaxation import Activation, inner
from steindiff.levels import Levels

Need = Callable[[Levels, int], float]
"""How much step i of a run needs correction; only the order of the values matters."""


@dataclass(frozen=True)
class OnlySteps(Activation):
    """The steps named, counted from 0; negative ones count from the end (−1 is the last).

    Args:
        steps: their indices.
    """

    steps: tuple[int, ...]

    def __call__(self, levels: Levels, i: int) -> bool:
        for step in self.steps:
            if not -levels.steps <= step < levels.steps:
                raise ValueError(f"steps must lie within a run of {levels.steps} steps, got {step}")
        return i in {step % levels.steps for step in self.steps}


def log_step(levels: Levels, i: int) -> float:
    r"""λ_{i+1} − λ_i, the length of the step in log-SNR: the quantity all solvers' errors are expanded in."""
    return levels[i + 1].lam - levels[i].lam


@dataclass(frozen=True)
class Expansion:
    r"""The certificate's bound on L_T: σ_t/σ_s + (α_t − (σ_t/σ_s) α_s) L_i (Prop. 4.1).

    Args:
        lipschitz: L_D at the start of every step, e.g. measured with `steindiff.diagnostics.lipschitz`.
    """

    lipschitz: tuple[float, ...]

    def __call__(self, levels: Levels, i: int) -> float:
        if len(self.lipschitz) != levels.steps:
            raise ValueError(f"lipschitz must have one value a step ({levels.steps}), got {len(self.lipschitz)}")
        s, t = levels[i], levels[i + 1]
        r = t.sigma / s.sigma
        return r + (t.alpha - r * s.alpha) * self.lipschitz[i]


@dataclass(frozen=True)
class TopK(Activation):
    r"""The K steps that need it most: our variant of `FirstSteps`, for a measured need.

    Steps from α = 0 or to σ = 0 do not compete. Of equal needs the earlier step wins. By `log_step` an EDM grid gives
    its latest noisy steps, a log-SNR grid its earliest.

    Args:
        k: how many steps.
        need: what is compared: `log_step`, or `Expansion` with measured Lipschitz constants.
    """

    k: int = 3
    need: Need = log_step

    def __post_init__(self) -> None:
        at_least("k", self.k, 1)

    def __call__(self, levels: Levels, i: int) -> bool:
        # Rounding in a grid must not decide between steps that are equal by construction.
        needs = {j: float(f"{self.need(levels, j):.9g}") for j in range(levels.steps) if inner(levels, j)}
        return i in sorted(needs, key=lambda j: (-needs[j], j))[: self.k] and math.isfinite(needs[i])
