r"""Initial noise: every sample from its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steindiff._checks import integer
from steindiff._checks import seeds as check_seeds
from steindiff.levels import Level


def noise(seeds: Sequence[int], shape: Sequence[int], level: Level, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Initial states σ ε, `(len(seeds), *shape)`, each drawn from its own seed on the CPU.

    A sample depends on its own seed and on nothing else: not on its batch, its place in it, or the device; on `dtype`
    by rounding only, since ε is drawn in float32 and then cast.

    Raises:
        ValueError: if there is no seed, a seed is not a whole number in [0, 2⁶³), or a dimension is not positive.
    """
    check_seeds("seeds", seeds)
    for n in shape:
        integer("shape", n, 1)
    out = torch.empty((len(seeds), *shape))
    for row, seed in zip(out, seeds, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(int(seed)))
    return out.to(dtype) * level.sigma
