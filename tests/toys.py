"""A model that answers at once: the exact denoiser of slightly noisy 8×8 digits, for the tests of CLI and report."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits

from steindiff.calibrating import calibrate
from steindiff.calibration import Calibration
from steindiff.comparison import RandomFeatures, Subject
from steindiff.denoisers import Mixture
from steindiff.metrics.frechet import Moments
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


@cache
def calibrated(solver: Solver, nfe: int) -> Calibration:
    return calibrate(denoiser(), solver, SCHEDULES["edm"], nfe, SHAPE, seeds=range(32))


def subject(calibrations=calibrated) -> Subject:
    features = RandomFeatures(1)
    return Subject(
        name="digits",
        denoisers=lambda seeds: denoiser(),
        schedule=SCHEDULES["edm"],
        shape=SHAPE,
        features=features,
        reference=Moments.of(features(digits())),
        calibrations=calibrations,
    )
