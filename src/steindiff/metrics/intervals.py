"""How sure a Fréchet distance is: its standard error, and that of the difference of two, by the delta method.

The distance of moments (μ, Σ) to a fixed reference (μ_r, Σ_r) is smooth in them, so to first order it is an average
over the samples f of

    φ(f) = 2 (μ − μ_r)·(f − μ) + (f − μ)ᵀ (I − A) (f − μ),    A = R (R Σ R)^{−1/2} R,  R = Σ_r^{1/2},

and its standard error is that average's. Two sets made from the same seeds are compared sample by sample: what they
share cancels in φ_1 − φ_2. The bias of few samples, which is about the same for all sets of one size, is not in it:
it falls as 1/n, so `bias` reads it off halves of the set.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steindiff.metrics.frechet import Moments, frechet_distance

TINY = 1e-12
"""Eigenvalues below this share of the largest are rounding."""


class Distance(NamedTuple):
    """A Fréchet distance with the influence φ of every sample, `(N,)`, centred."""

    value: float
    influence: Tensor

    @property
    def error(self) -> float:
        """Its standard error."""
        return _error(self.influence)

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors either side."""
        return max(self.value - 2.0 * self.error, 0.0), self.value + 2.0 * self.error


class Difference(NamedTuple):
    """A difference of two distances, and its standard error."""

    value: float
    error: float

    def verdict(self, against: float, share: float = 0.01) -> str:
        """`better` or `worse` beyond two standard errors and `share` of the distance compared with, else `equal`."""
        if abs(self.value) <= max(2.0 * self.error, share * against):
            return "equal"
        return "better" if self.value < 0 else "worse"


def distance(features: Tensor, reference: Moments, images: int | None = None) -> Distance:
    """Fréchet distance of features `(N, F)`, N/images of each image in a row, to a reference, with its influences."""
    moments = Moments.of(features)
    root = reference.root
    values, vectors = torch.linalg.eigh(root @ moments.covariance @ root)
    values = values.clamp(min=0.0)
    inverse = torch.where(values > TINY * values[-1], values.clamp(min=1e-300).rsqrt(), 0.0)
    half = root @ (vectors * inverse.sqrt())  # A = half halfᵀ
    centred, shift = features.double() - moments.mean, moments.mean - reference.mean
    influence = 2.0 * centred @ shift + centred.square().sum(1) - (centred @ half).square().sum(1)
    traces = moments.covariance.trace() + reference.covariance.trace()
    value = float(shift.square().sum() + traces - 2.0 * values.sqrt().sum())
    influence = (influence - influence.mean()).reshape(images or len(features), -1).mean(1)
    return Distance(max(value, 0.0), influence.cpu())


def bias(features: Tensor, reference: Moments) -> float:
    """By how much a set's few samples raise its distance, E d(n) ≈ d + b/n: what its halves have more, `(N, F)`."""
    halves = [frechet_distance(reference, Moments.of(features[i::2])) for i in (0, 1)]
    return max(sum(halves) / 2.0 - frechet_distance(reference, Moments.of(features)), 0.0)


def difference(one: Distance, other: Distance) -> Difference:
    """`one` less `other`, of sets made from the same seeds in the same order."""
    return Difference(one.value - other.value, _error(one.influence - other.influence))


def _error(influence: Tensor) -> float:
    return float(influence.std() / len(influence) ** 0.5)
