r"""What a network predicts, as a denoiser: ε, v, x*, score, flow velocity, EDM's D."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from steindiff._checks import number
from steindiff.denoisers.base import Network, NetworkDenoiser
from steindiff.levels import Level


@dataclass(eq=False, repr=False)
class Prediction(NetworkDenoiser):
    r"""A network f(x, t) together with the formula that turns its output into x*.

    Args:
        network: called with `(B, *)` states in `dtype` and `(B,)` times; conditions (labels, text) are bound by the
            caller, e.g. with `functools.partial`.
        time: what the network is conditioned on, as a function of the level; default the schedule's own time.
        dtype: the network's own dtype; states are cast to it and the output is cast back. None: leave as is.
    """

    network: Network
    time: Callable[[Level], float] = attrgetter("t")
    dtype: torch.dtype | None = None

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

    Reference: Salimans & Ho (2022), arXiv:2202.00512.
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


class EDMDenoiser(NetworkDenoiser):
    r"""A network D_θ(x; σ) for x = x* + σ ε, used on any schedule: D(x, level) = D_θ(x/α; told · σ/α).

    Args:
        network: called with `(B, *)` states and `(B,)` noise levels σ, returns the denoised image.
    """

    def __init__(self, network: Network) -> None:
        self.network = network

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        sigma = torch.full(x.shape[:1], level.told * level.ratio, dtype=torch.float32, device=x.device)
        return self.evaluate(x if level.alpha == 1.0 else x / level.alpha, sigma).to(x.dtype)


def precondition(
    network: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigma: Tensor, sigma_data: float = 0.5
) -> Tensor:
    r"""EDM preconditioning of a raw network F: D_θ(x; σ) = c_skip x + c_out F(c_in x; c_noise).

    c_skip = σ_d²/(σ² + σ_d²), c_out = σ σ_d/√(σ² + σ_d²), c_in = 1/√(σ² + σ_d²), c_noise = ln(σ)/4. All but F itself is
    computed in the dtype of `x`.

    Reference: Karras et al. (2022), arXiv:2206.00364, Table 1.
    """
    s = sigma.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    total = (s**2 + sigma_data**2).sqrt()
    f = network(x / total, s.flatten().log() / 4)
    return (sigma_data / total) ** 2 * x + s * sigma_data / total * f.to(x.dtype)


@dataclass
class Preconditioned:
    r"""A raw EDM network F with its preconditioning, as a function that denoises; see `precondition`.

    Args:
        network: the raw F, called with `(B, *)` inputs and `(B,)` values of c_noise.
        sigma_data: σ_d, standard deviation of the data.
        dtype: F's own dtype.
    """

    network: Callable[[Tensor, Tensor], Tensor]
    sigma_data: float = 0.5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        number("sigma_data", self.sigma_data, 0.0, open_end=True)

    def __call__(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Denoise `x`, `(B, *)`, at noise levels `sigma`, `(B,)`."""
        return precondition(
            lambda z, c_noise: self.network(z.to(self.dtype), c_noise.to(self.dtype)), x, sigma, self.sigma_data
        )
