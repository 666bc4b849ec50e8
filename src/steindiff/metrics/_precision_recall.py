"""Precision and recall of a sample by k-nearest-neighbour manifolds.

References:
    | Improved Precision and Recall Metric for Assessing Generative Models (Kynkäänniemi et al., 2019)
    | https://arxiv.org/abs/1904.06991
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PrecisionRecall(NamedTuple):
    """Rank of samples within the manifold of the real features, and the reverse."""

    precision: float
    recall: float


def radii(features: Tensor, k: int, chunk: int = 2000) -> Tensor:
    """Distance of each feature to its k-th nearest other: (N, F) → (N,)."""
    return torch.cat([torch.cdist(rows, features).kthvalue(k + 1, dim=1).values for rows in features.split(chunk)])


def coverage(points: Tensor, centres: Tensor, radius: Tensor, chunk: int = 2000) -> float:
    """Rank of points that lie in at least one ball: points (M, F), centres (N, F), radius (N,)."""
    inside = [(torch.cdist(rows, centres) <= radius).any(dim=1) for rows in points.split(chunk)]
    return float(torch.cat(inside).double().mean())


def precision_recall(real: Tensor, sampled: Tensor, k: int = 3) -> PrecisionRecall:
    """Precision and recall, in float64, a block of the distance matrix at a time.

    The manifold of a set is the union of balls around its features, each reaching to the k-th nearest other feature.

    Args:
        real: Features of real images, (N, F).
        sampled: Features of samples, (M, F).
        k: Neighbours.
    """
    if real.ndim != 2 or sampled.ndim != 2 or real.shape[1] != sampled.shape[1]:
        raise ValueError(
            f"real and sampled must have shapes (N, F) and (M, F), got {tuple(real.shape)} and {tuple(sampled.shape)}"
        )
    if not 1 <= k < min(len(real), len(sampled)):
        raise ValueError(f"k must be from 1 to {min(len(real), len(sampled)) - 1}, less than the smaller set, got {k}")
    real, sampled = real.double(), sampled.double()
    return PrecisionRecall(
        precision=coverage(sampled, real, radii(real, k)),
        recall=coverage(real, sampled, radii(sampled, k)),
    )
