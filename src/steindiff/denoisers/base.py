r"""What a denoiser is: D(x, level) = E[x* | x], the one interface between any model and the solvers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from steindiff.levels import Level


class Denoiser(ABC):
    r"""D(x, level) = E[x* | α x* + σ ε = x], for states x of shape `(B, *)`.

    Wrappers (guidance, thresholding) take denoisers and are denoisers; leaves derive from `Leaf`.
    """

    @abstractmethod
    def __call__(self, x: Tensor, level: Level) -> Tensor:
        """Denoise the states `x`, `(B, *)`, all at the same level; returns `(B, *)` in the dtype of `x`."""

    @property
    @abstractmethod
    def calls(self) -> int:
        """Network calls made so far. The difference over a run is its true cost."""


class Leaf(Denoiser):
    """A denoiser that evaluates something itself, and counts."""

    _calls: int = 0

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        self._calls += 1
        return self.denoise(x, level)

    @property
    def calls(self) -> int:
        return self._calls

    @abstractmethod
    def denoise(self, x: Tensor, level: Level) -> Tensor:
        """One evaluation, `(B, *)` to `(B, *)`."""
