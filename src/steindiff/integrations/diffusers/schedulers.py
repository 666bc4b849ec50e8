r"""Stock diffusers schedulers whose steps are corrected.

A scheduler never sees the network: it is handed the network's answer and returns the next state. Replay of a
calibration and the analytical relaxation need no more than that: the state x, the solver's candidate T and, for replay,
the latest denoised images, which are kept as they pass. So a corrected scheduler *is* the stock one, its arithmetic
untouched, with one thing added where a step is complete: T becomes what the correction makes of it. Without a
correction the added line returns T itself, and everything is bitwise the stock scheduler.

Where a step is complete differs from host to host:

* DPM-Solver++ and its EDM twin: `step` takes x and returns T.
* Heun: two calls of `step` are one step; only the second returns T. The state kept is x/α, so both tensors are
  brought to x before, and back after.
* UniPC: `step` evaluates first and corrects afterwards, starting again from the state it remembers. A change made to
  what `step` returned would be overwritten by that; T is the outcome of the corrector, one call later. On the last
  step no later call comes, and T is the outcome of the predictor.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.configuration_utils import register_to_config
from diffusers.utils import logging
from torch import Tensor

from steindiff._checks import Within, integer
from steindiff.calibration import Calibration, CalibrationSet
from steindiff.corrections.relaxation import Relaxation
from steindiff.corrections.replay import Replay
from steindiff.denoisers.base import Denoiser
from steindiff.integrations.diffusers.families import dpm_solver, family_of, unipc_solver
from steindiff.integrations.diffusers.networks import layout_of
from steindiff.levels import Level, Levels
from steindiff.probes.hutchinson import Analytic
from steindiff.solvers import Heun, Solver
from steindiff.tableau import Proposal, Row, Step, Tableau

if TYPE_CHECKING:
    from steindiff.integrations.diffusers.pipelines import GuidanceGuard

logger = logging.get_logger(__name__)

UNIT_NOISE = 0.99
"""Hosts whose first state is unit noise whatever the schedule may begin where σ is at least this."""

MOST_TIMES = 10**6
"""Training times of a scheduler, and any other whole number: it makes tables and lists of that length."""

PUBLIC = "steindiff.integrations.diffusers"
"""Where the classes say they live: pipelines record it and look for `SchedulerMixin` there when they are loaded."""


@dataclass(frozen=True)
class PrecomputedStep(Step):
    """A step somebody else took: the candidate is known, and so is the weight of x in it."""

    candidate: Tensor = field(kw_only=True)

    def __call__(self, x: Tensor) -> Proposal:
        return Proposal(self.candidate, ())


ANALYTICAL = Relaxation(probe=Analytic(), per_sample=True, normalised=True)
"""The paper's analytical mode, every sample with its own γ, so that an image does not depend on its batch.

On x/α, since the terms in 1/α of the paper's own coordinates are noise where α is small (docs/reproduction.md)."""


