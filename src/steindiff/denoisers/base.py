r"""What a denoiser is: D(x, level) = E[x* | x], the one interface between any model and the solvers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from threading import local
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
        """Network calls made so far by this thread. The difference over a run is its true cost."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        """What a calibration of this denoiser depends on beside the network, by name: its guidance."""
        return {}

    def subset(self, part: slice, batch: int) -> Denoiser:
        """The denoiser of the samples `part` of a batch of `batch`: conditions that belong to samples are cut likewise.

        Its calls count as the whole one's. A denoiser without such conditions is its own part.
        """
        return self


class Wrapper(Denoiser):
    """A denoiser around another one, `denoiser`, whose calls and conditions are its own."""

    denoiser: Denoiser

    @property
    def conditions(self) -> Mapping[str, Any]:
        return self.denoiser.conditions

    @property
    def calls(self) -> int:
        return self.denoiser.calls

    def subset(self, part: slice, batch: int) -> Denoiser:
        smaller = copy.copy(self)
        smaller.denoiser = self.denoiser.subset(part, batch)
        return smaller


class CallCount(local):
    """Calls by each thread: runs that share a denoiser do not see each other's. Parts of a denoiser share it."""

    calls = 0

    def __reduce__(self) -> tuple[type[CallCount], tuple[()]]:
        return CallCount, ()  # a copy, in this process or another, begins at 0


class CountingDenoiser(Denoiser):
    """A denoiser that evaluates something itself, and counts."""

    _count: CallCount

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = super().__new__(cls)
        object.__setattr__(self, "_count", CallCount())
        return self

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        r"""Evaluate once and count."""
        self._count.calls += 1
        tracked = not x.is_inference()
        version = x._version if tracked else 0
        out = real("denoiser", self.denoise(x, level), x)
        if tracked and x._version != version:
            raise RuntimeError("network: it writes into its input, which the solver still needs; let it clone first")
        # A network may reuse its buffer at the next call (CUDA graphs do), and the solver keeps past answers.
        return out.clone()

    @property
    def calls(self) -> int:
        return self._count.calls

    @abstractmethod
    def denoise(self, x: Tensor, level: Level) -> Tensor:
        """One evaluation, `(B, *)` to `(B, *)`."""


class NetworkDenoiser(CountingDenoiser):
    """A leaf around a network. Conditions (labels, text) are bound to it by `functools.partial`, one for each sample.

    Attributes:
        network: called with `(B, *)` states and `(B,)` times or noise levels.
    """

    network: Network

    def evaluate(self, x: Tensor, times: Tensor) -> Tensor:
        """What the network answers, checked, in its own dtype: casting would hide what it is."""
        try:
            return real("network", self.network(x, times), x)
        except RuntimeError as error:
            if "must match" not in str(error):
                raise
            hint = "where labels are bound to it, give Model a function of seeds, see docs/your-network.md"
            raise ValueError(f"network failed on a batch of {len(x)}: {error}; {hint}") from error

    def subset(self: Self, part: slice, batch: int) -> Self:
        smaller = copy.copy(self)
        smaller.network = cut(self.network, part, batch)
        return smaller


def real(name: str, out: Any, x: Tensor) -> Tensor:
    """An answer to the states `x`, once found to be real floating-point numbers of their shape."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        found = f"{out.dtype} numbers" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"{name} must return a tensor of real floating-point numbers, got {found}")
    if out.shape != x.shape:
        raise ValueError(f"{name} must return the shape of its input {tuple(x.shape)}, got {tuple(out.shape)}")
    return out


def cut(network: Network, part: slice, batch: int) -> Network:
    """The network with those conditions cut that are tensors of `batch` rows bound by `functools.partial`."""
    if not isinstance(network, partial):
        return network

    def rows(value: Any) -> Any:
        return value[part] if isinstance(value, Tensor) and value.ndim and len(value) == batch else value

    bound = {name: rows(value) for name, value in network.keywords.items()}
    return partial(cut(network.func, part, batch), *map(rows, network.args), **bound)
