r"""Calibrating a pipeline, and sampling with it afterwards.

    calibration = calibrate(pipe, prompts, nfe=8)
    with stabilize(pipe, calibration):
        images = pipe(prompts, num_inference_steps=8).images

A calibration is for one network, solver, number of steps, resolution and guidance. What can be compared is compared:
the network when the calibration is installed, the steps when a run is set up, the resolution at every step, and the
guidance at every step of a run, where the network's outputs are combined as the calibration knows it and must
give what the pipeline hands to the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from steindiff.calibrating import Recipe
from steindiff.calibrating import calibrate as calibrate_solver
from steindiff.calibration import Calibration
from steindiff.integrations.diffusers.capture import answer, capture, deviation, network_of, parts_of
from steindiff.integrations.diffusers.families import ArctanFamily, EDMFamily, FlowMatching, converted, family_of
from steindiff.integrations.diffusers.networks import Guidance
from steindiff.integrations.diffusers.schedulers import (
    Corrected,
    SteinDPMSolverMultistepScheduler,
    SteinEDMDPMSolverMultistepScheduler,
    SteinHeunDiscreteScheduler,
    SteinUniPCMultistepScheduler,
)
from steindiff.integrations.identity import check_identity, identify
from steindiff.model import Model
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh1, UniPCBh2


def host_of(solver: Solver, *, edm: bool) -> tuple[type[Any], dict[str, Any]]:
    """The scheduler class that runs `solver`, and the settings that make it do so.

    Raises:
        ValueError: if none does.
    """
    if isinstance(solver, DPMSolverMultistep):
        settings = {
            "algorithm_type": "dpmsolver++",
            "solver_type": "midpoint",
            "euler_at_final": False,
            "solver_order": solver.nominal_order,
            "lower_order_final": solver.lower_order_final,
        }
        return SteinEDMDPMSolverMultistepScheduler if edm else SteinDPMSolverMultistepScheduler, settings
    if isinstance(solver, UniPCBh1 | UniPCBh2) and solver.corrector and not edm:
        settings = {
            "predict_x0": True,
            "disable_corrector": [],
            "solver_type": "bh1" if isinstance(solver, UniPCBh1) else "bh2",
            "solver_order": solver.predictor_order,
            "lower_order_final": solver.lower_order_final,
        }
        return SteinUniPCMultistepScheduler, settings
    if isinstance(solver, Heun) and not edm:
        return SteinHeunDiscreteScheduler, {}
    allowed = "DPMSolverMultistep" if edm else "DPMSolverMultistep, UniPCBh1 and UniPCBh2 with corrector, Heun"
    raise ValueError(f"solver = {solver!r}: with this scheduler's family allowed are {allowed}")


def scheduler_for(scheduler: Any, solver: Solver, calibration: Calibration | None = None) -> Any:
    """The corrected scheduler that runs `solver` on the process of `scheduler`.

    Args:
        scheduler: any scheduler of a known family.
        solver: what to run.
        calibration: put into it; None: plain, to σ = 0.

    Raises:
        ValueError: if diffusers has no scheduler for the two, or the calibration does not fit them.
    """
    family = family_of(scheduler)
    if isinstance(family, ArctanFamily):
        raise ValueError(
            f"scheduler = {type(scheduler).__name__}: no corrected scheduler tells networks (2/π) arctan σ; "
            "use stein.denoiser and the library's own sampler"
        )
    to_zero = calibration is None or calibration.levels[-1].sigma == 0.0
    host, settings = host_of(solver, edm=isinstance(family, EDMFamily))
    if isinstance(solver, Heun):
        if isinstance(family, FlowMatching) or not to_zero:
            raise ValueError("solver = Heun(): diffusers' Heun knows no flow matching and ends at sigma = 0")
    else:
        settings["final_sigmas_type"] = "zero" if to_zero else "sigma_min"
    if isinstance(family, FlowMatching):
        settings |= {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": float(scheduler.config.get("flow_shift", scheduler.config.get("shift", 1.0))),
        }
    settings |= {"stein_calibration": calibration, "stein_analytical": False}
    return converted(scheduler, host, **settings)


def default_solver(scheduler: Any) -> Solver:
    """The solver a pipeline already uses if there is a corrected scheduler for it, else DPM-Solver++(2M)."""
    hosts: tuple[type[Any], ...] = (
        SteinDPMSolverMultistepScheduler,
        SteinEDMDPMSolverMultistepScheduler,
        SteinUniPCMultistepScheduler,
        SteinHeunDiscreteScheduler,
    )
    for host in hosts:
        if isinstance(scheduler, host.stock):
            try:
                found: Solver = host.solver(scheduler.config)
            except ValueError:  # a stochastic variant, or another one that cannot be corrected
                break
            return found
    return DPMSolverMultistep(2)


def calibrate(
    pipe: Any,
    prompts: Sequence[str] | None = None,
    *,
    nfe: int,
    solver: Solver | None = None,
    recipe: Recipe = Recipe(),  # noqa: B008
    seeds: Sequence[int] = range(32),
    batch: int = 4,
    callback: Callable[..., bool | None] | None = None,
    **call: Any,
) -> Calibration:
    r"""Calibrate a pipeline for `nfe` network evaluations.

    One step of the pipeline is recorded and its denoiser rebuilt from it, guidance included; then the library's own
    `calibrate` runs on that denoiser. The pipeline itself is left as it was.

    Runs are aligned with the model's own many-step samples, which is right under guidance too: a guided D is no
    conditional mean, and Stein's identity does not hold for it. The Stein grid needs derivatives of the network; give
    the recipe a `grid` where there are none.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`.
        prompts: of the calibration samples, dealt out by seed; None for pipelines without prompts, or if `call` has
            embeddings or labels.
        nfe: evaluations of a run (for Heun two a step, the last one once).
        solver: default: the pipeline's own if there is a corrected scheduler for it, else DPM-Solver++(2M).
        recipe: how to calibrate.
        seeds: of the calibration samples.
        batch: at most so many samples in one network call.
        callback: as in `steindiff.loop`.
        call: arguments of the pipeline's call: `guidance_scale`, `height`, `prompt_embeds`, `class_labels`, …

    Raises:
        ValueError: if the pipeline's step cannot be rebuilt, or an argument is out of range.
    """
    if prompts is not None:
        call["prompt"] = list(prompts)
    solver = solver or default_solver(pipe.scheduler)
    captured = capture(pipe, scheduler_for(pipe.scheduler, solver), batch=batch, **call)
    model = Model(captured.denoiser, captured.family.schedule, captured.shape, device=captured.device)
    flow = isinstance(captured.family, FlowMatching)  # pipelines of flow models begin at pure noise
    search = recipe.search and replace(recipe.search, start=recipe.search.start and not flow)
    recipe = replace(recipe, seeds=seeds, to_zero=True, search=search)  # the host's runs end at σ = 0
    made = calibrate_solver(model, nfe, solver, recipe=recipe, batch=batch, callback=callback)
    facts = {
        "pipeline": type(pipe).__name__,
        "network": identify(network_of(pipe)),
        "guidance": captured.network.guidance.describe(),
    }
    return replace(made, conditions=facts)


def observed(known: Guidance, parts: Sequence[Tensor], model_output: Tensor) -> str:
    """What a run seems to do instead, in words: the weight that comes closest."""
    if known.copies == 1:
        return "combines the network's outputs"
    c, u = parts[known.conditional], parts[1 - known.conditional]
    weight = float(((model_output[: len(c)].float() - u) * (c - u)).sum() / (c - u).square().sum())
    return f"is closest to weight = {weight:.3g}"


class GuidanceGuard:
    """Looks at every step of a run: are the network's outputs combined as the calibration knows it?

    Args:
        module: the network.
        guidance: what the calibration was measured with.
    """

    def __init__(self, module: nn.Module, guidance: Guidance) -> None:
        self.guidance = guidance
        self._outputs: list[Tensor] | None = None
        self._embedded: float | None = None
        self._hook = module.register_forward_hook(self._called, with_kwargs=True)

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._outputs is not None:
            self._outputs.append(answer(output))
            embedded = kwargs.get("guidance")
            self._embedded = None if embedded is None else float(embedded.flatten()[0])

    def arm(self) -> None:
        """A run begins: keep what the network answers until the next step."""
        self._outputs = []

    def check(self, model_output: Tensor) -> None:
        """Compare, and let go of the outputs.

        Raises:
            ValueError: if the network did not run, or the guidance is another one.
        """
        if self._outputs is None:
            return
        outputs, self._outputs = self._outputs, []
        if not outputs:
            raise ValueError("network: not the one the calibration was installed for; call stabilize again")
        known = self.guidance
        if self._embedded != known.embedded:
            raise ValueError(f"guidance: measured with {known.embedded} as an input, this run has {self._embedded}")
        total = sum(map(len, outputs))
        copies = total // len(model_output)
        samples = total // known.copies
        if copies not in (1, known.copies) or (copies == 1 < known.copies and len(model_output) % 2):
            raise ValueError(f"guidance: measured with {known.copies} conditions a sample, this run has {copies}")
        parts = parts_of(outputs, samples, model_output.shape[1:])
        if deviation(known, parts, model_output[:samples]) >= 1.0:
            raise ValueError(f"guidance: measured with {known}, this run {observed(known, parts, model_output)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> GuidanceGuard:
        return self

    def remove(self) -> None:
        """Stop watching."""
        self._hook.remove()


class Stabilized:
    """An installed calibration. `undo`, or leaving the `with` block, gives the pipeline its scheduler back."""

    def __init__(self, pipe: Any, scheduler: Corrected, guard: GuidanceGuard) -> None:
        self.pipe = pipe
        self.scheduler = scheduler
        self._guard = guard
        self._before = pipe.scheduler
        scheduler._stein_guard = guard
        pipe.scheduler = scheduler

    def undo(self) -> None:
        """Restore the pipeline's own scheduler, unless somebody has set another one since."""
        self._guard.remove()
        self.scheduler._stein_guard = None
        if self.pipe.scheduler is self.scheduler:
            self.pipe.scheduler = self._before

    def __enter__(self) -> Stabilized:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def stabilize(pipe: Any, calibration: Calibration | None = None) -> Stabilized:
    """Install a calibration in a pipeline, in place.

    Args:
        pipe: the pipeline it was measured on, or another one with the same network.
        calibration: made by `calibrate`; None: the one the pipeline's scheduler was saved with.

    Returns:
        A handle whose `undo` restores the pipeline; also a context manager.

    Raises:
        ValueError: if there is no calibration, if it was measured on another network, or for a solver or process
            diffusers cannot run; later, when the pipeline runs, if steps, resolution or guidance are not those of the
            calibration.
    """
    if calibration is None:
        carried = pipe.scheduler.config.get("stein_calibration")
        if carried is None:
            raise ValueError(
                "calibration = None: the pipeline's scheduler carries none either; make one with calibrate"
            )
        calibration = Calibration.from_dict(carried)
    missing = [name for name in ("network", "guidance") if not isinstance(calibration.conditions.get(name), dict)]
    if missing:
        raise ValueError(
            f"calibration: does not record its {' and '.join(missing)}, so it cannot be checked against a pipeline; "
            "make it with steindiff.integrations.diffusers.calibrate, or put it into a scheduler as stein_calibration"
        )
    module = network_of(pipe)
    check_identity(calibration.conditions["network"], module)
    scheduler = scheduler_for(pipe.scheduler, calibration.solver, calibration)
    return Stabilized(pipe, scheduler, GuidanceGuard(module, Guidance(**calibration.conditions["guidance"])))


__all__ = ["Stabilized", "calibrate", "scheduler_for", "stabilize"]