class Corrected:
    """What a corrected scheduler adds to a stock one. Children say where a step is complete; see the module's text."""

    stock: ClassVar[type[Any]]
    solver: ClassVar[Callable[[Mapping[str, Any]], Solver]]
    _stein_rule: Replay | Relaxation | None = None
    _stein_levels: Levels | None = None
    _stein_set: CalibrationSet | None = None
    _stein_calibration: Calibration | None = None
    _stein_guard: GuidanceGuard | None = None
    _stein_denoised: tuple[Tensor, ...] = ()
    _stein_start: int = 0
    _stein_said: frozenset[str] = frozenset()
    _stein_stock_noise: Any = None
    _stein_takes: ClassVar[frozenset[str]] = frozenset()

    # What the stock class provides.
    config: Any
    order: int
    sigmas: Tensor
    timesteps: Tensor
    step_index: int

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As in diffusers; the configuration of a flow-matching scheduler gives one for flow matching."""
        if isinstance(config, Mapping) and "shift" in config and "beta_schedule" not in config:
            if "use_flow_sigmas" not in inspect.signature(cls.stock.__init__).parameters:
                raise ValueError(f"config must not be a FlowMatch one: {cls.stock.__name__} knows no flow matching")
            kwargs = {**flow_settings(config), **kwargs}
        return super().from_config(config, return_unused_kwargs, **kwargs)  # type: ignore[misc]

    def __repr__(self) -> str:
        """Class and settings; long ones are named, not listed."""

        def short(name: str, value: Any) -> Any:
            if name == "stein_calibration" and self._stein_set is not None:
                budgets = ", ".join(str(c.levels.steps) for c in self._stein_set.calibrations)
                return f"for {budgets} steps of {self._stein_set.solver!r}"
            return f"{len(value)} entries" if isinstance(value, list | tuple | Mapping) and len(value) > 8 else value

        shown = {name: short(name, value) for name, value in self.config.items() if not name.startswith("_")}
        return f"{type(self).__name__} {json.dumps(shown, indent=2, default=str)}"

    def _stein_setup(self, calibration: Any, analytical: bool) -> None:
        """Take the settings; the configuration keeps the calibration in a form that can be written as JSON."""
        if calibration is not None and analytical:
            raise ValueError("stein_analytical = True: not together with stein_calibration, choose one")
        if calibration is None and not analytical:
            return
        solver = type(self).solver(self.config)
        if calibration is None:
            self._stein_rule = ANALYTICAL
            return
        content = calibration.to_dict() if isinstance(calibration, Calibration | CalibrationSet) else calibration
        self.register_to_config(stein_calibration=content)  # type: ignore[attr-defined]
        self._stein_set = CalibrationSet.from_dict(content)  # what runs is what will be saved, its rounding included
        for one in self._stein_set.calibrations:
            check_fit(self, one, solver)
        if len(self._stein_set.calibrations) == 1:
            self._stein_use(self._stein_set.calibrations[0])

    def _stein_use(self, calibration: Calibration) -> None:
        """Run with this calibration from now on."""
        if self._stein_calibration is not calibration:
            self._stein_calibration, self._stein_rule = calibration, calibration.replay()

    def _stein_say(self, line: str) -> None:
        """Write a line to the log, once for a scheduler."""
        if line not in self._stein_said:
            self._stein_said |= {line}
            logger.warning(line)

    @property
    def init_noise_sigma(self) -> Any:
        """What pipelines multiply unit noise with: the stock value, or what a calibration that begins late needs."""
        if self._stein_calibration is not None and begins_late(self, self._stein_calibration):
            first = self._stein_calibration.levels[0]
            return first.sigma / self._stein_unit(first)
        if self._stein_stock_noise is not None:
            return self._stein_stock_noise
        return super().init_noise_sigma  # type: ignore[misc]

    @init_noise_sigma.setter
    def init_noise_sigma(self, value: Any) -> None:
        self._stein_stock_noise = value

    def scale_noise(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """What pipelines of flow models call `add_noise`."""
        return self.add_noise(sample, noise, timestep)  # type: ignore[attr-defined]

    def _stein_unit(self, level: Level) -> float:
        """What the host's state must be multiplied with to give x."""
        return 1.0

    def _stein_remember(self, i: int, denoised: Tensor) -> None:
        """Keep what the network answered in step i, as a denoised image: the newest first, no more than may be used."""
        if not self._stein_denoised:
            self._stein_start = i
        if isinstance(self._stein_rule, Replay):
            self._stein_denoised = (denoised, *self._stein_denoised)[: self._stein_rule.memory]

    def _stein_correct(self, i: int, x: Tensor, candidate: Tensor) -> Tensor:
        """What the rule makes of step i; the candidate itself if there is none."""
        if self._stein_rule is None:
            return candidate
        assert self._stein_levels is not None, "set_timesteps has not run"
        s, t = self._stein_levels[i], self._stein_levels[i + 1]
        shape = x.shape[1:] if self._stein_calibration is None else self._stein_calibration.shape
        layout = layout_of(x.shape[1:], shape)
        wide = torch.promote_types(candidate.dtype, torch.float32)
        state = layout.unpack(x.to(wide)) * self._stein_unit(s)
        given = layout.unpack(candidate.to(wide)) * self._stein_unit(t)
        denoised = [layout.unpack(d.to(wide)) for d in self._stein_denoised]
        if isinstance(self._stein_rule, Replay):
            made = self._stein_rule.apply(i, state, given, self._stein_levels, denoised, self._stein_start)
        else:
            # (1 − γ) x + γ T; the weight of x in T is σ_t/σ_s in all hosts here.
            nobody = cast(Denoiser, None)  # a scheduler has no network, and this step asks none
            step = PrecomputedStep(Tableau((), Row(x=t.sigma / s.sigma)), nobody, candidate=given)
            made = self._stein_rule(step, state, self._stein_levels, i).x
        if made is given:
            return candidate
        return layout.pack(made / self._stein_unit(t)).to(candidate.dtype)

    def _stein_step(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a step; `plain` is the stock `step`."""
        return plain(*args, **kwargs)

    def _stein_set_timesteps(self, plain: Callable[..., None], given: dict[str, Any]) -> None:
        """Set the run; `plain` is the stock `set_timesteps`, `given` what the caller passed, by name."""
        self._stein_denoised = ()
        shifts = bool(self.config.get("use_dynamic_shifting")) and "mu" in self._stein_takes
        given = {name: value for name, value in given.items() if value is not None and (name != "mu" or shifts)}
        lists = [name for name in ("sigmas", "timesteps") if name in given]
        flow = bool(self.config.get("use_flow_sigmas"))
        if len(lists) == 2 and "sigmas" in self._stein_takes and self._stein_set is None:
            del given[lists.pop()]  # two names for the same steps
        unusable = "sigmas" in lists and "sigmas" not in self._stein_takes
        if lists and (self._stein_set is not None or unusable or (flow and "timesteps" in lists)):
            # Many pipelines make their own: they say how many steps there are, and no more than that is used.
            given["num_inference_steps"] = min(len(given.pop(name)) for name in lists)
            self._stein_say(
                f"{type(self).__name__} steps at its own levels; the pipeline's {' and '.join(lists)} are not used."
            )
        elif "timesteps" in lists and "timesteps" not in self._stein_takes:
            raise ValueError(f"timesteps must be left out: {type(self).__name__} places its own")
        elif "sigmas" in lists:
            given["sigmas"] = np.asarray(given["sigmas"])  # stock fails on lists
        if self._stein_set is None:
            plain(**given)
            if self.config.get("invert_sigmas"):
                self.timesteps = self.config["num_train_timesteps"] - self.timesteps
            if self._stein_rule is not None:
                self._stein_levels = family_of(self).levels(self)
            return
        self._stein_use(self._stein_chosen(given.get("num_inference_steps")))
        assert self._stein_calibration is not None, "one has been chosen"
        if self._stein_guard is not None:
            self._stein_guard.arm(self._stein_calibration)
        elif "guidance" in self._stein_calibration.conditions:
            self._stein_say(
                "The calibration's network and guidance cannot be checked by a scheduler alone; "
                "call steindiff.integrations.diffusers.stabilize(pipe) once to have them checked."
            )
        if shifts:
            given.setdefault("mu", 0.0)  # a shift of the stock levels, which are not used
        plain(**given)
        self._stein_levels = self._stein_calibration.levels
        impose(self, self._stein_levels, given.get("device"))

    def _stein_chosen(self, steps: int | None) -> Calibration:
        """The calibration of a run of that many steps."""
        assert self._stein_set is not None, "there is a calibration"
        known = sorted({calibration.levels.steps for calibration in self._stein_set.calibrations})
        if steps not in known:
            fits = f"the calibration is for {' or '.join(map(str, known))}"
            raise ValueError(f"num_inference_steps = {steps}: {fits}; calibrate again or set stein_calibration to None")
        found = [calibration for calibration in self._stein_set.calibrations if calibration.levels.steps == steps]
        scale = self._stein_guard.scale if self._stein_guard is not None and len(found) > 1 else None
        return self._stein_set.choose(steps=steps, guidance=scale)


def flow_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a scheduler of DPM-Solver or UniPC run the flow matching another one describes."""
    shift = float(config.get("flow_shift", config.get("shift", 1.0)))
    # Stock schedulers take no other type of shift; it moves their own grid only.
    known = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "time_shift_type": "exponential"}
    return {**known, "flow_shift": shift}


