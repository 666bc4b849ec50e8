r"""Calibrating a pipeline, and sampling with it afterwards.

    calibration = calibrate(pipe, prompts, nfe=8)
    with stabilize(pipe, calibration):
        images = pipe(prompts, num_inference_steps=8).images
    write(report(pipe, calibration, prompts), folder)

A calibration is for one network, solver, number of steps, resolution and guidance. What can be compared is compared:
the network when the calibration is installed, the steps when a run is set up, resolution and guidance at every step:
the network's outputs are combined as the calibration knows it and must give what the pipeline hands to the scheduler.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from diffusers import AutoencoderKL, VQModel
from diffusers.utils import logging
from torch import Tensor, nn

from steindiff._progress import bar
from steindiff._serialization import decode
from steindiff._version import __version__
from steindiff.calibrating import Progress, Recipe, with_restarts
from steindiff.calibrating import calibrate as calibrate_solver
from steindiff.calibration import Calibration, CalibrationSet, check_calibration
from steindiff.grids.rules import Explicit, LogSNR
from steindiff.integrations.diffusers import families, schedulers
from steindiff.integrations.diffusers.capture import capture, chunks, deviation, modules_of, parts_of, strengths
from steindiff.integrations.diffusers.families import ArctanFamily, EDMFamily, FlowMatching, converted, family_of
from steindiff.integrations.diffusers.networks import Guidance, answer, check_identity, identify
from steindiff.integrations.diffusers.schedulers import Corrected, flow_settings
from steindiff.loop import Cancelled, StepInfo
from steindiff.model import Model
from steindiff.reference import reference_run
from steindiff.report import Entry, Report, of_images
from steindiff.sampler import levels_for
from steindiff.search import Search
from steindiff.solvers import DPMSolverMultistep, Heun, Solver, UniPCBh1, UniPCBh2

logger = logging.get_logger(__name__)

HOST_RECIPE = Recipe(seeds=range(10**6, 10**6 + 32), search=Search(iterations=2))
"""What `calibrate` does unless it is told: fewer seeds and a shorter search than `Recipe()`, for large networks."""

SAID = 2**30
"""A fine trajectory of more bytes is announced."""


def host_of(solver: Solver, *, edm: bool) -> tuple[type[Any], dict[str, Any]]:
    """The scheduler class that runs `solver`, and the settings that make it do so."""
    settings = families.settings_of(solver) or {}
    if isinstance(solver, DPMSolverMultistep):
        edm_host, host = schedulers.SteinEDMDPMSolverMultistepScheduler, schedulers.SteinDPMSolverMultistepScheduler
        return edm_host if edm else host, settings
    if isinstance(solver, UniPCBh1 | UniPCBh2) and solver.corrector and not edm:
        return schedulers.SteinUniPCMultistepScheduler, settings
    if isinstance(solver, Heun) and not edm:
        return schedulers.SteinHeunDiscreteScheduler, settings
    allowed = "DPMSolverMultistep" if edm else "DPMSolverMultistep, UniPCBh1 and UniPCBh2 with corrector, Heun"
    raise ValueError(f"solver must be one of {allowed} with this scheduler's family, got {solver!r}")


def scheduler_for(scheduler: Any, solver: Solver, calibration: Calibration | CalibrationSet | None = None) -> Any:
    """The corrected scheduler that runs `solver` on the process of `scheduler`.

    Args:
        scheduler: any scheduler of a known family.
        solver: what to run.
        calibration: put into it; None: plain, to σ = 0.
    """
    family = family_of(scheduler)
    if isinstance(family, ArctanFamily):
        told = "no corrected scheduler tells networks (2/π) arctan σ; use denoiser(…) and the library's own sampler"
        raise ValueError(f"scheduler = {type(scheduler).__name__}: {told}")
    used = () if calibration is None else all_of(calibration)
    to_zero = all(one.levels[-1].sigma == 0.0 for one in used)
    host, settings = host_of(solver, edm=isinstance(family, EDMFamily))
    if isinstance(solver, Heun):
        if isinstance(family, FlowMatching) or not to_zero:
            raise ValueError("solver = Heun(): diffusers' Heun knows no flow matching and ends at sigma = 0")
    else:
        settings["final_sigmas_type"] = "zero" if to_zero else "sigma_min"
    if isinstance(family, FlowMatching):
        settings |= flow_settings(scheduler.config)
    settings |= {"stein_calibration": calibration, "stein_analytical": False}
    return converted(scheduler, host, **settings)


def default_solver(scheduler: Any) -> Solver:
    """The solver a pipeline already uses if there is a corrected scheduler for it, else DPM-Solver++(2M)."""
    for host in schedulers.HOSTS:
        if isinstance(scheduler, host.stock):
            try:
                return host.solver(scheduler.config)
            except ValueError:  # a stochastic variant, or another one that cannot be corrected
                break
    return DPMSolverMultistep(2)


def all_of(calibration: Calibration | CalibrationSet) -> tuple[Calibration, ...]:
    """One calibration, or those of a set."""
    check_calibration(calibration)
    return calibration.calibrations if isinstance(calibration, CalibrationSet) else (calibration,)


class Enough(Exception):
    """A pipeline has said all it was asked for."""


def own_grid(pipe: Any, steps: int, call: Mapping[str, Any]) -> tuple[Explicit, ...]:
    """Where the pipeline itself would step, with its own scheduler, sigmas and shift: a rival to beat.

    It is run up to its first step, on one prompt. Empty where its levels are not known.
    """

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Enough

    before, scheduler = pipe.scheduler, copy.deepcopy(pipe.scheduler)
    scheduler.step, pipe.scheduler = stop, scheduler
    try:
        pipe(**{**chunks(call, 1)[0], "num_inference_steps": steps, "output_type": "latent"})
    except Enough:
        pass
    except Exception:  # it cannot run with this few steps: nothing to beat
        return ()
    finally:
        pipe.scheduler = before
    family = family_of(scheduler)
    schedule = family.schedule
    try:
        times = sorted(set(scheduler.timesteps.tolist()), reverse=True)
        levels = family.levels(scheduler)[:-1] if hasattr(scheduler, "sigmas") else tuple(map(schedule.level, times))
        # Flow pipelines begin at pure noise, where α = 0: the schedule begins a thousandth later.
        grid = Explicit(tuple(min(schedule.time(max(level.lam, -700.0)), schedule.t_max) for level in levels))
        grid(schedule, steps)
    except ValueError:  # of another number, or not strictly falling
        return ()
    return (grid,)


Told = Callable[[Progress], bool | None]
"""Who is told the progress; False stops."""


@contextmanager
def shown(progress: bool | Told, total: float) -> Iterator[Callable[[float], Told]]:
    """A bar with the time left, or whoever was given; yields a function from the work of a stage to its listener."""
    with bar("calibrating", total, shown=progress is True) as advance:
        begun = done = 0.0

        def stage(work: float) -> Told:
            nonlocal begun
            begun, base = begun + work, begun

            def told(now: Progress) -> bool | None:
                nonlocal done
                reached = max(base + work * now.done / max(now.total, 1), done)
                advance(reached - done)
                done = reached
                return None if isinstance(progress, bool) else progress(now)

            return told

        yield stage
        advance(total - done)


def calibrate(
    pipe: Any,
    prompts: Sequence[str] | None = None,
    *,
    nfe: int | Sequence[int],
    solver: Solver | None = None,
    recipe: Recipe = HOST_RECIPE,
    batch: int = 4,
    progress: bool | Told = True,
    **call: Any,
) -> Any:
    r"""Calibrate a pipeline for `nfe` network evaluations, with forward passes only.

    A few steps of the pipeline are recorded and its denoiser rebuilt from them, guidance included; then the library's
    own `calibrate` runs on that denoiser, in batches of the size given. The pipeline itself is left as it was. What is
    kept ends nearer to the pipeline's own many-step samples than the plain solver does on the pipeline's own levels.

    Args:
        pipe: a pipeline with a `unet` or a `transformer`.
        prompts: of the calibration samples, dealt out by seed; None for pipelines without prompts, or if `call` has
            embeddings or labels. The spread of samples is kept within each of them.
        nfe: evaluations of a run (for Heun two a step, the last one once); several: a `CalibrationSet` is returned.
        solver: default: the pipeline's own if there is a corrected scheduler for it, else DPM-Solver++(2M).
        recipe: how to calibrate, seeds included.
        batch: samples in one network call, at most.
        progress: show a bar with the time left; or a function that is told the `Progress` and may return False to
            stop. Stopping, or Ctrl-C, keeps the best so far.
        call: arguments of the pipeline's call: `guidance_scale`, `height`, `prompt_embeds`, `class_labels`, …
    """
    if prompts is not None:
        call["prompt"] = list(prompts)
    budgets = [nfe] if isinstance(nfe, int) else sorted(set(nfe))
    solver = solver or default_solver(pipe.scheduler)
    scheduler = scheduler_for(pipe.scheduler, solver)
    model = capture(pipe, scheduler, batch=batch, **call).model()
    # Only some hosts can begin below the first level: pipelines begin with unit noise.
    late = hasattr(type(scheduler).stock, "init_noise_sigma")
    search = recipe.search
    if search is not None and not late:
        if search.begins is not None:
            host = type(pipe.scheduler).__name__
            raise ValueError(f"start must be True or False, got {search.start!r}: {host} begins at its first level")
        search = replace(search, start=False)
    recipe = replace(recipe, to_zero=True, search=search)  # the host's runs end at σ = 0
    announce(model, recipe, budgets, batch)
    made: list[Calibration] = []
    fine = recipe.reference_steps(budgets)
    with shown(progress, fine + sum(work(recipe, n) + n * n / 2 for n in budgets)) as stage:
        traced = stage(fine)

        def step(info: StepInfo) -> bool | None:
            return traced(Progress("reference", info.i + 1, info.steps))

        reference = reference_run(model, recipe.seeds, steps=fine, to_zero=True, batch=batch, callback=step)
        for n in budgets:
            steps = levels_for(solver, LogSNR(to_zero=True), model.schedule.finite_start(), n).steps
            rivals = recipe.rivals and (*recipe.rivals, *own_grid(pipe, steps, call))
            planned, told = replace(recipe, rivals=rivals), stage(work(recipe, n))
            try:
                found = calibrate_solver(
                    model, n, solver, recipe=planned, reference=reference, batch=batch, callback=told
                )
            except Cancelled:
                if not made:
                    raise
                break  # those before are whole
            if found.provenance["stopped"]:
                made.append(found)
                break
            made.append(with_restarts(found, reference, recipe.fit, stage(n * n / 2)))
    known = {name: identify(module) for name, module in modules_of(pipe).items()}
    made = [replace(one, conditions={**one.conditions, **known}) for one in made]
    return made[0] if isinstance(nfe, int) else CalibrationSet(tuple(made))


def pictures(pipe: Any, shape: Sequence[int]) -> tuple[Callable[[Tensor], Tensor] | None, int]:
    """How a pipeline's samples become images in [−1, 1], None where they are images already; and their channels."""
    coder: Any = pipe.components.get("vae") or pipe.components.get("vqvae")
    if coder is None and len(shape) == 3 and shape[0] in (1, 3):
        return None, shape[0]
    known = type(coder) in (AutoencoderKL, VQModel)
    if not known or len(shape) != 3 or shape[0] != coder.config.latent_channels:
        raise ValueError(
            f"pipe = {type(pipe).__name__}: its samples {tuple(shape)} cannot be decoded here; use "
            "steindiff.integrations.diffusers.report, which lets the pipeline decode"
        )
    settings = coder.config
    factor, shift = settings.scaling_factor, settings.get("shift_factor") or 0.0

    @torch.no_grad()
    def decode(latents: Tensor) -> Tensor:
        parts = latents.to(coder.dtype).split(4)
        return torch.cat([coder.decode(z / factor + shift).sample.float() for z in parts])

    return decode, settings.out_channels


