r"""Networks that predict something else: noise, velocity, score. Each is one formula for x* given x and output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from steindiff.denoisers.base import Network, NetworkDenoiser
from steindiff.levels import Level


def network_time(level: Level) -> float:
    """The default conditioning: the schedule's own time."""
    return level.t


class Prediction(NetworkDenoiser):
    r"""A network f(x, t) together with the formula that turns its output into x*.

    Args:
        network: called with `(B, *)` states in `dtype` and `(B,)` times; conditions (labels, text) are bound by the
            caller, e.g. with `functools.partial`.
        time: what the network is conditioned on, as a function of the level.
        dtype: the network's own dtype; states are cast to it and the output is cast back. None: leave as is.
    """

    def __init__(
        self,
        network: Network,
        time: Callable[[Level], float] = network_time,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.network = network
        self.time = time
        self.dtype = dtype

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        inputs = x if self.dtype is None else x.to(self.dtype)
        t = torch.full(x.shape[:1], self.time(level), dtype=inputs.dtype, device=x.device)
        return self.clean(x, self.evaluate(inputs, t).to(x.dtype), level)

    @abstractmethod
    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        """The denoised image from state and network output, both `(B, *)`."""


class X0(Prediction):
    r"""D = f."""

    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        return output


class Epsilon(Prediction):
    r"""f ≈ ε: D = (x − σ f)/α."""

    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        return (x - level.sigma * output) / level.alpha


class Velocity(Prediction):
    r"""f ≈ v = α ε − σ x*: D = (α x − σ f)/(α² + σ²).

    References:
        Progressive Distillation for Fast Sampling of Diffusion Models (Salimans & Ho, 2022), arXiv:2202.00512.
    """

    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        norm = level.alpha**2 + level.sigma**2
        return (level.alpha / norm) * x - (level.sigma / norm) * output


class FlowVelocity(Prediction):
    r"""f ≈ ε − x* (rectified flow): D = (x − σ f)/(α + σ)."""

    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        return (x - level.sigma * output) / (level.alpha + level.sigma)


class Score(Prediction):
    r"""f ≈ ∇ log p_t(x): D = (x + σ² f)/α (Tweedie)."""

    def clean(self, x: Tensor, output: Tensor, level: Level) -> Tensor:
        return (x + level.sigma**2 * output) / level.alpha
