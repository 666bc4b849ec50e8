"""Fréchet distance between two sets of features, from moments gathered in a stream, and how sure it is.

The distance of moments (μ, Σ) to a fixed reference (μ_r, Σ_r) is smooth in them, so to first order it is an average
over the samples f of

    φ(f) = 2 (μ − μ_r)·(f − μ) + (f − μ)ᵀ (I − A) (f − μ),    A = R (R Σ R)^{−1/2} R,  R = Σ_r^{1/2},

and its standard error is that average's. The bias of few samples, which is about the same for all sets of one size,
is not in it: it falls as 1/n, so `bias` reads it off halves of the set.

Reference: Heusel et al. (2017), arXiv:1706.08500.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._distributed import all_reduce_sum, distributed

Features = Callable[[Tensor], Tensor]
"""Any map of images (B, C, H, W) to features (B, F)."""


class Moments:
    r"""Count, mean and scatter S = Σ (f − μ)(f − μ)ᵀ of features, in float64, one batch at a time.

    Two sets are merged exactly, whatever their sizes, by

    .. math:: S = S_a + S_b + \frac{n_a n_b}{n_a + n_b} (μ_a − μ_b)(μ_a − μ_b)^⊤

    so memory is (F, F) however many samples pass, and parts computed apart can be put together.

    Reference: Chan et al. (1979), Updating Formulae and a Pairwise Algorithm for Computing Sample Variances.
    """

    def __init__(self, count: int, mean: Tensor, scatter: Tensor) -> None:
        if mean.ndim != 1 or scatter.shape != (len(mean), len(mean)):
            raise ValueError(f"mean, scatter must be (F,), (F, F), got {tuple(mean.shape)}, {tuple(scatter.shape)}")
        self.count = count
        self.mean = mean.double()
        self.scatter = scatter.double()

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Moments of one batch of features (B, F)."""
        if features.ndim != 2 or not len(features):
            raise ValueError(f"features must have shape (B, F) with B >= 1, got {tuple(features.shape)}")
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinity")
        features = features.double()
        mean = features.mean(dim=0)
        centred = features - mean
        return cls(len(features), mean, centred.T @ centred)

    @classmethod
    def stream(cls, images: Iterable[Tensor], features: Features) -> Moments:
        """Moments of the features of batches of images, each (B, C, H, W)."""
        whole: Moments | None = None
        with torch.no_grad():
            for batch in images:
                part = cls.of(features(batch))
                whole = part if whole is None else whole + part
        if whole is None:
            raise ValueError("images: no batch was given")
        return whole

    def __add__(self, other: Moments) -> Moments:
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"feature sizes {len(self.mean)} and {len(other.mean)} differ")
        count = self.count + other.count
        shift = other.mean - self.mean
        scatter = self.scatter + other.scatter + (self.count * other.count / count) * torch.outer(shift, shift)
        return Moments(count, self.mean + shift * (other.count / count), scatter)

    def all_reduce(self) -> Moments:
        r"""Moments of the samples of all processes, equal in all of them; as they are without a process group.

        .. math:: μ = \frac{Σ_k n_k μ_k}{Σ_k n_k}, \quad S = Σ_k S_k + n_k (μ_k − μ)(μ_k − μ)^⊤
        """
        if not distributed():
            return self
        sums = all_reduce_sum(torch.cat([self.count * self.mean, self.mean.new_full((1,), self.count)]))
        mean = sums[:-1] / sums[-1]
        shift = self.mean - mean
        return Moments(int(sums[-1]), mean, all_reduce_sum(self.scatter + self.count * torch.outer(shift, shift)))

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance S/(n − 1), shape (F, F)."""
        if self.count < 2:
            raise ValueError(f"count = {self.count}: a covariance needs at least 2 samples")
        return self.scatter / (self.count - 1)

    @cached_property
    def root(self) -> Tensor:
        """Symmetric square root of the covariance, shape (F, F); computed once, so let a reference be the first set."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root: Tensor = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        return root

    def to(self, device: torch.device | str) -> Moments:
        """The same moments on another device."""
        return Moments(self.count, self.mean.to(device), self.scatter.to(device))


def frechet_distance(a: Moments, b: Moments) -> float:
    r"""Squared 2-Wasserstein distance of the Gaussians with these moments.

    .. math:: ‖μ_a − μ_b‖² + \mathrm{tr}\,Σ_a + \mathrm{tr}\,Σ_b − 2\,\mathrm{tr}(Σ_a^{1/2} Σ_b Σ_a^{1/2})^{1/2}

    Both roots are taken of symmetric matrices, by eigenvalues in float64, so no part is imaginary and
    rank-deficient covariances (fewer samples than features) need no regularisation.

    Reference: Dowson & Landau (1982), The Fréchet distance between multivariate normal distributions.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"feature sizes {len(a.mean)} and {len(b.mean)} differ")
    cross = torch.linalg.eigvalsh(a.root @ b.covariance @ a.root).clamp(min=0).sqrt().sum()
    distance = (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * cross
    return max(float(distance), 0.0)


TINY = 1e-12
"""Eigenvalues below this share of the largest are rounding."""


class Distance(NamedTuple):
    """A Fréchet distance with the influence φ of every sample, `(N,)`, centred."""

    value: float
    influence: Tensor

    @property
    def error(self) -> float:
        """Its standard error."""
        return float(self.influence.std() / len(self.influence) ** 0.5)

    @property
    def interval(self) -> tuple[float, float]:
        """Two standard errors either side."""
        return max(self.value - 2.0 * self.error, 0.0), self.value + 2.0 * self.error


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
