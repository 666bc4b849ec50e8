"""Inception score.

References:
    | Improved Techniques for Training GANs (Salimans et al., 2016)
    | https://arxiv.org/abs/1606.03498
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steindiff.metrics.pretrained import ImageNetInput, pretrained


class Score(NamedTuple):
    """Mean over splits and their standard deviation."""

    mean: float
    deviation: float


def inception_score(logits: Tensor, splits: int = 10) -> Score:
    """Inception score IS = exp E KL(p(y | x) ‖ p(y)) from class logits, over equal splits.

    Args:
        logits: Class logits, (N, K).
        splits: Number of splits; each has its own p(y).
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


def gather_logits(images: Iterable[Tensor], network: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits (N, K) of batches of images, each (B, C, H, W)."""
    with torch.no_grad():
        return torch.cat([network(batch).cpu() for batch in images])


def _torchvision_inception() -> nn.Module:
    from torchvision.models import Inception_V3_Weights, inception_v3

    return inception_v3(weights=Inception_V3_Weights.IMAGENET1K_V1, transform_input=False)


def inception_classifier(
    device: torch.device | str = "cpu", *, build: Callable[[], Any] = _torchvision_inception
) -> ImageNetInput:
    """The 1,000-class InceptionV3 of torchvision, on bytes: (B, 3, H, W) uint8 → (B, 1000).

    Scores of these weights are comparable among themselves, not with those of the 1,008-class TensorFlow graph.

    Args:
        device: Where to put it.
        build: What makes the network; torchvision's own loader unless given.
    """
    return ImageNetInput(pretrained("torchvision InceptionV3", build), size=299).to(device)