def work(recipe: Recipe, nfe: int) -> int:
    """About how many evaluations of a seed a search takes."""
    searched = 0
    if recipe.search is not None:
        rounds = recipe.search.iterations_of(nfe)
        searched = rounds * nfe * (nfe + 1) + 6 * nfe
        if recipe.search.probe:  # one evaluation a trial
            searched += rounds * (2 * nfe + 3) + 3
    return searched + nfe * (2 + len(recipe.rivals))


def announce(model: Model, recipe: Recipe, budgets: Sequence[int], batch: int) -> None:
    """Say what a calibration costs before it is paid."""
    seeds, fine = len(recipe.seeds), recipe.reference_steps(budgets)
    evaluations = seeds * (fine + sum(work(recipe, nfe) for nfe in budgets))
    logger.info("calibrating takes about %d evaluations of a sample, %d at a time", evaluations, batch)
    held = 2 * fine * seeds * math.prod(model.shape) * 4
    if held > SAID:
        taken = "the fine trajectory of %d samples takes %.1f GB of main memory in float32; fewer seeds take less"
        logger.warning(taken, seeds, held / 1e9)


def observed(known: Guidance, parts: Sequence[Tensor], model_output: Tensor) -> str:
    """What a run seems to do instead, in words: the weight that comes closest."""
    if known.copies == 1:
        return "combines the network's outputs"
    c, u = parts[known.conditional], parts[1 - known.conditional]
    weight = float(((model_output[: len(c)].float() - u) * (c - u)).sum() / (c - u).square().sum())
    return f"is closest to weight = {weight:.3g}"


