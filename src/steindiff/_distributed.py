r"""A batch that may be spread over processes.

With `torch.distributed` initialised every process holds a shard of one global batch, in order of rank. What is computed
here does not depend on how the batch was cut. The process group must serve tensors on CPUs, too, as that of
`init_process_group()` without a backend does: on GPUs `cpu:gloo,cuda:nccl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Rank(NamedTuple):
    """Whose part of a sequence this is: that of process `rank` of `world`; parts in order of rank make the whole."""

    rank: int = 0
    world: int = 1

    def slice(self, items: Sequence[T]) -> Sequence[T]:
        """The part of some items; parts differ in length by one at most.

        >>> [list(Rank(rank, 3).slice(range(7))) for rank in range(3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        n = len(items)
        return items[n * self.rank // self.world : n * (self.rank + 1) // self.world]


EVERYTHING = Rank()
"""All of it."""


class Shard(NamedTuple):
    """Which part of the global batch this process holds: samples offset, …, offset + size − 1 of `total`."""

    offset: int
    total: int


_ALONE = ContextVar("alone", default=False)


@contextmanager
def local_only() -> Iterator[None]:
    """Inside, the local batch is the whole one, also in a process group: for processes that work independently."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def distributed() -> bool:
    """Whether the batch is spread over a process group."""
    return dist.is_available() and dist.is_initialized() and not _ALONE.get()


def rank() -> Rank:
    """The part of this process; everything without a process group."""
    return Rank(dist.get_rank(), dist.get_world_size()) if distributed() else EVERYTHING


def shard(x: Tensor) -> Shard:
    """The place of the local batch `x`, `(B, *)`, in the global one."""
    if not distributed():  # nothing to ask, and a GPU need not be waited for
        return Shard(0, len(x))
    place, world = rank()
    sizes = torch.zeros(world, dtype=torch.int64, device=x.device)
    sizes[place] = len(x)
    all_reduce_sum(sizes)
    return Shard(int(sizes[:place].sum()), int(sizes.sum()))


def all_reduce_sum(values: Tensor) -> Tensor:
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
    return all_reduce_sum(whole)


def mean(values: Tensor) -> Tensor:
    """The mean of `values`, `(B, *)`, over the global batch: float64, `(*)`, equal in all processes.

    Gathered before they are summed, so that it is the mean of one process to the bit.
    """
    return gather(values).mean(0, dtype=torch.float64)


def standard_error(values: Tensor) -> Tensor:
    """The standard error of `mean(values)`, `(*)`, over the global batch `(B, *)`."""
    spread = mean(values.square()) - mean(values).square()
    return (spread.clamp(min=0.0) / shard(values).total).sqrt()


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
