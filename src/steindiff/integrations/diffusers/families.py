r"""How diffusers schedulers write a noise level: families, told apart by what a scheduler holds.

A scheduler keeps `sigmas` and `timesteps`. What an entry of `sigmas` means, and what the network is conditioned on,
depends on the family:

    variance preserving   sigma = σ/α, α² + σ² = 1     timestep: the (possibly fractional) training time
    flow matching         sigma = σ = 1 − α            timestep: 1000 σ
    inverted flow         sigma = σ = 1 − α            timestep: 1000 α
    EDM                   sigma = σ, α = 1             timestep: ln(σ)/4
    Stable Audio          sigma = σ, α = 1             timestep: (2/π) arctan σ

The time a network is told is a level's `t`, not one recomputed from σ: schedulers round their timesteps.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from steindiff._discovery import named
from steindiff.denoisers import X0, Denoiser, EDMDenoiser, Epsilon, FlowVelocity, Preconditioned, Prediction, Velocity
from steindiff.denoisers.base import Network
from steindiff.denoisers.wrappers import DynamicThreshold, StaticThreshold
from steindiff.levels import Level, Levels
from steindiff.schedules import EDM, Discrete, Flow, Schedule
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh1, UniPCBh2

PREDICTIONS: dict[str, type[Prediction]] = {"epsilon": Epsilon, "sample": X0, "v_prediction": Velocity}


@dataclass(frozen=True)
class Family(ABC):
    """What a family of schedulers means by its numbers; the schedule's time is the level's `t`."""

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
        """The denoiser of `network`, which takes a pipeline's states and timesteps; thresholded if configured so."""
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
        return Level(timestep / self._unit, 1.0 - sigma, sigma)

    def sigma(self, level: Level) -> float:
        return level.sigma

    def timestep(self, level: Level) -> float:
        return self._unit * level.t

    def predict(self, network: Network) -> Denoiser:
        return FlowVelocity(network, time=self.timestep)


class InvertedFlow(FlowMatching):
    """Rectified-flow networks that count from noise to data and predict x* − ε (Mochi)."""

    def level(self, timestep: float, sigma: float) -> Level:
        return Level(1.0 - timestep / self._unit, 1.0 - sigma, sigma)

    def timestep(self, level: Level) -> float:
        return self._unit * (1.0 - level.t)

    def predict(self, network: Network) -> Denoiser:
        return FlowVelocity(lambda x, t: -network(x, t), time=self.timestep)


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

        def raw(x: Tensor, c_noise: Tensor) -> Tensor:
            out = network(x, self._told(c_noise))
            return out if sign == 1.0 else -out

        return EDMDenoiser(Preconditioned(raw, self.config["sigma_data"]))

    def _told(self, c_noise: Tensor) -> Tensor:
        """What the network is told where EDM's preconditioning has ln(σ)/4."""
        return c_noise


class ArctanFamily(EDMFamily):
    """Stable Audio's networks: EDM's preconditioning, told (2/π) arctan σ."""

    def timestep(self, level: Level) -> float:
        return 2.0 / math.pi * math.atan(level.told * level.ratio)

    def _told(self, c_noise: Tensor) -> Tensor:
        return 2.0 / math.pi * torch.atan(torch.exp(4.0 * c_noise))


ALPHA_BAR_MIN = 2.0**-24
"""What diffusers puts in the place of ᾱ = 0 (zero terminal SNR), where σ/α would be infinite."""


def alpha_bars(scheduler: Any) -> Tensor:
    """A scheduler's ᾱ_t, float64 on the CPU, the last one positive and below the one before."""
    bars: Tensor = scheduler.alphas_cumprod.double().cpu().clone()
    if bars[-1] <= 0.0 or bars[-1] == ALPHA_BAR_MIN:
        bars[-1] = min(ALPHA_BAR_MIN, 0.5 * float(bars[-2]))
    return bars


def family_of(scheduler: Any) -> Family:
    """The family of a diffusers scheduler, stock or ours."""
    own, name = inspect.signature(type(scheduler).__init__).parameters, type(scheduler).__name__
    # Schedulers carry along the settings of other classes they were made from.
    config = {key: value for key, value in scheduler.config.items() if key in own}
    if hasattr(scheduler, "precondition_noise") and "sigma_data" in config:
        # What EDM networks are told is 0 at σ = 1, what Stable Audio's are told is 1/2.
        told = float(scheduler.precondition_noise(torch.tensor(1.0)))
        kinds: dict[float, type[EDMFamily]] = {0.0: EDMFamily, 0.5: ArctanFamily}
        if round(told, 6) in kinds:
            return kinds[round(told, 6)](config, EDM(config["sigma_min"], config["sigma_max"]))
    if config.get("use_flow_sigmas") or name.startswith("FlowMatch"):
        # The grid of diffusers never reaches σ = 1, where α = 0.
        unit = config["num_train_timesteps"]
        kind = InvertedFlow if scheduler.config.get("invert_sigmas") else FlowMatching
        return kind(config, Flow(1.0 / unit, 1.0 - 1.0 / unit))
    if hasattr(scheduler, "alphas_cumprod") and config.get("timestep_type", "discrete") == "discrete":
        schedule = Discrete(tuple(alpha_bars(scheduler).tolist()))
        # Cosine schedules end so close to α = 0 that their schedulers leave the end out.
        if config.get("lambda_min_clipped", -math.inf) > schedule.level(schedule.t_max).lam:
            schedule = replace(schedule, t_max=schedule.time(config["lambda_min_clipped"]))
        return VariancePreserving(config, schedule)
    raise ValueError(
        f"scheduler = {name}: its time and noise levels are not known here; need a scheduler with alphas_cumprod and "
        "discrete timesteps, one of FlowMatch type or with use_flow_sigmas, or an EDM scheduler"
    )


