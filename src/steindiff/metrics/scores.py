r"""Scores from features, logits or images: IS, precision and recall, KID, PSNR and spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff.corrections.alignment import Groups
from steindiff.metrics.features import ImageNetInput, pretrained


class Score(NamedTuple):
    """Mean over splits and their standard deviation."""

    mean: float
    deviation: float


def inception_score(logits: Tensor, splits: int = 10) -> Score:
    """Inception score IS = exp E KL(p(y | x) ‖ p(y)) from class logits (N, K), over splits with a p(y) each.

    Reference: Salimans et al. (2016), arXiv:1606.03498.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must have shape (N, K), got {tuple(logits.shape)}")
    if not 1 <= splits <= len(logits):
        raise ValueError(f"splits must be from 1 to {len(logits)}, the number of samples, got {splits}")
    scores = []
    for part in logits.double().tensor_split(splits):
        log_p = part.log_softmax(dim=1)
        log_marginal = log_p.logsumexp(dim=0) - torch.tensor(float(len(part)), dtype=log_p.dtype).log()
        scores.append((log_p.exp() * (log_p - log_marginal)).sum(dim=1).mean().exp())
    values = torch.stack(scores)
    return Score(float(values.mean()), float(values.std(correction=0)))


def _torchvision_inception() -> Any:
    from torchvision.models import Inception_V3_Weights, inception_v3

    return inception_v3(weights=Inception_V3_Weights.IMAGENET1K_V1, transform_input=False)


def inception_classifier(
    device: torch.device | str = "cpu", *, build: Callable[[], Any] = _torchvision_inception
) -> ImageNetInput:
    """The 1,000-class InceptionV3 of torchvision, on bytes: (B, 3, H, W) uint8 → (B, 1000).

    Scores of these weights are comparable among themselves, not with those of the 1,008-class TensorFlow graph.
    """
    return ImageNetInput(pretrained("torchvision InceptionV3", build), size=299).to(device)


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
    """Precision and recall of features (M, F) against (N, F), in float64, a block of the distance matrix at a time.

    The manifold of a set is the union of balls around its features, each reaching to the k-th nearest other feature.

    Reference: Kynkäänniemi et al. (2019), arXiv:1904.06991.
    """
    if real.ndim != 2 or sampled.ndim != 2 or real.shape[1] != sampled.shape[1]:
        one, other = tuple(real.shape), tuple(sampled.shape)
        raise ValueError(f"real and sampled must have shapes (N, F) and (M, F), got {one} and {other}")
    if not 1 <= k < min(len(real), len(sampled)):
        raise ValueError(f"k must be from 1 to {min(len(real), len(sampled)) - 1}, less than the smaller set, got {k}")
    real, sampled = real.double(), sampled.double()
    return PrecisionRecall(
        precision=coverage(sampled, real, radii(real, k)),
        recall=coverage(real, sampled, radii(sampled, k)),
    )


class Estimate(NamedTuple):
    """Mean over subsets and its standard error."""

    mean: float
    error: float


def polynomial_kernel(x: Tensor, y: Tensor) -> Tensor:
    """k(x, y) = (⟨x, y⟩/F + 1)³ for all pairs: (N, F), (M, F) → (N, M)."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    r"""Unbiased squared maximum mean discrepancy of (N, F) and (M, F).

    .. math:: \frac{1}{n(n-1)} \sum_{i≠j} k(x_i, x_j) + \frac{1}{m(m-1)} \sum_{i≠j} k(y_i, y_j)
              − \frac{2}{nm} \sum_{ij} k(x_i, y_j)
    """
    n, m = len(x), len(y)
    kxx, kyy = polynomial_kernel(x, x), polynomial_kernel(y, y)
    within = (kxx.sum() - kxx.trace()) / (n * (n - 1)) + (kyy.sum() - kyy.trace()) / (m * (m - 1))
    return within - 2 * polynomial_kernel(x, y).mean()


def kernel_distance(
    x: Tensor, y: Tensor, *, subsets: int = 100, size: int = 1000, generator: torch.Generator | None = None
) -> Estimate:
    """KID of features (N, F) and (M, F): the mean of `squared_mmd` over random subsets of `size` each, in float64.

    Reference: Bińkowski et al. (2018), arXiv:1801.01401.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"x and y must have shapes (N, F) and (M, F), got {tuple(x.shape)} and {tuple(y.shape)}")
    if not 2 <= size <= min(len(x), len(y)):
        raise ValueError(f"size must be from 2 to {min(len(x), len(y))}, the smaller set, got {size}")
    at_least("subsets", subsets, 1)

    def subset(features: Tensor) -> Tensor:
        index = torch.randperm(len(features), generator=generator)[:size]
        return features[index.to(features.device)].double()

    values = torch.stack([squared_mmd(subset(x), subset(y)) for _ in range(subsets)])
    error = values.std() / subsets**0.5 if subsets > 1 else torch.tensor(float("nan"))
    return Estimate(float(values.mean()), float(error))


def psnr(images: Tensor, reference: Tensor) -> float:
    r"""Mean of 10 log₁₀(4/‖x − y‖²_mean) over images in [−1, 1], `(N, *)`, in decibels; ∞ if all are equal."""
    error = (images.double() - reference.double()).square().flatten(1).mean(1)
    if not bool(error.any()):
        return math.inf
    return float((10.0 * (4.0 / error.clamp(min=1e-12)).log10()).mean())


def spread(samples: Tensor, reference: Tensor, conditions: Sequence[Hashable]) -> float:
    r"""How much samples of one condition differ, over how much many-step samples do: √(E‖x′‖²/E‖y′‖²), both `(N, *)`.

    Primes are deviations from the mean of the same condition. 1 is right; below it variety is lost.
    """
    groups = Groups.of(conditions)
    varied = [(x.double() - groups.means(x.double())).square().sum() for x in (samples, reference)]
    return float((varied[0] / varied[1].clamp(min=1e-300)).sqrt())
