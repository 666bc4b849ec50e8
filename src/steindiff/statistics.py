r"""Averages over a batch, also one that is spread over processes.

With `torch.distributed` initialised every process holds a shard of one global batch, in order of rank. What is computed
here does not depend on how the batch was cut. The process group must serve tensors on CPUs, too, as that of
`init_process_group()` without a backend does: on GPUs `cpu:gloo,cuda:nccl`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Share(NamedTuple):
    """Whose part of a sequence this is: that of process `rank` of `world`; parts in order of rank make the whole."""

    rank: int = 0
    world: int = 1

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """The part of some items; parts differ in length by one at most.

        >>> [list(Share(rank, 3).of(range(7))) for rank in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        n = len(items)
        return items[n * self.rank // self.world : n * (self.rank + 1) // self.world]


WHOLE = Share()
"""All of it."""


class Shard(NamedTuple):
    """Which part of the global batch this process holds: samples offset, …, offset + size − 1 of `total`."""

    offset: int
    total: int


_ALONE = ContextVar("alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, the local batch is the whole one, also in a process group: for processes that work independently."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def distributed() -> bool:
    """Whether the batch is spread over a process group."""
    return dist.is_available() and dist.is_initialized() and not _ALONE.get()


def share() -> Share:
    """The part of this process; everything where there is no process group."""
    return Share(dist.get_rank(), dist.get_world_size()) if distributed() else WHOLE


def shard(x: Tensor) -> Shard:
    """The place of the local batch `x`, `(B, *)`, in the global one."""
    if not distributed():  # nothing to ask, and a GPU need not be waited for
        return Shard(0, len(x))
    rank, world = share()
    sizes = torch.zeros(world, dtype=torch.int64, device=x.device)
    sizes[rank] = len(x)
    total(sizes)
    return Shard(int(sizes[:rank].sum()), int(sizes.sum()))


def total(values: Tensor) -> Tensor:
    """Replace `values`, `(*)`, by their sum over all processes, equal in all of them."""
    if distributed():
        dist.all_reduce(values)
    return values


def gather(values: Tensor) -> Tensor:
    """The global batch, `(total, *)`, of which `values`, `(B, *)`, is the local part; in order of rank, to the bit."""
    if not distributed():
        return values
    place = shard(values)
    whole = values.new_zeros((place.total, *values.shape[1:]))
    whole[place.offset : place.offset + len(values)] = values
    return total(whole)


def mean(values: Tensor) -> Tensor:
    """The mean of `values`, `(B, *)`, over the global batch: float64, `(*)`, equal in all processes.

    Gathered before they are summed, so that it is the mean of one process to the bit.
    """
    whole = gather(values.double())
    return whole.sum(0) / len(whole)


def standard_error(values: Tensor) -> Tensor:
    """The standard error of `mean(values)`, `(*)`, over the global batch `(B, *)`."""
    spread = mean(values.square()) - mean(values).square()
    return (spread.clamp(min=0.0) / shard(values).total).sqrt()


class Average(ABC):
    """Over what a statistic is averaged. Children are frozen dataclasses."""

    @abstractmethod
    def __call__(self, values: Tensor) -> Tensor:
        """Average `values`, `(B,)`: a float64 scalar, or `(B,)` where every sample keeps its own."""


@dataclass(frozen=True)
class OverBatch(Average):
    """One number for the whole batch, all processes together, as in the paper. Ties a sample to its batch."""

    def __call__(self, values: Tensor) -> Tensor:
        return mean(values)


@dataclass(frozen=True)
class PerSample(Average):
    """Every sample its own number: noisier, but a sample then depends on its own state and probes alone."""

    def __call__(self, values: Tensor) -> Tensor:
        return values.double()


def ratio_error(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    r"""The ratio of two means over the global batch, and its standard error.

    ratio = N/D with N, D the means of `numerator` and `denominator`, both `(B,)`; to first order its standard error
    is √(Var(n − ratio·d)/B)/|D|, which counts the spread over samples and the noise of their probes alike.

    Returns:
        Ratio and standard error, float64 scalars.
    """
    bottom = mean(denominator)
    ratio = mean(numerator) / bottom
    spread = mean((numerator.double() - ratio * denominator.double()).square())
    return ratio, (spread / shard(numerator).total).sqrt() / bottom.abs()
