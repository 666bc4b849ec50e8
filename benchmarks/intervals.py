"""How sure a Fréchet distance is: its standard error, and that of the difference of two, by the delta method.

The distance of moments (μ, Σ) to a fixed reference (μ_r, Σ_r) is smooth in them, so to first order it is an average
over the samples f of

    φ(f) = 2 (μ − μ_r)·(f − μ) + (f − μ)ᵀ (I − A) (f − μ),    A = R (R Σ R)^{−1/2} R,  R = Σ_r^{1/2},

and its standard error is that average's. Two sets made from the same seeds are compared sample by sample: what they
share cancels in φ_1 − φ_2. The bias of few samples, which is the same kind for all sets of one size, is not in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from steindiff.metrics.frechet import Moments

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


class Difference(NamedTuple):
    """A difference of two distances, and its standard error."""

    value: float
    error: float

    def verdict(self, against: float, share: float = 0.01) -> str:
        """`better` or `worse` beyond two standard errors and `share` of the distance compared with, else `equal`."""
        if abs(self.value) <= max(2.0 * self.error, share * against):
            return "equal"
        return "better" if self.value < 0 else "worse"


def distance(features: Tensor, reference: Moments) -> Distance:
    """Fréchet distance of features `(N, F)` to a reference, with its influences."""
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
    return Distance(max(value, 0.0), (influence - influence.mean()).cpu())


def difference(one: Distance, other: Distance) -> Difference:
    """`one` less `other`, of sets made from the same seeds in the same order."""
    return Difference(one.value - other.value, _error(one.influence - other.influence))


def _error(influence: Tensor) -> float:
    return float(influence.std() / len(influence) ** 0.5)
