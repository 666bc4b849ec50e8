r"""What a probe is: it takes a step *and* its divergence, from one linearised pass, along random directions.

With the history frozen a step T is a function of the state alone, and T = slope·id + (T − slope·id), where `slope` is
the weight of x in the output row. The first part's divergence slope·d is exact; only the second is estimated:

    div T = slope·d + E[vᵀ J_{T − slope·id} v],   v with E[vvᵀ] = I.

The residual u = x − T of the paper has div u = d − div T.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._distributed import shard
from steindiff.levels import Level
from steindiff.tableau import Evaluation, Proposal, Step


class Directions(ABC):
    """A distribution of probe directions. Children are frozen dataclasses."""

    @property
    def group(self) -> int:
        """How many successive directions belong together; only different groups are independent."""
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


class Probed(NamedTuple):
    """A step taken and probed.

    Attributes:
        candidate: T(x), `(B, *)`.
        evaluations: the evaluations of the step, in order.
        divergence: div T of every sample that was probed, `(B,)`, estimated.
        error: standard error of `divergence` over the probes, likewise; 0 where exact, NaN where it cannot be known.
        extra_calls: evaluations of the denoiser beyond the plain step's.
        backward_passes: derivative passes (reverse or forward) through the network.
    """

    candidate: Tensor
    evaluations: tuple[Evaluation, ...]
    divergence: Tensor
    error: Tensor
    extra_calls: int = 0
    backward_passes: int = 0


class Probe(ABC):
    """A way to take a step together with its divergence. Children are frozen dataclasses."""

    @abstractmethod
    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        """Take `step` at the states `x`, `(B, *)`, which live at `level`; random directions come from `generator`."""


@dataclass(frozen=True)
class Hutchinson(Probe):
    r"""A probe that averages vᵀJv over random directions, unbiased for any directions with E[vvᵀ] = I.

    Args:
        probes: number m of directions; the paper uses 5.
        directions: their distribution.
        chunk: linearise at most this many samples at a time, to bound the memory of the graph; None: all at once.
            Conditions must then be cut with the batch (`Denoiser.subset`). Same result up to rounding, same work, but
            as many network calls as chunks.

    Reference: Hutchinson (1989), A stochastic estimator of the trace of the influence matrix.
    """

    derivatives: ClassVar[bool] = True
    """Whether a direction costs a derivative pass, else a further step."""

    probes: int = 5
    directions: Directions = field(default_factory=Rademacher)
    chunk: int | None = None

    def __post_init__(self) -> None:
        self.directions.check(self.probes)
        if self.chunk is not None:
            at_least("chunk", self.chunk, 1)

    @abstractmethod
    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> tuple[Proposal, Tensor]:
        """Take `step` at `x`, `(B, *)`, with its quadratic forms vᵀ J_T v, `(m, B)`, along `v`, `(m, B, *)`."""

    def samples(self, step: Step, x: Tensor) -> int:
        """How many samples of `x`, `(B, *)`, to linearise at a time."""
        return self.chunk or len(x)

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        if not step.tableau.stages:  # affine in x: nothing to estimate
            return linear(step, x, error=0.0)
        v = self.directions.draw(self.probes, x, generator)
        samples = self.samples(step, x)
        parts = [slice(i, i + samples) for i in range(0, len(x), samples)]
        made = [self.along(restricted(step, part, len(x)), x[part], level, v[:, part]) for part in parts]
        slope, d = step.slope, x[0].numel()
        # v'(slope·I)v is known to be slope·|v|²: swap it for its mean, so that only the network's part is random.
        forms = torch.cat([forms for _, forms in made], dim=1)
        values = forms - slope * (v.flatten(2).square().sum(2) - d)
        passes = self.probes * len(step.tableau.stages)  # over the whole batch once, whatever the number of parts
        return Probed(
            torch.cat([proposal.candidate for proposal, _ in made]),
            joined_evaluations([proposal.evaluations for proposal, _ in made]),
            values.mean(0),
            standard_error(values, self.directions.group),
            extra_calls=0 if self.derivatives else passes,
            backward_passes=passes if self.derivatives else 0,
        )


def dot(a: Tensor, b: Tensor) -> Tensor:
    """⟨a, b⟩ of every sample: `(B, *)`, `(B, *)` to `(B,)`."""
    return (a * b).flatten(1).sum(1)


def linear(step: Step, x: Tensor, error: float) -> Probed:
    """Take the step with the divergence of its linear part, slope·d."""
    candidate, evaluations = step(x)
    divergence = x.new_full((len(x),), step.slope * x[0].numel())
    return Probed(candidate, evaluations, divergence, torch.full_like(divergence, error))


def standard_error(values: Tensor, group: int) -> Tensor:
    """Standard error of the mean of `values`, `(m, B)`, whose groups are independent; NaN for a single group."""
    means: Tensor = values.unflatten(0, (-1, group)).mean(1)
    if len(means) == 1:
        return torch.full_like(means[0], float("nan"))
    error: Tensor = means.std(0) / len(means) ** 0.5
    return error


def restricted(step: Step, part: slice, batch: int) -> Step:
    """The step for a part of a batch: its conditions and its history cut likewise."""
    if len(range(*part.indices(batch))) == batch:
        return step
    history = tuple(Evaluation(e.x[part], e.d[part], e.level) for e in step.history)
    return Step(step.tableau, step.denoiser.subset(part, batch), history)


def joined_evaluations(parts: Sequence[Sequence[Evaluation]]) -> tuple[Evaluation, ...]:
    """The evaluations of the parts of a batch put together, stage by stage."""
    return tuple(
        Evaluation(torch.cat([e.x for e in stage]), torch.cat([e.d for e in stage]), stage[0].level)
        for stage in zip(*parts, strict=True)
    )
