"""Noise schedules, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.schedules.base import Schedule
from steindiff.schedules.continuous import EDM, VE, VP, Cosine, Discrete, Flow, SubVP

SCHEDULES: Registry[Schedule] = Registry(__name__, Schedule)

__all__ = ["EDM", "SCHEDULES", "VE", "VP", "Cosine", "Discrete", "Flow", "Schedule", "SubVP"]
