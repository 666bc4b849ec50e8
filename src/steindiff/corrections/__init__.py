"""Corrections, one file each: what may be done to a solver's step.

A new file with a `VARIANTS` table is found by walking this folder.
"""

from steindiff._discovery import Registry
from steindiff.corrections.base import Correction, Plain, Transition
from steindiff.corrections.consistency import Consistency, Matched, PerDimension
from steindiff.corrections.relaxation import Activation, Bounds, Clamped, EveryStep, FirstSteps, Relaxation, Unclamped

CORRECTIONS: Registry[Correction] = Registry(__name__, Correction)

__all__ = [
    "CORRECTIONS",
    "Activation",
    "Bounds",
    "Clamped",
    "Consistency",
    "Correction",
    "EveryStep",
    "FirstSteps",
    "Matched",
    "PerDimension",
    "Plain",
    "Relaxation",
    "Transition",
    "Unclamped",
]
