r"""What a grid is: the rule that places the levels of a run on a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from steindiff._checks import at_least
from steindiff.levels import Levels
from steindiff.schedules.base import Schedule


def spread(start: float, stop: float, num: int) -> list[float]:
    """`num` evenly spaced points that hit both ends exactly (one point: the start)."""
    if num == 1:
        return [start]
    return [start + (stop - start) * i / (num - 1) for i in range(num - 1)] + [stop]


class Grid(ABC):
    r"""A rule (schedule, steps) ↦ levels. Children are frozen dataclasses with the field `to_zero`.

    True: the last step goes to σ = 0 and the others end at the schedule's smallest level, as in EDM and diffusers
    (`final_sigmas_type="zero"`). False: the last level is the schedule's smallest. None, the default: as False, unless
    noise at that level would show (`Schedule.ends_above_pixel_noise`); that way no evaluation is wasted on noise nobody
    can see, and a plain solver is at its best.
    """

    to_zero: bool | None

    def reaches_zero(self, schedule: Schedule) -> bool:
        """Whether a run on `schedule` ends at σ = 0."""
        return schedule.ends_above_pixel_noise if self.to_zero is None else self.to_zero

    @abstractmethod
    def times(self, schedule: Schedule, num: int) -> Sequence[float]:
        """`num` >= 1 strictly decreasing times from `schedule.t_max` to `schedule.t_min` (one: only the first)."""

    def __call__(self, schedule: Schedule, steps: int) -> Levels:
        """The `steps` + 1 levels of a run."""
        at_least("steps", steps, 1)
        to_zero = self.reaches_zero(schedule)
        return Levels.from_times(schedule, self.times(schedule, steps if to_zero else steps + 1), to_zero=to_zero)
