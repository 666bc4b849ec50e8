r"""Probes that are here to be compared with: normal directions, forward mode, all coordinates, part of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes._pullback import linearised, proposed
from steindiff.probes.base import Directions, Hutchinson, Probe, Probed, dot, joined_evaluations, linear, restricted
from steindiff.probes.hutchinson import VJP, forward_mode
from steindiff.tableau import Evaluation, Proposal, Step


@dataclass(frozen=True)
class Normal(Directions):
    r"""Coordinates N(0, 1), as in Algorithm 1: Var vᵀJv = ½ Σ_ij (J_ij + J_ji)², diagonal included."""

    def fill(self, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=dtype, device=generator.device)


@dataclass(frozen=True)
class JVP(Hutchinson):
    r"""vᵀJv = ⟨v, Jv⟩ with all m tangents carried through one forward pass (`vmap` of `torch.func.jvp`).

    Costs no network call and keeps no graph, but holds m tangents at a time and runs attention in its unfused form,
    so the candidate equals the plain step's only up to rounding where the network attends.
    """

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> tuple[Proposal, Tensor]:
        at = x.detach().contiguous()  # forward mode refuses expanded tensors

        def flat(z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            candidate, evaluations = proposed(step, z)
            return candidate, tuple(tensor for e in evaluations for tensor in (e.x, e.d))

        def push(tangent: Tensor) -> Any:
            return torch.func.jvp(flat, (at,), (tangent,), has_aux=True)

        with forward_mode():
            # Candidate and evaluations do not depend on the tangent: left unbatched, they are computed once.
            unbatched: Any = (None, 0, None)
            candidate, tangents, tensors = torch.func.vmap(push, out_dims=unbatched)(v)
        forms = torch.stack([dot(row, tangent.detach()) for row, tangent in zip(v, tangents, strict=True)])
        levels = [stage.level for stage in step.tableau.stages]
        pairs = zip(tensors[::2], tensors[1::2], levels, strict=True)
        evaluations = tuple(Evaluation(z.detach(), d.detach(), where) for z, d, where in pairs)
        return Proposal(candidate.detach(), evaluations), forms


@dataclass(frozen=True)
class Exact(Probe):
    r"""div T = Σ_i ⟨Jᵀe_i, e_i⟩: one backward pass per coordinate, of at most `limit`."""

    limit: int = 1024

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        d = x[0].numel()
        if d > self.limit:
            raise ValueError(f"x must have at most limit = {self.limit} dimensions, got {d}; each is a backward pass")
        if not step.tableau.stages:
            return linear(step, x, error=0.0)
        proposal, pull = linearised(step, x)
        divergence = x.new_zeros(len(x))
        for i in range(d):
            e = x.new_zeros(d)
            e[i] = 1.0
            divergence += pull(e.reshape(x.shape[1:]).expand_as(x)).flatten(1)[:, i]
        return Probed(
            *proposal,
            divergence,
            torch.zeros_like(divergence),
            backward_passes=d * len(step.tableau.stages),
        )


@dataclass(frozen=True)
class OnPart(Probe):
    r"""Another probe on the first samples of a batch alone.

    A relaxation that averages over the batch (`OverBatch`) needs E[div u], which a part of the batch estimates as well
    as all of it, only with more noise: its standard error grows by 1/√share. Derivatives cost `share` of what they
    would, in time and in memory. The step becomes two network calls, one for each part. Samples must not be in an
    order that matters; the conditions must be cut with the batch (`Denoiser.subset`).
    """

    share: float = 0.5
    probe: Probe = field(default_factory=VJP)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        """Take `step`; `divergence` and `error` are those of the first ⌈share · B⌉ samples."""
        count = math.ceil(self.share * len(x))
        if count == len(x):
            return self.probe(step, x, level, generator)
        part, rest = slice(0, count), slice(count, len(x))
        probed = self.probe(restricted(step, part, len(x)), x[part], level, generator)
        candidate, evaluations = restricted(step, rest, len(x))(x[rest])
        return probed._replace(
            candidate=torch.cat([probed.candidate, candidate]),
            evaluations=joined_evaluations([probed.evaluations, evaluations]),
        )


VARIANTS = {"jvp": JVP(), "exact": Exact()}
