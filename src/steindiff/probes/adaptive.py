r"""One probe at high noise, another at low."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.analytic import Analytic
from steindiff.probes.base import Probe, Probed
from steindiff.probes.vjp import VJP
from steindiff.tableau import Step


@dataclass(frozen=True)
class Adaptive(Probe):
    r"""The paper's adaptive mode: `high` while σ >= threshold, `low` below it.

    Args:
        threshold: the σ at which to change over; the paper gives none.
        high: probe of the early, noisy steps.
        low: probe of the late ones.
    """

    threshold: float = 1.0
    high: Probe = field(default_factory=Analytic)
    low: Probe = field(default_factory=VJP)

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be >= 0, got {self.threshold}")

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        probe = self.high if level.sigma >= self.threshold else self.low
        return probe(step, x, level, generator)


VARIANTS = {"adaptive": Adaptive()}