def same_process(old: Any, new: Any) -> bool:
    r"""Whether two schedulers describe one forward process and one kind of prediction.

    Variance preserving: the same ᾱ_t at every t, to 1e-6 and to 1 % of themselves. Flow matching: the same direction
    and unit of time (a shift moves the grid only). EDM: the same σ_data and time.
    """
    a, b = family_of(old), family_of(new)
    if type(a) is not type(b):
        return False
    if isinstance(a, FlowMatching):
        return bool(a._unit == b.config["num_train_timesteps"])
    if a.config["prediction_type"] != b.config["prediction_type"]:
        return False
    if isinstance(a, EDMFamily):
        return bool(a.config["sigma_data"] == b.config["sigma_data"])
    bars, others = alpha_bars(old), alpha_bars(new)
    return len(bars) == len(others) and torch.allclose(bars, others, rtol=1e-2, atol=1e-6)


def converted(scheduler: Any, host: type[Any], **settings: Any) -> Any:
    """A scheduler of class `host` on the forward process of `scheduler`.

    `from_config` drops what was a default in the source, whatever the default of the new class; here the whole
    configuration is handed on. A process the new class has no setting for (CogVideoX's shifted SNR) is handed on as its
    betas.
    """
    # With its class's name the settings only that class knows are carried along without a warning.
    config = {**scheduler.config, "_class_name": type(scheduler).__name__}
    config.pop("_use_default_values", None)
    tried: list[dict[str, Any]] = [{}]
    if hasattr(scheduler, "alphas_cumprod"):
        bars = alpha_bars(scheduler)
        betas = (1.0 - bars / torch.cat([bars.new_ones(1), bars[:-1]])).tolist()
        tried.append({"trained_betas": betas, "rescale_betas_zero_snr": False})
    for process in tried:
        bare = host.from_config({**config, **process}, **{**settings, "stein_calibration": None})
        if same_process(scheduler, bare):
            return host.from_config({**config, **process}, **settings) if settings.get("stein_calibration") else bare
    raise ValueError(
        f"scheduler = {type(scheduler).__name__}: {host.__name__} cannot have its forward process; give the pipeline "
        "another scheduler of the model's repository first"
    )


def settings_of(solver: Solver) -> dict[str, Any] | None:
    """The settings with which a scheduler runs a solver; any other would mean another step. None: no scheduler does."""
    if isinstance(solver, DPMSolverMultistep):
        fixed = {"algorithm_type": "dpmsolver++", "solver_type": "midpoint", "euler_at_final": False}
        return {**fixed, "solver_order": solver.nominal_order, "lower_order_final": solver.lower_order_final}
    if isinstance(solver, UniPCBh1 | UniPCBh2) and solver.corrector:
        kind = "bh1" if isinstance(solver, UniPCBh1) else "bh2"
        fixed = {"predict_x0": True, "solver_p": None, "disable_corrector": [], "solver_type": kind}
        return {**fixed, "solver_order": solver.predictor_order, "lower_order_final": solver.lower_order_final}
    return {} if isinstance(solver, Heun) else None


def required(config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse settings under which a correction of the step would not mean what it was calibrated to mean."""
    for key, value in settings.items():
        if config[key] != value:
            raise ValueError(f"{key} = {config[key]!r}: a corrected scheduler allows only {value!r}")


def dpm_solver(config: Mapping[str, Any]) -> Solver:
    """DPM-Solver++ as a configuration describes it."""
    solver = DPMSolverMultistep(config["solver_order"], lower_order_final=config["lower_order_final"])
    required(config, settings_of(solver) or {})
    return solver


def unipc_solver(config: Mapping[str, Any]) -> Solver:
    """UniPC as a configuration describes it."""
    kind = named("solver_type", config["solver_type"], {"bh1": UniPCBh1, "bh2": UniPCBh2})
    solver = kind(config["solver_order"], lower_order_final=config["lower_order_final"])
    required(config, (settings_of(solver) or {}) | ({"final_sigmas_type": "sigma_min"} if kind is UniPCBh1 else {}))
    return solver
