"""Kernel Inception distance.

References:
    | Demystifying MMD GANs (Bińkowski et al., 2018)
    | https://arxiv.org/abs/1801.01401
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """Mean over subsets and its standard error."""

    mean: float
    error: float


def polynomial_kernel(x: Tensor, y: Tensor) -> Tensor:
    """k(x, y) = (⟨x, y⟩/F + 1)³ for all pairs: (N, F), (M, F) → (N, M)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    r"""Unbiased squared maximum mean discrepancy.

    .. math:: \frac{1}{n(n-1)} \sum_{i≠j} k(x_i, x_j) + \frac{1}{m(m-1)} \sum_{i≠j} k(y_i, y_j)
              − \frac{2}{nm} \sum_{ij} k(x_i, y_j)

    Shapes: x (N, F), y (M, F) → ().
    """
    n, m = len(x), len(y)
    kxx, kyy = polynomial_kernel(x, x), polynomial_kernel(y, y)
    within = (kxx.sum() - kxx.trace()) / (n * (n - 1)) + (kyy.sum() - kyy.trace()) / (m * (m - 1))
    return within - 2 * polynomial_kernel(x, y).mean()


def kernel_distance(
    x: Tensor, y: Tensor, *, subsets: int = 100, size: int = 1000, generator: torch.Generator | None = None
) -> Estimate:
    """KID of two sets of features: the mean of `squared_mmd` over random subsets, in float64.

    Args:
        x: Features (N, F).
        y: Features (M, F).
        subsets: Number of subsets.
        size: Samples of each set per subset; sets that are smaller are an error.
        generator: Source of the subsets, on the CPU.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have shapes (N, F) and (M, F), got {tuple(x.shape)} and {tuple(y.shape)}")
    if not 2 <= size <= min(len(x), len(y)):
        raise ValueError(f"size must be from 2 to {min(len(x), len(y))}, the smaller set, got {size}")
    if subsets < 1:
        raise ValueError(f"subsets must be >= 1, got {subsets}")

    def subset(features: Tensor) -> Tensor:
        index = torch.randperm(len(features), generator=generator)[:size]
        return features[index.to(features.device)].double()

    values = torch.stack([squared_mmd(subset(x), subset(y)) for _ in range(subsets)])
    error = values.std() / subsets**0.5 if subsets > 1 else torch.tensor(float("nan"))
    return Estimate(float(values.mean()), float(error))
