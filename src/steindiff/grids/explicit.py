r"""A grid somebody wrote down."""

from __future__ import annotations

from dataclasses import dataclass

from steindiff.grids.base import Grid
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class Explicit(Grid):
    r"""The given times, from noise to data; fits exactly one number of steps.

    Args:
        points: times of the schedule, strictly decreasing in noise.
        to_zero: append σ = 0 after the last of them.
    """

    points: tuple[float, ...]
    to_zero: bool = True

    def times(self, schedule: Schedule, num: int) -> tuple[float, ...]:
        if num != len(self.points):
            steps = len(self.points) - (not self.to_zero)
            raise ValueError(f"steps: an explicit grid of {len(self.points)} times makes {steps} steps only")
        return self.points
