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

    @property
    def steps(self) -> int:
        """How many steps it makes."""
        return len(self.points) - (not self.to_zero)

    def times(self, schedule: Schedule, num: int) -> tuple[float, ...]:
        if num != len(self.points):
            raise ValueError(f"steps: an explicit grid of {len(self.points)} times makes {self.steps} steps only")
        return self.points
