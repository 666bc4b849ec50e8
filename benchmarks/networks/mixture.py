r"""Data whose denoiser is known in closed form: a mixture of Gaussians, a set of points."""

from __future__ import annotations

import torch
from torch import Tensor

from steindiff.denoisers.base import CountingDenoiser
from steindiff.levels import Level


class Mixture(CountingDenoiser):
    r"""Data Σ_k π_k N(μ_k, c_k I): D(x) = Σ_k w_k(x) D_k(x).

    D_k(x) = μ_k + g_k (x − α μ_k), g_k = α c_k/(α² c_k + σ²); w_k ∝ π_k N(x; α μ_k, (α² c_k + σ²) I).
    Its divergence is d Σ w_k g_k + Σ_k w_k ⟨∇log w_k, D_k⟩ with ∇log w_k = a_k − Σ_j w_j a_j,
    a_k = −(x − α μ_k)/(α² c_k + σ²).

    Args:
        means: μ, `(K, *)`.
        variances: c, `(K,)`, >= 0.
        weights: π, `(K,)`, positive; normalised here.
    """

    def __init__(self, means: Tensor, variances: Tensor, weights: Tensor) -> None:
        if variances.shape != means.shape[:1] or weights.shape != means.shape[:1]:
            raise ValueError(
                f"means {tuple(means.shape)}, variances {tuple(variances.shape)}, weights {tuple(weights.shape)}: "
                "the first dimension of means must be the length of the others"
            )
        if bool((variances < 0).any()) or bool((weights <= 0).any()):
            raise ValueError("variances must be >= 0 and weights > 0")
        self.means = means
        self.flat = means.flatten(1)
        self.square = self.flat.square().sum(1)
        self.variances = variances
        self.weights = weights / weights.sum()

    def _posterior(self, z: Tensor, level: Level) -> tuple[Tensor, Tensor, Tensor]:
        """Responsibilities w `(B, K)`, gains g `(K,)` and marginal variances v `(K,)` for flat states z `(B, d)`."""
        v = level.alpha**2 * self.variances + level.sigma**2
        distance = z.square().sum(1, keepdim=True) - 2.0 * level.alpha * z @ self.flat.T + level.alpha**2 * self.square
        logits = self.weights.log() - 0.5 * z.shape[1] * v.log() - 0.5 * distance / v
        return logits.softmax(1), level.alpha * self.variances / v, v

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        if level.sigma == 0.0:
            return x / level.alpha
        z = x.flatten(1)
        w, g, _ = self._posterior(z, level)
        kept = w * (1.0 - level.alpha * g)
        return ((w @ g)[:, None] * z + kept @ self.flat).reshape(x.shape)

    def divergence(self, x: Tensor, level: Level) -> Tensor:
        r"""Exact div D, `(B,)`."""
        z = x.flatten(1)
        w, g, v = self._posterior(z, level)
        a = -(z[:, None] - level.alpha * self.flat) / v[:, None]  # (B, K, d)
        d = g[:, None] * z[:, None] + (1.0 - level.alpha * g)[:, None] * self.flat
        centred = a - (w[..., None] * a).sum(1, keepdim=True)
        return z.shape[1] * (w @ g) + (w * (centred * d).sum(2)).sum(1)

    def sample(self, num: int, generator: torch.Generator) -> Tensor:
        """Draw clean data, `(num, *)`."""
        k = torch.multinomial(self.weights, num, replacement=True, generator=generator)
        noise = torch.randn((num, *self.means.shape[1:]), generator=generator, dtype=self.means.dtype)
        return self.means[k] + self.variances[k].sqrt().reshape(-1, *[1] * (noise.ndim - 1)) * noise


class Empirical(Mixture):
    r"""The exact denoiser of a data set: the mixture of Dirac masses at its points, `(N, *)`.

    D(x) = Σ_n softmax_n(−‖x − α x_n‖²/(2σ²)) x_n; its flow ends in the data, so Stein's identity can be checked
    against known clean targets.
    """

    def __init__(self, data: Tensor) -> None:
        super().__init__(data, data.new_zeros(len(data)), data.new_ones(len(data)))
