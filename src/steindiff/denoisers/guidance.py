r"""Classifier-free guidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level


class Guided(Denoiser):
    r"""D = D_u + w (D_c − D_u), optionally rescaled towards the spread of D_c.

    w = 1 is the conditional denoiser (and costs one call), w > 1 guides. The guided D is not a conditional
    mean: Stein's identity does not hold for it. Rescaling: D ← φ D std(D_c)/std(D) + (1 − φ) D, std per sample.

    Args:
        conditional: D_c.
        unconditional: D_u.
        scale: w >= 0.
        rescale: φ in [0, 1].

    References:
        Classifier-Free Diffusion Guidance (Ho & Salimans, 2022), arXiv:2207.12598;
        Common Diffusion Noise Schedules and Sample Steps are Flawed (Lin et al., 2024), arXiv:2305.08891.
    """

    def __init__(self, conditional: Denoiser, unconditional: Denoiser, scale: float, rescale: float = 0.0) -> None:
        if not scale >= 0:
            raise ValueError(f"scale must be >= 0, got {scale}")
        if not 0 <= rescale <= 1:
            raise ValueError(f"rescale must be from 0 to 1, got {rescale}")
        self.conditional = conditional
        self.unconditional = unconditional
        self.scale = scale
        self.rescale = rescale

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
