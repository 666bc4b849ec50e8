r"""Differences: works on every host, at the price of network calls."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes.base import Forms, Hutchinson, dot
from steindiff.probes.directions import Antithetic, Directions
from steindiff.tableau import Step


@dataclass(frozen=True)
class FiniteDifference(Hutchinson):
    r"""vᵀJv ≈ ⟨v, T(x + hv) − T(x)⟩/h; along a pair ±v the differences average to the central one.

    Costs one more step per direction. The denoiser varies on the scale of the noise, so h is a fraction of σ.

    Args:
        probes: number of directions, counting both of a pair.
        directions: pairs by default, for an error of order h² rather than h.
        relative: h/σ. The default suits networks that compute in float32 or less, whatever the dtype of the state;
            with a float64 network 1e-4 is more accurate.
    """

    probes: int = 6
    directions: Directions = field(default_factory=Antithetic)
    relative: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.relative > 0:
            raise ValueError(f"relative must be > 0, got {self.relative}")

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> Forms:
        h = level.sigma * self.relative
        candidate, evaluations = step(x)
        forms = torch.stack([dot(row, step(x + h * row).candidate - candidate) / h for row in v])
        return Forms(candidate, evaluations, forms, len(v) * len(step.tableau.stages), 0)


VARIANTS = {"finite-difference": FiniteDifference()}
