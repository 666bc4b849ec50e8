r"""At which steps a correction acts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from steindiff.levels import Levels

Need = Callable[[Levels, int], float]
"""How much step i of a run needs correction; only the order of the values matters."""


class Activation(ABC):
    """Which steps are corrected. Children are frozen dataclasses."""

    @abstractmethod
    def __call__(self, levels: Levels, i: int) -> bool:
        """Whether step i, from levels[i] to levels[i + 1], is corrected."""


def inner(levels: Levels, i: int) -> bool:
    """Whether step i starts with signal and ends with noise: α > 0 before it, σ > 0 after it."""
    return levels[i].alpha > 0.0 and levels[i + 1].sigma > 0.0


@dataclass(frozen=True)
class EveryStep(Activation):
    r"""Every step, except the one to σ = 0 unless asked for.

    A relaxed step to σ = 0 keeps a share 1 − γ of a noisy state in the final sample; at γ = 1 there is none.

    Args:
        to_zero: also act on the step to σ = 0, as the paper's algorithm reads.
    """

    to_zero: bool = False

    def __call__(self, levels: Levels, i: int) -> bool:
        return self.to_zero or levels[i + 1].sigma > 0.0


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


def check_count(k: int) -> None:
    """Refuse to correct fewer than one step."""
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")


@dataclass(frozen=True)
class FirstSteps(Activation):
    r"""The first K steps: the paper's sparse activation, "K <= 3 for early/high-noise stages".

    Steps from α = 0 or to σ = 0 are not counted.

    Args:
        k: how many steps.
    """

    k: int = 3

    def __post_init__(self) -> None:
        check_count(self.k)

    def __call__(self, levels: Levels, i: int) -> bool:
        return inner(levels, i) and sum(inner(levels, j) for j in range(i)) < self.k


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
        check_count(self.k)

    def __call__(self, levels: Levels, i: int) -> bool:
        # Rounding in a grid must not decide between steps that are equal by construction.
        needs = {j: float(f"{self.need(levels, j):.9g}") for j in range(levels.steps) if inner(levels, j)}
        return i in sorted(needs, key=lambda j: (-needs[j], j))[: self.k] and math.isfinite(needs[i])
