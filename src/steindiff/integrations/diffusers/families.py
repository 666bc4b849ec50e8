r"""How diffusers schedulers write a noise level: three families, told apart by what a scheduler holds.

A scheduler keeps `sigmas` and `timesteps`. What an entry of `sigmas` means, and what the network is conditioned on,
depends on the family:

    variance preserving   sigma = σ/α, α² + σ² = 1     timestep: the (possibly fractional) training time
    flow matching         sigma = σ = 1 − α            timestep: 1000 σ
    EDM                   sigma = σ, α = 1             timestep: ln(σ)/4
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from steindiff._discovery import named
from steindiff.denoisers import (
    X0,
    Denoiser,
    DynamicThreshold,
    EDMDenoiser,
    Epsilon,
    FlowVelocity,
    Preconditioned,
    StaticThreshold,
    Velocity,
)
from steindiff.denoisers.prediction import Network, Prediction
from steindiff.levels import Level, Levels
from steindiff.schedules import EDM, Discrete, Flow, Schedule
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh1, UniPCBh2

PREDICTIONS: dict[str, type[Prediction]] = {"epsilon": Epsilon, "sample": X0, "v_prediction": Velocity}


@dataclass(frozen=True)
class Family(ABC):
    """What a family of schedulers means by its numbers.

    Args:
        config: the scheduler's configuration.
        schedule: the forward process the network was trained on; its time is the level's `t`.
    """

    config: Mapping[str, Any]
    schedule: Schedule

    @abstractmethod
    def level(self, timestep: float, sigma: float) -> Level:
        """The level a scheduler means by an entry of `timesteps` and the one of `sigmas` beside it."""

    @abstractmethod
    def sigma(self, level: Level) -> float:
        """What a scheduler writes into `sigmas` for a level."""

    @abstractmethod
    def timestep(self, level: Level) -> float:
        """What a scheduler writes into `timesteps` for a level."""

    @abstractmethod
    def predict(self, network: Network) -> Denoiser:
        """The denoiser of a network that takes this family's timesteps."""

    def denoiser(self, network: Network) -> Denoiser:
        """The denoiser of `network`, thresholded if the configuration asks for it.

        Args:
            network: `(B, *)` states as a pipeline would pass them and `(B,)` timesteps to an output `(B, *)`.
        """
        denoiser = self.predict(network)
        if self.config.get("thresholding"):
            return DynamicThreshold(
                denoiser, self.config["dynamic_thresholding_ratio"], self.config["sample_max_value"]
            )
        if self.config.get("clip_sample"):
            return StaticThreshold(denoiser, self.config["clip_sample_range"])
        return denoiser

    def levels(self, scheduler: Any) -> Levels:
        """The levels of the run a scheduler has been set to, in one entry a step whatever the scheduler's order."""
        every = scheduler.order
        sigmas = scheduler.sigmas.tolist()
        times = [*scheduler.timesteps.tolist()[::every], 0.0]
        sigmas = [*sigmas[:-1:every], sigmas[-1]]
        return Levels(tuple(self.level(t, s) for t, s in zip(times, sigmas, strict=True)), self.schedule)


class VariancePreserving(Family):
    """DDPM-type networks: discrete times, ε, v or x0 prediction."""

    def level(self, timestep: float, sigma: float) -> Level:
        alpha = 1.0 / math.hypot(1.0, sigma)
        return Level(timestep, alpha, sigma * alpha)

    def sigma(self, level: Level) -> float:
        return level.ratio

    def timestep(self, level: Level) -> float:
        return level.t

    def predict(self, network: Network) -> Denoiser:
        return named("prediction_type", self.config["prediction_type"], PREDICTIONS)(network)


class FlowMatching(Family):
    """Rectified-flow networks."""

    @property
    def _unit(self) -> float:
        return float(self.config["num_train_timesteps"])

    def level(self, timestep: float, sigma: float) -> Level:
        return Level(sigma, 1.0 - sigma, sigma)

    def sigma(self, level: Level) -> float:
        return level.sigma

    def timestep(self, level: Level) -> float:
        return self._unit * level.t

    def predict(self, network: Network) -> Denoiser:
        return FlowVelocity(network, time=self.timestep)