GUARDS: weakref.WeakSet[GuidanceGuard] = weakref.WeakSet()
"""All that watch. The network's outputs belong to whoever takes the next step."""


class GuidanceGuard:
    """Looks at every step of a run: are the network's outputs combined as the calibration knows it?

    Every copy of a scheduler has one of its own, and minds the calls of the thread its run began in.
    """

    def __init__(self, pipe: Any, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self.armed: Calibration | None = None
        self._control: list[float] | None = None
        self._pipe = weakref.ref(pipe)
        self._thread = 0
        self._answering = "guidance"
        self._outputs: list[Tensor] = []
        self._embedded: float | None = None
        told = functools.partial(called, weakref.ref(self))
        hooks = [module.register_forward_hook(told, with_kwargs=True) for module in modules.values()]
        self.remove = weakref.finalize(self, removed, hooks)
        GUARDS.add(self)

    @property
    def scale(self) -> float | None:
        """The guidance scale the pipeline was called with, as far as it keeps one."""
        value = getattr(self._pipe(), "_guidance_scale", None)
        return max(float(value), 1.0) if isinstance(value, int | float) else None

    def arm(self, calibration: Calibration) -> None:
        """A run begins: keep what the network answers until the next step."""
        self.armed, self._thread, self._outputs = calibration, threading.get_ident(), []

    def answered(self, module: nn.Module, kwargs: Mapping[str, Any], output: Any) -> None:
        """A network has answered."""
        name = next((name for name, known in self.modules.items() if known is module), None)
        if name is None or self.armed is None or self._thread != threading.get_ident():
            return
        if name == "controlnet":
            self._control = strengths(kwargs)
            return
        self._answering = "guidance_later" if name == "network_later" else "guidance"
        self._outputs.append(answer(output))
        embedded = kwargs.get("guidance")
        self._embedded = None if embedded is None else float(embedded.flatten()[0])

    def check(self, model_output: Tensor) -> None:
        """Compare, and let go of the outputs."""
        if self.armed is None:
            return
        outputs, control = self._outputs, self._control
        for guard in GUARDS:
            if guard.modules["network"] is self.modules["network"] and guard._thread == self._thread:
                guard._outputs, guard._control = [], None
        if not outputs:
            raise ValueError("network: not the one the calibration was installed for; call stabilize again")
        known = guidance_known(self.armed, self._answering)
        measured = self.armed.conditions.get("controlnet_scale")
        if control != measured:
            raise ValueError(f"controlnet_conditioning_scale: measured with {measured}, this run has {control}")
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
        twin = GuidanceGuard(self._pipe(), {name: memo.get(id(part), part) for name, part in self.modules.items()})
        twin.armed, twin._thread, twin._embedded = self.armed, self._thread, self._embedded
        twin._answering, twin._control, twin._outputs = self._answering, self._control, list(self._outputs)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # another process has another network: call stabilize there


def removed(hooks: Iterable[Any]) -> None:
    """Take forward hooks off their networks."""
    for hook in hooks:
        hook.remove()


def called(
    guard: weakref.ref[GuidanceGuard], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """A forward hook that keeps no guard alive."""
    watching = guard()
    if watching is not None:
        watching.answered(module, kwargs, output)


def guidance_known(calibration: Calibration, name: str = "guidance") -> Guidance:
    """The guidance a calibration was measured with, by the name of the condition."""
    known: Guidance = decode(name, calibration.conditions.get(name), Guidance)
    if known.copies not in (1, 2) or known.conditional not in range(known.copies):
        raise ValueError(f"{name} must combine 1 or 2 conditions, got {known}")
    return known


class Stabilized:
    """An installed calibration. `undo`, or leaving the `with` block, gives the pipeline its scheduler back."""

    def __init__(self, pipe: Any, scheduler: Corrected, guard: GuidanceGuard | None) -> None:
        self.pipe, self.scheduler, self._guard = pipe, scheduler, guard
        self._before = pipe.scheduler
        pipe.scheduler, scheduler._stein_guard = scheduler, guard

    def undo(self) -> None:
        """Restore the pipeline's own scheduler, unless somebody has set another one since."""
        if self._guard is not None:
            self._guard.remove()
        self.scheduler._stein_guard = None
        if self.pipe.scheduler is self.scheduler:
            self.pipe.scheduler = self._before

    def __enter__(self) -> Stabilized:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()


def stabilize(pipe: Any, calibration: Calibration | CalibrationSet | None = None, *, check: bool = True) -> Stabilized:
    """Install a calibration in a pipeline, in place.

    Args:
        pipe: the pipeline it was measured on, or another one with the same network.
        calibration: made by `calibrate`; of a set, `num_inference_steps` and the guidance scale of a run choose; None:
            the one the pipeline's scheduler was saved with.
        check: recognise the network now and its guidance at every step. False skips both: for a LoRA, a quantised or a
            fine-tuned network, or another guidance, at your own risk.

    Returns:
        A handle whose `undo` restores the pipeline; also a context manager.

    Raises:
        ValueError: if the calibration is missing, if it was measured on another network, or for a solver or process
            diffusers cannot run; later, when the pipeline runs, if steps, resolution or guidance are not those of the
            calibration.
    """
    if calibration is None:
        carried = pipe.scheduler.config.get("stein_calibration")
        if carried is None:
            raise ValueError("calibration = None: the pipeline's scheduler carries none; make one with calibrate")
        calibration = CalibrationSet.from_dict(carried)
    guard = None
    if check:
        for one in all_of(calibration):
            check_network(one, pipe)
        guard = GuidanceGuard(pipe, modules_of(pipe))
    return Stabilized(pipe, scheduler_for(pipe.scheduler, all_of(calibration)[0].solver, calibration), guard)


def check_network(calibration: Calibration, pipe: Any) -> None:
    """Refuse networks the calibration was not measured on, or a calibration that does not say on which it was."""
    conditions, modules = calibration.conditions, modules_of(pipe)
    missing = [name for name in ("network", "guidance") if not isinstance(conditions.get(name), dict)]
    if missing:
        what = f"does not record its {' and '.join(missing)} and cannot be checked"
        raise ValueError(f"calibration: {what}; make it with calibrate(pipe, …), or use stabilize(…, check=False)")
    guidance_known(calibration)
    for name in ("network", "network_later", "controlnet"):
        known, module = conditions.get(name), modules.get(name)
        if known is not None and module is not None:
            try:
                check_identity(known, module)
            except ValueError as error:
                other = "a LoRA, quantisation or fine-tuning makes another network"
                way_out = f"{other}: calibrate that one, or use stabilize(…, check=False)"
                raise ValueError(f"{error}; {way_out}") from None
        elif known is not None or module is not None:
            raise ValueError(f"{name}: the calibration was measured with{'out' if known is None else ''} one")
    if "boundary" in conditions and conditions["boundary"] != (given := pipe.config["boundary_ratio"]):
        raise ValueError(f"boundary_ratio: measured with {conditions['boundary']}, the pipeline has {given}")


def report(
    pipe: Any,
    calibration: Calibration | CalibrationSet,
    prompts: Sequence[str] | None = None,
    *,
    seeds: Sequence[int] = range(8),
    many: int = 24,
    progress: bool = True,
    **call: Any,
) -> Report:
    """Run a pipeline on the same seeds plain, calibrated and with many steps; `steindiff.report.write` writes the page.

    The pipeline decodes, so its images may have any size. Plain is the calibration's solver on the pipeline's own grid.

    Args:
        pipe: the pipeline; it is left as it was.
        calibration: of it; of a set, every number of evaluations is shown.
        prompts: dealt out by seed, and shown as captions; None as in `calibrate`.
        seeds: one image each, none of those it was calibrated on.
        many: steps of the last row, to which the distance of the others is given.
        progress: show a bar with the time left.
        call: arguments of the pipeline's call, those it was calibrated with.
    """
    if prompts is not None:
        call["prompt"] = list(prompts)
    parts, before, known = chunks(call or {"batch_size": 1}, 1), pipe.scheduler, all_of(calibration)

    def images(steps: int) -> list[Any]:
        found = []
        for i, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(int(seed))
            made = pipe(**parts[i % len(parts)], num_inference_steps=steps, generator=generator)
            if not hasattr(made, "images"):
                raise ValueError(f"pipe = {type(pipe).__name__}: makes no images but {', '.join(made)}")
            found.append(made.images[0])
            advance(steps)
        return found

    steps = [one.levels.steps for one in known]
    entries = []
    with bar("sampling", len(seeds) * (many + 2 * sum(steps)), shown=progress) as advance:
        try:
            pipe.scheduler = scheduler_for(before, known[0].solver)
            entries += [Entry("plain", one.nfe, images(one.levels.steps)) for one in known]
            entries.append(Entry(f"many steps ({many})", many, images(many), reference=True))
        finally:
            pipe.scheduler = before
        with stabilize(pipe, calibration):
            entries[-1:-1] = [Entry("calibrated", one.nfe, images(one.levels.steps)) for one in known]
    captions = [str(prompts[i % len(prompts)]) for i in range(len(seeds))] if prompts else []
    name = type(pipe).__name__
    settings = {"pipeline": name, "solver": repr(known[0].solver), "steindiff": __version__}
    return of_images(entries, seeds, title=f"{name}: plain, calibrated", captions=captions, settings=settings)
