"""Noise schedules, one file each. A new file with a `VARIANTS` table is found by walking this folder."""

from steindiff._discovery import Registry
from steindiff.schedules.base import Schedule
from steindiff.schedules.cosine import Cosine
from steindiff.schedules.discrete import Discrete
from steindiff.schedules.edm import EDM
from steindiff.schedules.flow import Flow
from steindiff.schedules.subvp import SubVP
from steindiff.schedules.ve import VE
from steindiff.schedules.vp import VP

SCHEDULES: Registry[Schedule] = Registry(__name__, Schedule)

__all__ = ["EDM", "SCHEDULES", "VE", "VP", "Cosine", "Discrete", "Flow", "Schedule", "SubVP"]
