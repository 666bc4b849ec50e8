r"""Seeds: one for every sample, cut into batches, and the noise each begins with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff.levels import Level

SEEDS = 2**32
"""How many there are: PyTorch's generator on the CPU takes the rest of a larger one, which would be the same sample."""


def in_batches(seeds: Sequence[int], batch: int) -> list[Sequence[int]]:
    """The seeds in parts of at most `batch`."""
    at_least("batch", batch, 1)
    return [seeds[k : k + batch] for k in range(0, len(seeds), batch)]


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse what is not a sequence of whole numbers from 0 to 2**32 − 1, which generators take as they are."""
    if not hasattr(seeds, "__len__"):
        raise TypeError(f"seeds must be a sequence, one for each sample, got {seeds!r}; write range({seeds!r})?")
    if len(seeds) == 0:
        raise ValueError("seeds must hold at least one, got none")
    for seed in (seeds[0], seeds[-1]) if isinstance(seeds, range) else seeds:
        if isinstance(seed, bool) or int(seed) != seed or not 0 <= seed < SEEDS:
            raise ValueError(f"seeds must be whole numbers from 0 to 2**32 - 1, got {seed!r}")


def noise(seeds: Sequence[int], shape: Sequence[int], level: Level, dtype: torch.dtype = torch.float32) -> Tensor:
    r"""Initial states σ ε, `(len(seeds), *shape)`, each drawn from its own seed on the CPU.

    A sample depends on its own seed and on nothing else: not on its batch, its place in it, the device or the dtype
    (ε is drawn in float32 and cast).
    """
    check_seeds(seeds)
    if any(n < 1 for n in shape):
        raise ValueError(f"shape must hold whole numbers >= 1, got {tuple(shape)}")
    out = torch.empty((len(seeds), *shape))
    for row, seed in zip(out, seeds, strict=True):
        row.normal_(generator=torch.Generator().manual_seed(int(seed)))
    return out.to(dtype) * level.sigma
