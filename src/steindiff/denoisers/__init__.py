"""Denoisers: anything that turns (x, level) into E[x* | x]."""

from steindiff.denoisers.base import CountingDenoiser, Denoiser
from steindiff.denoisers.exact import Gaussian
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
    "Epsilon",
    "FlowVelocity",
    "Gaussian",
    "Guided",
    "Preconditioned",
    "Prediction",
    "Score",
    "StaticThreshold",
    "Velocity",
]