def impose(scheduler: Any, levels: Levels, device: Any) -> None:
    """Write `levels` into a scheduler: `order` entries for every step but the first."""
    family = family_of(scheduler)
    times = torch.tensor([family.timestep(level) for level in levels[:-1]], dtype=torch.float32, device=device)
    sigmas = torch.tensor([family.sigma(level) for level in levels], dtype=torch.float32)
    times = torch.cat([times[:1], times[1:].repeat_interleave(scheduler.order)])
    if not scheduler.timesteps.is_floating_point() and bool((times == times.round()).all()):
        times = times.to(scheduler.timesteps.dtype)
    scheduler.timesteps = times
    scheduler.sigmas = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(scheduler.order), sigmas[-1:]])


def begins_late(scheduler: Any, calibration: Calibration) -> bool:
    """Whether a calibration begins below the first level of the scheduler's schedule."""
    return calibration.levels[0].ratio < 0.99 * family_of(scheduler).schedule.finite_start().ratio_max


def apart(meant: Level, level: Level) -> float:
    """How far two levels are apart in α and, relative to σ where it is large, in σ."""
    return max(abs(meant.alpha - level.alpha), abs(meant.sigma - level.sigma) / max(1.0, level.sigma))


def check_fit(scheduler: Any, calibration: Calibration, solver: Solver) -> None:
    """Refuse a calibration of another solver or another forward process than the scheduler's."""
    if found := calibration.differences(solver=solver):
        raise ValueError(f"stein_calibration does not fit: {'; '.join(found)}")
    family, levels = family_of(scheduler), calibration.levels
    for i, level in enumerate(levels[:-1]):
        meant = family.schedule.at(level.lam)
        if apart(meant, level) < 1e-3:  # then its time must mean the same: schedulers round, networks are told others
            meant, level = family.schedule.level(level.t), family.schedule.at(level.lam - math.log(level.told))
        if apart(meant, level) > 2e-3:
            own, here = (f"alpha = {one.alpha:.4g}, sigma = {one.sigma:.4g}" for one in (level, meant))
            where, kind = f"at t = {level.t:.6g} (level {i})", type(family).__name__
            raise ValueError(f"stein_calibration: {where} it has {own}, but this {kind} scheduler has {here}")
    scales = hasattr(type(scheduler).stock, "init_noise_sigma")
    if begins_late(scheduler, calibration) and not scales and (first := levels[0].sigma) < UNIT_NOISE:
        here = f"pipelines begin with unit noise here, sigma >= {UNIT_NOISE}"
        raise ValueError(f"stein_calibration: it begins at sigma = {first:.4g}, but {here}")
    ends = "zero" if levels[-1].sigma == 0.0 else "sigma_min"
    expected = scheduler.config.get("final_sigmas_type", "zero")
    if ends != expected:
        raise ValueError(f"final_sigmas_type = {expected!r}: the calibration was measured with {ends!r}")


