r"""Random directions v with E[vvᵀ] = I."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff._distributed import shard


class Directions(ABC):
    """A distribution of probe directions. Children are frozen dataclasses.

    Attributes:
        group: how many successive directions belong together; only different groups are independent.
    """

    @property
    def group(self) -> int:
        """Size of a group of dependent directions."""
        return 1

    def check(self, num: int) -> None:
        """Refuse a number of probes that is not a positive multiple of the group size."""
        if num < 1 or num % self.group:
            raise ValueError(f"probes must be a positive multiple of {self.group} with {self!r}, got {num}")

    @abstractmethod
    def fill(self, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        """One direction for every sample, of the given shape `(B, *)`."""

    def draw(self, num: int, x: Tensor, generator: torch.Generator) -> Tensor:
        """`num` directions for every sample of `x`, `(B, *)`: a tensor `(num, B, *)`.

        The directions of the whole distributed batch are drawn and this process keeps its part: given equally seeded
        generators, what is drawn for a sample does not depend on how the batch is cut.
        """
        self.check(num)
        offset, total = shard(x)
        rows = [self.fill((total, *x.shape[1:]), x.dtype, generator)[offset : offset + len(x)] for _ in range(num)]
        return torch.stack(rows).to(x.device, non_blocking=True)  # from the CPU it is staged: nothing waits for it


@dataclass(frozen=True)
class Rademacher(Directions):
    r"""Coordinates ±1 with equal chance: Var vᵀJv = ½ Σ_{i≠j} (J_ij + J_ji)², the least of all with independent ones.

    Reference: Hutchinson (1989), A stochastic estimator of the trace of the influence matrix.
    """

    def fill(self, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        bits = torch.randint(0, 2, tuple(shape), generator=generator, device=generator.device)
        return bits.to(dtype).mul_(2).sub_(1)


@dataclass(frozen=True)
class Antithetic(Directions):
    r"""Pairs v, −v, successive.

    For VJP and JVP a pair is *one* probe paid twice: (−v)ᵀJ(−v) = vᵀJv exactly, so nothing is gained. For finite
    differences the pair makes the difference central, and the error of second order cancels.
    """

    of: Directions = field(default_factory=Rademacher)

    @property
    def group(self) -> int:
        return 2 * self.of.group

    def fill(self, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return self.of.fill(shape, dtype, generator)

    def draw(self, num: int, x: Tensor, generator: torch.Generator) -> Tensor:
        self.check(num)
        v = self.of.draw(num // 2, x, generator)
        return torch.stack([v, -v], dim=1).flatten(0, 1)
