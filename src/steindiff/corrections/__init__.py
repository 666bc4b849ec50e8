"""Corrections: what may be done to a solver's step."""

from steindiff.corrections.base import Correction, Transition
from steindiff.corrections.plain import Plain

__all__ = ["Correction", "Plain", "Transition"]