class EDMFamily(Family):
    """EDM networks, raw: the scheduler preconditions."""

    def level(self, timestep: float, sigma: float) -> Level:
        return Level(sigma, 1.0, sigma)

    def sigma(self, level: Level) -> float:
        return level.ratio

    def timestep(self, level: Level) -> float:
        return math.log(level.told * level.ratio) / 4.0

    def predict(self, network: Network) -> Denoiser:
        sign = named("prediction_type", self.config["prediction_type"], {"epsilon": 1.0, "v_prediction": -1.0})
        raw = network if sign == 1.0 else lambda x, t: -network(x, t)
        return EDMDenoiser(Preconditioned(raw, self.config["sigma_data"]))


def family_of(scheduler: Any) -> Family:
    """The family of a diffusers scheduler, stock or ours.

    Raises:
        ValueError: if the scheduler belongs to none of the three.
    """
    # A configuration also carries settings of other classes; only those of this one mean anything.
    own = inspect.signature(type(scheduler).__init__).parameters
    config = {name: value for name, value in scheduler.config.items() if name in own}
    if "sigma_data" in config:
        return EDMFamily(config, EDM(config["sigma_min"], config["sigma_max"]))
    if config.get("use_flow_sigmas") or type(scheduler).__name__.startswith("FlowMatch"):
        # The grid of diffusers never reaches σ = 1, where α = 0.
        unit = config["num_train_timesteps"]
        return FlowMatching(config, Flow(1.0 / unit, 1.0 - 1.0 / unit))
    if hasattr(scheduler, "alphas_cumprod"):
        schedule = Discrete(tuple(scheduler.alphas_cumprod.double().tolist()))
        # Cosine schedules end so close to α = 0 that their schedulers leave the end out.
        if config.get("lambda_min_clipped", -math.inf) > schedule.level(schedule.t_max).lam:
            schedule = replace(schedule, t_max=schedule.time(config["lambda_min_clipped"]))
        return VariancePreserving(config, schedule)
    raise ValueError(
        f"scheduler = {type(scheduler).__name__}: allowed are schedulers with alphas_cumprod (variance preserving), "
        "with use_flow_sigmas or of FlowMatch type, and EDM schedulers"
    )


def dpm_solver(config: Mapping[str, Any]) -> Solver:
    """DPM-Solver++ as a configuration describes it.

    Raises:
        ValueError: if the configuration asks for a variant that is stochastic or not DPM-Solver++ in midpoint form.
    """
    require(config, "algorithm_type", "dpmsolver++")
    require(config, "solver_type", "midpoint")
    require(config, "euler_at_final", False)
    return DPMSolverMultistep(config["solver_order"], lower_order_final=config["lower_order_final"])


def unipc_solver(config: Mapping[str, Any]) -> Solver:
    """UniPC as a configuration describes it.

    Raises:
        ValueError: if the configuration works on ε, swaps the predictor, disables the corrector here and there, or
            makes diffusers' bh1 step to σ = 0, where it is NaN.
    """
    require(config, "predict_x0", True)
    require(config, "solver_p", None)
    require(config, "disable_corrector", [])
    if config["solver_type"] == "bh1":
        require(config, "final_sigmas_type", "sigma_min")
    scale = named("solver_type", config["solver_type"], {"bh1": UniPCBh1, "bh2": UniPCBh2})
    return scale(config["solver_order"], lower_order_final=config["lower_order_final"])


def heun_solver(config: Mapping[str, Any]) -> Solver:
    """Heun's method, which has no settings."""
    return Heun()


def require(config: Mapping[str, Any], key: str, value: Any) -> None:
    """Refuse a setting under which a correction of the step would not mean what it was calibrated to mean."""
    if config[key] != value:
        raise ValueError(f"{key} = {config[key]!r}: a corrected scheduler allows only {value!r}")
