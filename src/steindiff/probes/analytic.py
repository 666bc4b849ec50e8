r"""The linear part only: no derivative of the network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.base import Probe, Probed, linear
from steindiff.tableau import Step


@dataclass(frozen=True)
class Analytic(Probe):
    r"""div T ≈ slope·d, the paper's analytical mode. Free, and biased by the network's share of the divergence.

    For first-order steps the bias is (α_t − (σ_t/σ_s) α_s) div D: small at high noise, where D hardly depends on x.
    """

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        return linear(step, x, error=math.nan if step.tableau.stages else 0.0)


VARIANTS = {"analytic": Analytic()}
