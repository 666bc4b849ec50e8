"""Denoisers: anything that turns (x, level) into E[x* | x]."""

from steindiff.denoisers.base import CountingDenoiser, Denoiser
from steindiff.denoisers.exact import Empirical, Gaussian, Mixture
from steindiff.denoisers.prediction import (
    X0,
    EDMDenoiser,
    Epsilon,
    FlowVelocity,
    Preconditioned,
    Prediction,
    Score,
    Velocity,
)
from steindiff.denoisers.wrappers import Autocast, DynamicThreshold, Guided, StaticThreshold

__all__ = [
    "X0",
    "Autocast",
    "CountingDenoiser",
    "Denoiser",
    "DynamicThreshold",
    "EDMDenoiser",
    "Empirical",
    "Epsilon",
    "FlowVelocity",
    "Gaussian",
    "Guided",
    "Mixture",
    "Preconditioned",
    "Prediction",
    "Score",
    "StaticThreshold",
    "Velocity",
]
