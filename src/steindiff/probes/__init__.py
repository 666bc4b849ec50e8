"""Probes, one file each: a step with its divergence, from one linearised pass.

A new file with a `VARIANTS` table is found by walking this folder.
"""

from steindiff._discovery import Registry
from steindiff.probes._pullback import check_gradient, pullback
from steindiff.probes.base import Antithetic, Directions, Hutchinson, Probe, Probed, Rademacher
from steindiff.probes.hutchinson import VJP, Adaptive, Analytic, FiniteDifference, memory_per_sample, pushforward

PROBES: Registry[Probe] = Registry(__name__, Probe)

__all__ = [
    "PROBES",
    "VJP",
    "Adaptive",
    "Analytic",
    "Antithetic",
    "Directions",
    "FiniteDifference",
    "Hutchinson",
    "Probe",
    "Probed",
    "Rademacher",
    "check_gradient",
    "memory_per_sample",
    "pullback",
    "pushforward",
]
