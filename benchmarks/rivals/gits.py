r"""The GITS grid: the cheapest path through a fine trajectory, by dynamic programming."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from steindiff.grids.base import Grid
from steindiff.levels import Levels
from steindiff.schedules.base import Schedule


class FineTrajectory(Protocol):
    """Levels, the states `(N, *)` at all of them, and the denoised images `(N, *)` at all but the last."""

    @property
    def levels(self) -> Levels: ...
    @property
    def states(self) -> tuple[Tensor, ...]: ...
    @property
    def denoised(self) -> tuple[Tensor, ...]: ...


@torch.no_grad()
def jump_costs(path: FineTrajectory, device: torch.device | str | None = None) -> tuple[tuple[float, ...], ...]:
    r"""What one first-order step costs between any two levels: c_ij = E‖r x_i + (α_j − r α_i) D_i − x_j‖, r = σ_j/σ_i.

    Args:
        path: the fine trajectory. Forward passes made it; none are made here.
        device: where to compute; default: where the trajectory is kept.

    Returns:
        Row i holds c_{i,i+1}, c_{i,i+2}, …, to the last level.
    """
    rows = []
    for i, s in enumerate(path.levels[:-1]):
        x, d = path.states[i].to(device), path.denoised[i].to(device)
        row = []
        for t, y in zip(path.levels[i + 1 :], path.states[i + 1 :], strict=True):
            r = t.sigma / s.sigma
            row.append((r * x + (t.alpha - r * s.alpha) * d - y.to(x)).flatten(1).norm(dim=1).double().mean())
        rows.append(tuple(torch.stack(row).tolist()))
    return tuple(rows)


@dataclass(frozen=True)
class GITS(Grid):
    r"""The n steps over a fine trajectory's levels with the least V_n(0), V_k(i) = min_j c_ij + γ V_{k−1}(j).

    γ > 1 counts an error more the later it is made. `GITS.of(path)` measures the costs once, for every number of steps.

    Args:
        points: times of the fine trajectory's levels, from noise to data, without σ = 0.
        cost: see `jump_costs`; with `to_zero` the last level is σ = 0.
        coefficient: γ > 0; 1 is the plain sum of the costs.
        to_zero: whether the fine trajectory ends at σ = 0.

    References:
        On the Trajectory Regularity of ODE-based Diffusion Sampling (Chen et al., 2024), arXiv:2405.11326.
    """

    points: tuple[float, ...]
    cost: tuple[tuple[float, ...], ...] = field(repr=False)
    coefficient: float = 1.15
    to_zero: bool = False

    def __post_init__(self) -> None:
        size = len(self.points) + self.to_zero
        if size < 2 or [len(row) for row in self.cost] != list(range(size - 1, 0, -1)):
            raise ValueError(f"cost must hold {size - 1}, …, 1 costs for {size} levels, got {len(self.cost)} rows")
        if not all(math.isfinite(c) and c >= 0 for row in self.cost for c in row):
            raise ValueError("cost must be finite and >= 0")
        if not 0 < self.coefficient < math.inf:
            raise ValueError(f"coefficient must be finite and > 0, got {self.coefficient}")

    @classmethod
    def of(cls, path: FineTrajectory, coefficient: float = 1.15, device: torch.device | str | None = None) -> GITS:
        """The grid that follows from a fine trajectory; the paper's has 60 steps and 256 samples."""
        to_zero = path.levels[-1].sigma == 0.0
        visited = path.levels[:-1] if to_zero else path.levels[:]
        return cls(tuple(level.t for level in visited), jump_costs(path, device), coefficient, to_zero)

    def path(self, steps: int) -> tuple[int, ...]:
        """The levels visited by the best path of that many steps, as indices into the fine trajectory's."""
        last = len(self.cost)
        if not 1 <= steps <= last:
            raise ValueError(f"steps must be 1 to {last}, the steps of the fine trajectory, got {steps}")
        value = [math.inf] * last + [0.0]
        choices: list[list[int]] = []
        for _ in range(steps):
            totals = [
                [c + self.coefficient * value[i + 1 + k] for k, c in enumerate(row)] for i, row in enumerate(self.cost)
            ]
            choices.append([i + 1 + min(range(len(row)), key=row.__getitem__) for i, row in enumerate(totals)])
            value = [*map(min, totals), math.inf]
        visited = [0]
        for choice in reversed(choices):
            visited.append(choice[visited[-1]])
        return tuple(visited)

    def times(self, schedule: Schedule, num: int) -> list[float]:
        visited = self.path(num if self.to_zero else num - 1)
        return [self.points[i] for i in visited[:num]]


def with_free_level(levels: Levels, fine: Levels) -> list[Levels]:
    """Levels with one more after the first, for every fine level between the first two.

    The analytical first step answers at the first level, so a run over them calls the network no oftener. The authors
    keep the one whose runs end nearest to the fine trajectory's, by the mean distance of a sample.
    """
    start, following = levels[0], levels[1]
    between = [level for level in fine if following.ratio * (1 + 1e-9) < level.ratio < start.ratio * (1 - 1e-9)]
    return [Levels((start, level, *levels[1:]), levels.schedule) for level in between]
