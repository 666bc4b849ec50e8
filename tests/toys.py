"""A model that answers at once: the exact denoiser of slightly noisy 8×8 digits, for the tests of CLI and report."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits

from networks.mixture import Mixture
from steindiff import EDM, Calibration, Model, Recipe, Search, Solver, calibrate
from steindiff.comparison import Method, Yardstick, default_methods
from steindiff.comparison import calibrated as replayed
from steindiff.metrics import Moments, RandomFeatures

SHAPE = (1, 8, 8)


@cache
def digits() -> torch.Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1


@cache
def denoiser() -> Mixture:
    data = digits()[:500]
    return Mixture(data, torch.full((len(data),), 0.02), torch.ones(len(data)))


def model(**changes) -> Model:
    return Model(changes.pop("denoiser", denoiser()), EDM(), SHAPE, name="digits", **changes)


@cache
def calibrated(solver: Solver, nfe: int) -> Calibration:
    recipe = Recipe(seeds=range(32), steps=12, search=Search(iterations=1))
    return calibrate(model(), nfe, solver, recipe=recipe)


def methods(calibrations=lambda model, solver, nfe: calibrated(solver, nfe)) -> dict[str, Method]:
    return default_methods() | {"calibrated": replayed(calibrations)}


def yardstick() -> Yardstick:
    features = RandomFeatures(1)
    return Yardstick(features, Moments.of(features(digits())))
