"""A model that answers at once, calibrated: the exact denoiser of slightly noisy 8×8 digits."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
from sklearn.datasets import load_digits

from networks.mixture import Mixture
from steindiff import Model, Recipe, calibrate, compare
from steindiff.comparison import CompareOptions, Yardstick, default_methods
from steindiff.comparison import calibrated as replayed
from steindiff.metrics import Moments, RandomFeatures
from steindiff.schedules import SCHEDULES


@cache
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


@cache
def model() -> Model:
    data = digits()[:500]
    mixture = Mixture(data, torch.full((len(data),), 0.02), torch.ones(len(data)))
    return Model(mixture, SCHEDULES["edm"], (1, 8, 8), name="digits")


@cache
def calibrated(model, solver, nfe):
    return calibrate(model, nfe, solver, recipe=Recipe(seeds=range(1000, 1032), search=None, rivals=()))


@pytest.fixture(scope="session")
def compare_digits():
    """A comparison on digits, as `compare`, with settings."""
    features = RandomFeatures(1)

    def made(nfes, seeds, settings=None, calibrations=calibrated, solver="dpmpp-2m", methods=None, **options):
        comparison = compare(
            model(),
            nfes,
            seeds,
            solver=solver,
            methods=methods or default_methods() | {"calibrated": replayed(calibrations)},
            yardstick=Yardstick(features, Moments.of(features(digits()))),
            options=CompareOptions(**options),
        )
        return dataclasses.replace(comparison, settings={**comparison.settings, **(settings or {})})

    return made
