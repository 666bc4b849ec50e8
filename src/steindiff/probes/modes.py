r"""The paper's other modes: the linear part alone, and one probe after another."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff._checks import number
from steindiff.levels import Level
from steindiff.probes.base import Probe, Probed, linear
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
        number("threshold", self.threshold, 0.0)

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        probe = self.high if level.sigma >= self.threshold else self.low
        return probe(step, x, level, generator)


VARIANTS = {"analytic": Analytic(), "adaptive": Adaptive()}
