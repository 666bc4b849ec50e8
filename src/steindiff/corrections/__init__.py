"""Corrections, one file each: what may be done to a solver's step.

A new file with a `VARIANTS` table is found by walking this folder.
"""

from steindiff._discovery import Registry
from steindiff.corrections.activation import Activation, EveryStep, Expansion, FirstSteps, OnlySteps, TopK, log_step
from steindiff.corrections.base import Correction, Transition
from steindiff.corrections.consistency import Consistency, Likelihood, LogSigma, Matched, PerDimension
from steindiff.corrections.plain import Plain
from steindiff.corrections.relaxation import (
    Bounds,
    Clamped,
    Coordinates,
    Normalised,
    Relaxation,
    ScheduleCoordinates,
    Unclamped,
)

CORRECTIONS: Registry[Correction] = Registry(__name__, Correction)

__all__ = [
    "CORRECTIONS",
    "Activation",
    "Bounds",
    "Clamped",
    "Consistency",
    "Coordinates",
    "Correction",
    "EveryStep",
    "Expansion",
    "FirstSteps",
    "Likelihood",
    "LogSigma",
    "Matched",
    "Normalised",
    "OnlySteps",
    "PerDimension",
    "Plain",
    "Relaxation",
    "ScheduleCoordinates",
    "TopK",
    "Transition",
    "Unclamped",
    "log_step",
]
