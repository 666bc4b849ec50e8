r"""Keeping the denoised image inside the range of the data."""

from __future__ import annotations

from torch import Tensor

from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.levels import Level


class StaticThreshold(Wrapper):
    r"""D ← clip(D, −bound, bound)."""

    def __init__(self, denoiser: Denoiser, bound: float = 1.0) -> None:
        if not bound > 0:
            raise ValueError(f"bound must be > 0, got {bound}")
        self.denoiser = denoiser
        self.bound = bound

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        return self.denoiser(x, level).clamp(-self.bound, self.bound)


class DynamicThreshold(Wrapper):
    r"""D ← clip(D, −s, s)/s with s the `quantile` of |D| within each sample, kept in [1, `maximum`].

    References:
        Photorealistic Text-to-Image Diffusion Models with Deep Language Understanding (Saharia et al., 2022),
        arXiv:2205.11487, Sec. 2.3.
    """

    def __init__(self, denoiser: Denoiser, quantile: float = 0.995, maximum: float = float("inf")) -> None:
        if not 0 < quantile <= 1:
            raise ValueError(f"quantile must be in (0, 1], got {quantile}")
        if not maximum >= 1:
            raise ValueError(f"maximum must be >= 1, got {maximum}")
        self.denoiser = denoiser
        self.quantile = quantile
        self.maximum = maximum

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
