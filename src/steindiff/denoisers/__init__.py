"""Denoisers: anything that turns (x, level) into E[x* | x]."""

from steindiff.denoisers.autocast import Autocast
from steindiff.denoisers.base import CountingDenoiser, Denoiser
from steindiff.denoisers.edm import EDMDenoiser, Preconditioned
from steindiff.denoisers.gaussian import Gaussian
from steindiff.denoisers.guidance import Guided
from steindiff.denoisers.mixture import Empirical, Mixture
from steindiff.denoisers.prediction import X0, Epsilon, FlowVelocity, Prediction, Score, Velocity
from steindiff.denoisers.thresholding import DynamicThreshold, StaticThreshold

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
