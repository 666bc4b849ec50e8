r"""Averages over a batch, all processes together."""

from __future__ import annotations

import torch
from torch import Tensor

from steindiff._distributed import gather, shard


def mean(values: Tensor) -> Tensor:
    """The mean of `values`, `(B, *)`, over the global batch: float64, `(*)`, equal in all processes.

    Gathered before they are summed, so that it is the mean of one process to the bit.
    """
    return gather(values).mean(0, dtype=torch.float64)


def standard_error(values: Tensor) -> Tensor:
    """The standard error of `mean(values)`, `(*)`, over the global batch `(B, *)`."""
    spread = mean(values.square()) - mean(values).square()
    return (spread.clamp(min=0.0) / shard(values).total).sqrt()


def ratio_error(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    r"""The ratio of two means over the global batch, and its standard error.

    ratio = N/D with N, D the means of `numerator` and `denominator`, both `(B,)`; to first order its standard error
    is √(Var(n − ratio·d)/B)/|D|, which counts the spread over samples and the noise of their probes alike.

    Returns:
        Ratio and standard error, float64 scalars.
    """
    bottom = mean(denominator)
    ratio = mean(numerator) / bottom
    spread = mean((numerator.double() - ratio * denominator.double()).square())
    return ratio, (spread / shard(numerator).total).sqrt() / bottom.abs()