def with_state(output: Any, state: Tensor) -> Any:
    """A scheduler's output with its `prev_sample` replaced."""
    if isinstance(output, tuple):
        return (state, *output[1:])
    output.prev_sample = state
    return output


def state_of(output: Any) -> Tensor:
    """The `prev_sample` of a scheduler's output."""
    return output[0] if isinstance(output, tuple) else output.prev_sample


class Converting(Corrected):
    """Hosts that turn the network's answer into a denoised image themselves, once in every call of `step`."""

    def convert_model_output(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stock conversion, remembered."""
        denoised: Tensor = super().convert_model_output(*args, **kwargs)  # type: ignore[misc]
        self._stein_remember(self.step_index, denoised)
        return denoised


class CorrectedMultistep(Converting):
    """DPM-Solver++: every call of `step` is a step."""

    def _stein_step(
        self, plain: Callable[..., Any], model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = plain(model_output, timestep, sample, *args, **kwargs)
        return with_state(output, self._stein_correct(self.step_index - 1, sample, state_of(output)))


class CorrectedEDM(CorrectedMultistep):
    """DPM-Solver++ on raw EDM networks: what the network is told is what its input and output are scaled by."""

    def _stein_told(self, sigma: Tensor) -> Tensor:
        told = 1.0 if self._stein_levels is None else self._stein_levels[self.step_index].told
        return sigma if told == 1.0 else told * sigma

    def precondition_inputs(self, sample: Tensor, sigma: Tensor) -> Tensor:
        """As in stock, at the level the network is told."""
        return super().precondition_inputs(sample, self._stein_told(sigma))  # type: ignore[misc]

    def precondition_outputs(self, sample: Tensor, model_output: Tensor, sigma: Tensor) -> Tensor:
        """As in stock, at the level the network is told."""
        told = self._stein_told(sigma)
        return super().precondition_outputs(sample, model_output, told)  # type: ignore[misc]


class CorrectedHeun(Corrected):
    """Heun: a step is complete after its second call, or after the first if it goes to σ = 0."""

    state_in_first_order: bool
    sample: Tensor

    def _stein_unit(self, level: Level) -> float:
        return level.alpha

    def _stein_step(
        self, plain: Callable[..., Any], model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        predicting = self.state_in_first_order
        x = sample if predicting else self.sample
        output = plain(model_output, timestep, sample, *args, **kwargs)
        index = self.step_index - 1
        if isinstance(self._stein_rule, Replay) and self._stein_levels is not None:
            # The second call of a step answers at the next level: index 1 → level 1, index 2 → level 1, 3 → 2, …
            level = self._stein_levels[(index + 1) // 2]
            answer = family_of(self).denoiser(lambda *_: model_output)
            wide = torch.promote_types(sample.dtype, torch.float32)
            self._stein_remember(index // 2, answer(sample.to(wide) * level.alpha, level))
        if predicting and self.sigmas[index + 1] > 0:
            return output
        return with_state(output, self._stein_correct(index // 2, x, state_of(output)))


class CorrectedUniPC(Converting):
    """UniPC: a step is complete when its corrector has run, in the next call of `step`; the last has no corrector."""

    def multistep_uni_c_bh_update(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stock corrector, and then the correction of the step it completes."""
        candidate = super().multistep_uni_c_bh_update(*args, **kwargs)  # type: ignore[misc]
        return self._stein_correct(self.step_index - 1, kwargs["last_sample"], candidate)

    def multistep_uni_p_bh_update(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stock predictor, corrected where nothing follows it."""
        candidate: Tensor = super().multistep_uni_p_bh_update(*args, **kwargs)  # type: ignore[misc]
        if self.step_index < len(self.timesteps) - 1:
            return candidate
        return self._stein_correct(self.step_index, kwargs["sample"], candidate)


def corrected(stock: type[Any], host: type[Corrected], solver: Callable[[Mapping[str, Any]], Solver]) -> type[Any]:
    """Build the corrected class of a stock scheduler.

    diffusers reads signatures: `from_config` takes the names of `__init__`, pipelines those of `step` and
    `set_timesteps`. All three keep the stock signature, `__init__` with two settings more. Some pipelines pass a
    `generator` without looking; where the stock `step` would fail on it, ours takes and ignores it.
    """
    initialise = inspect.unwrap(stock.__init__)
    parameters = inspect.signature(stock.__init__).parameters.values()
    settings = (
        inspect.Parameter("stein_calibration", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
        inspect.Parameter("stein_analytical", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False),
    )
    signature = inspect.Signature([*parameters, *settings])

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        calibration, analytical = given.pop("stein_calibration", None), given.pop("stein_analytical", False)
        count = given.get("num_train_timesteps", 1000)
        Within(1, MOST_TIMES)("num_train_timesteps", integer("num_train_timesteps", count))
        for key in (key for key, value in given.items() if isinstance(value, int)):
            Within(-MOST_TIMES, MOST_TIMES)(key, given[key])
        try:
            initialise(**given)
            self._stein_setup(calibration, analytical)
        except (TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError, NameError) as error:
            raise ValueError(f"config of {name}: {error}; take it from the checkpoint's own scheduler") from error

    __init__.__signature__ = signature  # type: ignore[attr-defined]

    taken = inspect.signature(stock.step)
    draws = "generator" in taken.parameters
    ignored = inspect.Parameter("generator", inspect.Parameter.KEYWORD_ONLY, default=None)

    @functools.wraps(stock.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not draws:
            kwargs.pop("generator", None)
        # DDIMPipeline passes these whatever the scheduler.
        if kwargs.pop("eta", 0.0):
            raise ValueError("eta: only DDIM takes noise in by eta; leave it at 0")
        kwargs.pop("use_clipped_model_output", None)
        output, *rest = args if args else (kwargs.pop("model_output"),)
        if self._stein_guard is not None:
            self._stein_guard.check(output)
        if self.config.get("invert_sigmas"):
            output = -output  # the network predicts x* − ε
        return self._stein_step(functools.partial(stock.step, self), output, *rest, **kwargs)

    if not draws:
        step.__signature__ = taken.replace(parameters=[*taken.parameters.values(), ignored])  # type: ignore[attr-defined]

    settable = inspect.signature(stock.set_timesteps)
    takes = frozenset(settable.parameters)
    extras = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in ("timesteps", "sigmas", "mu")
        if name not in takes
    ]
    settable = settable.replace(parameters=[*settable.parameters.values(), *extras])

    @functools.wraps(stock.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = settable.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise ValueError(f"set_timesteps of {name}: {error}; this pipeline needs a scheduler of its own") from None
        del given["self"]
        self._stein_set_timesteps(functools.partial(stock.set_timesteps, self), given)

    set_timesteps.__signature__ = settable  # type: ignore[attr-defined]

    name = f"Stein{stock.__name__}"
    return type(
        name,
        (host, stock),
        {
            "__doc__": f"`{stock.__name__}` with corrected steps; see `steindiff.integrations.diffusers.schedulers`.",
            "__module__": PUBLIC,
            "__init__": register_to_config(__init__),
            "step": step,
            "set_timesteps": set_timesteps,
            "stock": stock,
            "solver": staticmethod(solver),
            "_stein_takes": takes,
            # diffusers looks for compatible classes among its own only.
            "_compatibles": stock._compatibles or [stock.__name__],
        },
    )


SteinDPMSolverMultistepScheduler = corrected(DPMSolverMultistepScheduler, CorrectedMultistep, dpm_solver)
SteinUniPCMultistepScheduler = corrected(UniPCMultistepScheduler, CorrectedUniPC, unipc_solver)
SteinHeunDiscreteScheduler = corrected(HeunDiscreteScheduler, CorrectedHeun, lambda config: Heun())
SteinEDMDPMSolverMultistepScheduler = corrected(EDMDPMSolverMultistepScheduler, CorrectedEDM, dpm_solver)
HOSTS: list[type[Any]] = [SteinDPMSolverMultistepScheduler, SteinUniPCMultistepScheduler]
HOSTS += [SteinHeunDiscreteScheduler, SteinEDMDPMSolverMultistepScheduler]
