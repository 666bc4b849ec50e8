r"""Probe some of a batch, take the plain step with the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.base import Probe, Probed, joined_evaluations, restricted
from steindiff.probes.vjp import VJP
from steindiff.tableau import Step


@dataclass(frozen=True)
class OnPart(Probe):
    r"""Another probe on the first samples of a batch alone.

    A relaxation that averages over the batch (`OverBatch`) needs E[div u], which a part of the batch estimates as well
    as all of it, only with more noise: its standard error grows by 1/√share. Derivatives cost `share` of what they
    would, in time and in memory. The step becomes two network calls, one for each part. Samples must not be in an
    order that matters; the conditions must be cut with the batch (`Denoiser.subset`).

    Args:
        share: which part of a batch, in (0, 1], rounded up to whole samples.
        probe: how to probe it.
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
