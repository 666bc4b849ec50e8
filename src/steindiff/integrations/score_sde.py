r"""Networks of the score-SDE code base: what their output means, and what they are conditioned on.

Reference: Song et al. (2021), arXiv:2011.13456.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter

from steindiff._checks import at_least
from steindiff.denoisers import Epsilon, Score
from steindiff.denoisers.base import Network
from steindiff.levels import Level


def vp_denoiser(network: Network, steps: int = 1000) -> Epsilon:
    r"""A VP or sub-VP network: f(x, (N − 1) t) with score −f/σ, so f ≈ ε. Use on `VP()` or `SubVP()`.

    Args:
        network: `(B, *)` states and `(B,)` labels to an output `(B, *)`.
        steps: N, the number of discrete steps its labels count.
    """
    at_least("steps", steps, 2)
    return Epsilon(network, time=partial(_label, steps - 1))


def ve_denoiser(network: Network) -> Score:
    r"""A VE network: f(x, σ) ≈ ∇ log p(x), its labels the noise level itself. Use on `VE()`.

    Args:
        network: `(B, *)` states and `(B,)` noise levels to a score `(B, *)`.
    """
    return Score(network, time=attrgetter("sigma"))


def _label(last: int, level: Level) -> float:
    return last * level.t
