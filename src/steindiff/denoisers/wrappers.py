r"""Denoisers around other denoisers: half precision, batches in parts, guidance, thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steindiff._checks import number
from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.levels import Level


class Autocast(Wrapper):
    """Another denoiser, its network computing in `dtype` where torch's autocast deems that safe.

    Convolutions and matrix products are in `dtype`; normalisation, preconditioning and everything outside the network
    stay as they are.
    """

    def __init__(self, denoiser: Denoiser, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
        self.denoiser, self.dtype = denoiser, dtype

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            return self.denoiser(x, level)


class Batched(Denoiser):
    """Consecutive parts of a batch go to their own denoisers (which may all be the same one)."""

    def __init__(self, denoisers: Sequence[Denoiser], sizes: Sequence[int]) -> None:
        if len(denoisers) != len(sizes) or any(n < 1 for n in sizes):
            raise ValueError(f"sizes = {list(sizes)}: need one positive number for each of {len(denoisers)} denoisers")
        self.denoisers, self.sizes = tuple(denoisers), tuple(sizes)

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


class Guided(Denoiser):
    r"""D = D_u + w (D_c − D_u), optionally rescaled towards the spread of D_c.

    w = 1 is the conditional denoiser (and costs one call), w > 1 guides. The guided D is not a conditional
    mean: Stein's identity does not hold for it. Rescaling: D ← φ D std(D_c)/std(D) + (1 − φ) D, std per sample.

    Args:
        conditional: D_c.
        unconditional: D_u.
        scale: w >= 0.
        rescale: φ in [0, 1].

    References: Ho & Salimans (2022), arXiv:2207.12598; Lin et al. (2024), arXiv:2305.08891.
    """

    def __init__(self, conditional: Denoiser, unconditional: Denoiser, scale: float, rescale: float = 0.0) -> None:
        number("scale", scale, 0.0)
        number("rescale", rescale, 0.0, 1.0)
        self.conditional, self.unconditional = conditional, unconditional
        self.scale, self.rescale = scale, rescale

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        c = self.conditional(x, level)
        if self.scale == 1.0:
            return c
        u = self.unconditional(x, level)
        d = u + self.scale * (c - u)
        if self.rescale == 0.0:
            return d
        dims = tuple(range(1, x.ndim))
        spread = c.std(dims, keepdim=True) / d.std(dims, keepdim=True)
        return self.rescale * spread * d + (1.0 - self.rescale) * d

    @property
    def conditions(self) -> Mapping[str, Any]:
        own = {"guidance": self.scale, **({"guidance_rescale": self.rescale} if self.rescale else {})}
        return {**self.conditional.conditions, **own}

    @property
    def calls(self) -> int:
        return self.conditional.calls + self.unconditional.calls

    def subset(self, part: slice, batch: int) -> Guided:
        conditional, unconditional = self.conditional.subset(part, batch), self.unconditional.subset(part, batch)
        return Guided(conditional, unconditional, self.scale, self.rescale)


class StaticThreshold(Wrapper):
    r"""D ← clip(D, −bound, bound)."""

    def __init__(self, denoiser: Denoiser, bound: float = 1.0) -> None:
        number("bound", bound, 0.0, open_end=True)
        self.denoiser, self.bound = denoiser, bound

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        return self.denoiser(x, level).clamp(-self.bound, self.bound)

    @property
    def conditions(self) -> Mapping[str, Any]:
        return {**self.denoiser.conditions, "threshold": f"{self.bound:g}"}


class DynamicThreshold(Wrapper):
    r"""D ← clip(D, −s, s)/s with s the `quantile` of |D| within each sample, kept in [1, `maximum`].

    Reference: Saharia et al. (2022), arXiv:2205.11487, Sec. 2.3.
    """

    def __init__(self, denoiser: Denoiser, quantile: float = 0.995, maximum: float = float("inf")) -> None:
        number("quantile", quantile, 0.0, 1.0, open_end=True)
        number("maximum", maximum, 1.0)
        self.denoiser, self.quantile, self.maximum = denoiser, quantile, maximum

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        d = self.denoiser(x, level)
        flat = d.abs().flatten(1)
        # torch.quantile knows neither half precision nor long rows; the k-th value serves both.
        rank = 1.0 + self.quantile * (flat.shape[1] - 1)
        low, high = int(rank), min(int(rank) + 1, flat.shape[1])
        ordered = flat.sort(dim=1).values
        s = ordered[:, low - 1].lerp(ordered[:, high - 1], rank - low).clamp(1.0, self.maximum)
        s = s.reshape(-1, *[1] * (d.ndim - 1))
        return d.clamp(-s, s) / s

    @property
    def conditions(self) -> Mapping[str, Any]:
        return {**self.denoiser.conditions, "threshold": f"quantile {self.quantile:g}, at most {self.maximum:g}"}
