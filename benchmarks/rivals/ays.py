r"""The published Align Your Steps grids."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steindiff.grids.base import Grid, spread
from steindiff.schedules.base import Schedule


@dataclass(frozen=True)
class AYS(Grid):
    r"""The published σ/α of ten steps; other numbers of steps by interpolation of log σ over the index.

    The ends are the schedule's own, which for the model a table was made for are the table's.

    Args:
        sigmas: the table, decreasing.
        to_zero: append a step to σ = 0.

    References:
        Align Your Steps: Optimizing Sampling Schedules in Diffusion Models (Sabour et al., 2024), arXiv:2404.14507.
    """

    sigmas: tuple[float, ...]
    to_zero: bool = False

    def times(self, schedule: Schedule, num: int) -> list[float]:
        inner = []
        for place in spread(0.0, len(self.sigmas) - 1.0, num)[1:-1]:
            i = min(int(place), len(self.sigmas) - 2)
            low, high = math.log(self.sigmas[i]), math.log(self.sigmas[i + 1])
            inner.append(math.exp(low + (place - i) * (high - low)))
        if inner and not schedule.ratio_max > inner[0] >= inner[-1] > schedule.ratio_min:
            raise ValueError(
                f"schedule: sigma/alpha spans {schedule.ratio_max:.4g} to {schedule.ratio_min:.4g}, this grid needs "
                f"{inner[0]:.4g} to {inner[-1]:.4g} inside; use the table of your model"
            )
        ends = [schedule.t_max] if num == 1 else [schedule.t_max, schedule.t_min]
        return [*ends[:1], *(schedule.time(-math.log(sigma)) for sigma in inner), *ends[1:]]


STABLE_DIFFUSION = AYS((14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029))
"""Stable Diffusion 1.5."""

SDXL = AYS((14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029))
"""Stable Diffusion XL."""

STABLE_VIDEO_DIFFUSION = AYS((700.0, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.002))
"""Stable Video Diffusion."""
