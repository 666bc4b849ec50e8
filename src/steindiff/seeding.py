r"""Initial noise: every sample from its own seed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steindiff.levels import Level


def noise(seeds: Sequence[int], shape: Sequence[int], level: Level, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Initial states σ ε, `(len(seeds), *shape)`, each drawn from its own seed on the CPU.

    A sample depends on its own seed and on nothing else: not on its batch, its place in it, or the device.

    Raises:
        ValueError: if there is no seed, a seed is negative, or a dimension is not positive.
    """
    if len(seeds) == 0:
        raise ValueError("seeds: got none, need at least one")
    if any(seed < 0 for seed in seeds):
        raise ValueError(f"seeds: allowed are numbers >= 0, got {min(seeds)}")
    if any(n < 1 for n in shape):
        raise ValueError(f"shape = {tuple(shape)}: all dimensions must be >= 1")
    out = torch.empty((len(seeds), *shape), dtype=dtype)
    for row, seed in zip(out, seeds, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(int(seed)))
    return out * level.sigma
