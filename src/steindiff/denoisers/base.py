r"""What a denoiser is: D(x, level) = E[x* | x], the one interface between any model and the solvers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor

from steindiff.levels import Level

Network = Callable[[Tensor, Tensor], Tensor]
"""A network: states `(B, *)` and conditioning times `(B,)` to an output `(B, *)`."""

Self = TypeVar("Self", bound="NetworkDenoiser")


class Denoiser(ABC):
    r"""D(x, level) = E[x* | α x* + σ ε = x], for states x of shape `(B, *)`.

    Wrappers (guidance, thresholding) take denoisers and are denoisers; leaves derive from `CountingDenoiser`.
    """

    @abstractmethod
    def __call__(self, x: Tensor, level: Level) -> Tensor:
        """Denoise the states `x`, `(B, *)`, all at the same level; returns `(B, *)` in the dtype of `x`."""

    @property
    @abstractmethod
    def calls(self) -> int:
        """Network calls made so far. The difference over a run is its true cost."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What a calibration of this denoiser depends on beside the network, by name: its guidance."""
        return {}

    def subset(self, part: slice, batch: int) -> Denoiser:
        """The denoiser of the samples `part` of a batch of `batch`: conditions that belong to samples are cut likewise.

        Its calls count as the whole one's. A denoiser without such conditions is its own part.
        """
        return self


class CountingDenoiser(Denoiser):
    """A denoiser that evaluates something itself, and counts."""

    @cached_property
    def _count(self) -> list[int]:
        """The number of calls, in a list so that parts can share it."""
        return [0]

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        self._count[0] += 1
        return self.denoise(x, level)

    @property
    def calls(self) -> int:
        return self._count[0]

    @abstractmethod
    def denoise(self, x: Tensor, level: Level) -> Tensor:
        """One evaluation, `(B, *)` to `(B, *)`."""


class NetworkDenoiser(CountingDenoiser):
    """A leaf around a network. Conditions (labels, text) are bound to it by `functools.partial`, one for each sample.

    Attributes:
        network: called with `(B, *)` states and `(B,)` times or noise levels.
    """

    network: Network

    def subset(self: Self, part: slice, batch: int) -> Self:
        self._count[0] += 0  # made before it is shared
        smaller = copy.copy(self)
        smaller.network = cut(self.network, part, batch)
        return smaller


def cut(network: Network, part: slice, batch: int) -> Network:
    """The network with those conditions cut that are tensors of `batch` rows bound by `functools.partial`."""
    if not isinstance(network, partial):
        return network

    def rows(value: Any) -> Any:
        return value[part] if isinstance(value, Tensor) and value.ndim and len(value) == batch else value

    bound = {name: rows(value) for name, value in network.keywords.items()}
    return partial(cut(network.func, part, batch), *map(rows, network.args), **bound)
