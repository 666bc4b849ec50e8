r"""What a grid is: the rule that places the levels of a run on a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from steindiff.levels import Levels
from steindiff.schedules.base import Schedule


def check_steps(steps: int) -> None:
    """Refuse anything but a positive whole number of steps."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps = {steps!r}: allowed are whole numbers >= 1")


def spread(start: float, stop: float, num: int) -> list[float]:
    """`num` evenly spaced points that hit both ends exactly (one point: the start)."""
    if num == 1:
        return [start]
    return [start + (stop - start) * i / (num - 1) for i in range(num - 1)] + [stop]


class Grid(ABC):
    r"""A rule (schedule, steps) ↦ levels. Children are frozen dataclasses with the field `to_zero`.

    With `to_zero` the last step goes to σ = 0 and the others end at the schedule's smallest level, as in EDM and
    diffusers (`final_sigmas_type="zero"`). Without it the last level is the schedule's smallest.
    """

    to_zero: bool

    @abstractmethod
    def times(self, schedule: Schedule, num: int) -> Sequence[float]:
        """`num` >= 1 strictly decreasing times from `schedule.t_max` to `schedule.t_min` (one: only the first)."""

    def __call__(self, schedule: Schedule, steps: int) -> Levels:
        """The `steps` + 1 levels of a run.

        Raises:
            ValueError: if `steps` is not a positive whole number.
        """
        check_steps(steps)
        return Levels.from_times(
            schedule, self.times(schedule, steps if self.to_zero else steps + 1), to_zero=self.to_zero
        )
