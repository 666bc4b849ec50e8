r"""The other probes: the linear part alone, one probe after another, all coordinates, part of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.base import Probe, Probed, joined_evaluations, linear, restricted
from steindiff.probes.hutchinson import VJP
from steindiff.tableau import Step


@dataclass(frozen=True)
class Analytic(Probe):
    r"""div T ≈ slope·d, the paper's analytical mode. Free, and biased by the network's share of the divergence.

    For first-order steps the bias is (α_t − (σ_t/σ_s) α_s) div D: small at high noise, where D hardly depends on x.
    """

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        return linear(step, x, error=math.nan if step.tableau.stages else 0.0)


@dataclass(frozen=True)
class Adaptive(Probe):
    r"""The paper's adaptive mode: `high` while σ >= threshold, for which the paper gives no number, `low` below it."""

    threshold: float = 1.0
    high: Probe = field(default_factory=Analytic)
    low: Probe = field(default_factory=VJP)

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be >= 0, got {self.threshold}")

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        probe = self.high if level.sigma >= self.threshold else self.low
        return probe(step, x, level, generator)


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


VARIANTS = {"analytic": Analytic(), "adaptive": Adaptive()}
