"""Probes, one file each: a step with its divergence, from one linearised pass.

A new file with a `VARIANTS` table is found by walking this folder.
"""

from steindiff._discovery import Registry
from steindiff.probes._pullback import by_autograd, by_functional, check_gradient, pullback
from steindiff.probes.adaptive import Adaptive
from steindiff.probes.analytic import Analytic
from steindiff.probes.base import Hutchinson, Probe, Probed
from steindiff.probes.directions import Antithetic, Directions, Normal, Rademacher
from steindiff.probes.exact import Exact
from steindiff.probes.finite_difference import FiniteDifference
from steindiff.probes.jvp import JVP, pushforward
from steindiff.probes.memory import memory_per_sample
from steindiff.probes.on_part import OnPart
from steindiff.probes.vjp import VJP

PROBES: Registry[Probe] = Registry(__name__, Probe)

__all__ = [
    "JVP",
    "PROBES",
    "VJP",
    "Adaptive",
    "Analytic",
    "Antithetic",
    "Directions",
    "Exact",
    "FiniteDifference",
    "Hutchinson",
    "Normal",
    "OnPart",
    "Probe",
    "Probed",
    "Rademacher",
    "by_autograd",
    "by_functional",
    "check_gradient",
    "memory_per_sample",
    "pullback",
    "pushforward",
]
