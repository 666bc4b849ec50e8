r"""The analytical first step: where noise hides everything, a formula answers for the network."""

from __future__ import annotations

from torch import Tensor

from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.levels import Level


class AnalyticalFirstStep(Wrapper):
    r"""At the first level D = α c x/(α² c + σ²), the denoiser of N(0, c): no network call, and `calls` says so.

    c = 0 is ε = x/σ. A run's `nfe` still counts the evaluation, its `network_calls` does not.

    Args:
        denoiser: the model, asked at all later levels.
        first: the level a run begins at; noisier ones are answered likewise.
        variance: c >= 0, of the data about 0.

    References:
        GENIE: Higher-Order Denoising Diffusion Solvers (Dockhorn et al., 2022), arXiv:2210.05475.
    """

    def __init__(self, denoiser: Denoiser, first: Level, variance: float = 0.0) -> None:
        if not variance >= 0:
            raise ValueError(f"variance must be >= 0, got {variance}")
        self.denoiser = denoiser
        self.first = first
        self.variance = variance

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        if level.ratio < self.first.ratio * (1.0 - 1e-9):
            return self.denoiser(x, level)
        return x * (level.alpha * self.variance / (level.alpha**2 * self.variance + level.sigma**2))
