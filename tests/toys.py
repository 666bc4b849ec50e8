"""A model that answers at once: the exact denoiser of slightly noisy 8×8 digits, for the tests of CLI and report."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits

from steindiff.bases import DCT
from steindiff.calibration import Calibration
from steindiff.comparison import Yardstick
from steindiff.corrections.replay import StepWeights
from steindiff.denoisers import Denoiser, Mixture
from steindiff.grids import GRIDS
from steindiff.metrics.frechet import Moments
from steindiff.metrics.random_features import RandomFeatures
from steindiff.model import DenoiserFor, Model
from steindiff.sampler import levels_for
from steindiff.schedules import SCHEDULES
from steindiff.solvers.base import Solver

SHAPE = (1, 8, 8)


@cache
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


@cache
def denoiser() -> Mixture:
    data = digits()[:500]
    return Mixture(data, torch.full((len(data),), 0.02), torch.ones(len(data)))


def model(denoisers: Denoiser | DenoiserFor | None = None) -> Model:
    return Model(denoisers or denoiser(), SCHEDULES["edm"], SHAPE, name="digits")


@cache
def calibrated(solver: Solver, nfe: int) -> Calibration:
    """Weights one cannot see, but weights: nothing is measured for the tests of what prints and writes."""
    levels, basis = levels_for(solver, GRIDS["logsnr"], SCHEDULES["edm"], nfe), DCT(SHAPE)
    weights = StepWeights((1.001,) * basis.bands)
    return Calibration(solver=solver, levels=levels, basis=basis, steps=(weights,) * levels.steps)


def yardstick() -> Yardstick:
    features = RandomFeatures(1)
    return Yardstick(features, Moments.of(features(digits())))
