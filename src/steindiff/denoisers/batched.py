r"""A batch evaluated in parts: bounded memory, or parts under different conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level


class Batched(Denoiser):
    """Consecutive parts of a batch go to their own denoisers (which may all be the same one).

    Args:
        denoisers: one for each part.
        sizes: how many samples each part has.
    """

    def __init__(self, denoisers: Sequence[Denoiser], sizes: Sequence[int]) -> None:
        if len(denoisers) != len(sizes) or any(n < 1 for n in sizes):
            raise ValueError(f"sizes = {list(sizes)}: need one positive number for each of {len(denoisers)} denoisers")
        self.denoisers = tuple(denoisers)
        self.sizes = tuple(sizes)

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        if len(x) != sum(self.sizes):
            raise ValueError(f"x: a batch of {len(x)}, but the parts hold {sum(self.sizes)} samples")
        parts = zip(self.denoisers, x.split(self.sizes), strict=True)
        return torch.cat([denoiser(part, level) for denoiser, part in parts])

    def subset(self, part: slice, batch: int) -> Batched:
        chosen = range(*part.indices(batch))
        denoisers, sizes, start = [], [], 0
        for denoiser, size in zip(self.denoisers, self.sizes, strict=True):
            inside = range(max(chosen.start, start) - start, min(chosen.stop, start + size) - start)
            if inside:
                denoisers.append(denoiser.subset(slice(inside.start, inside.stop), size))
                sizes.append(len(inside))
            start += size
        return Batched(denoisers, sizes)

    @property
    def conditions(self) -> Mapping[str, Any]:
        return self.denoisers[0].conditions

    @property
    def calls(self) -> int:
        return sum({id(d): d.calls for d in self.denoisers}.values())
