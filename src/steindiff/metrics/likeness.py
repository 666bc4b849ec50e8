r"""How much samples are like the many-step samples of the same seeds: peak signal-to-noise ratio, and spread."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from torch import Tensor

from steindiff.corrections.alignment import Groups


def psnr(images: Tensor, reference: Tensor) -> float:
    r"""Mean of 10 log₁₀(4/‖x − y‖²_mean) over images in [−1, 1], `(N, *)`, in decibels; ∞ if all are equal."""
    error = (images.double() - reference.double()).square().flatten(1).mean(1)
    if not bool(error.any()):
        return math.inf
    return float((10.0 * (4.0 / error.clamp(min=1e-12)).log10()).mean())


def spread(samples: Tensor, reference: Tensor, conditions: Sequence[Hashable]) -> float:
    r"""How much samples of one condition differ, over how much many-step samples do: √(E‖x′‖²/E‖y′‖²).

    Primes are deviations from the mean of the same condition. 1 is right; below it variety is lost.

    Args:
        samples: `(N, *)`.
        reference: many-step samples of the same seeds, `(N, *)`.
        conditions: of the samples; those no other has are compared with all of their kind.
    """
    groups = Groups.of(conditions)
    varied = [(x.double() - groups.means(x.double())).square().sum() for x in (samples, reference)]
    return float((varied[0] / varied[1].clamp(min=1e-300)).sqrt())
