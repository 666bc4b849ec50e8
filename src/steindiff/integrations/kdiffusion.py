r"""A sampler with k-diffusion's signature, for everything that speaks it: k-diffusion, A1111, reForge, ComfyUI.

There a sampler is a function of a denoiser `model(x, sigma)` and an array of noise levels, from noise to data. This one
runs any solver of this library and replays a calibration, without depending on any of those hosts. Two kinds of
coordinates occur:

    y = x/α at noise σ/α      everything but flow matching: noise is added to an unscaled image
    x = (1 − σ) x* + σ ε      flow matching

A calibration measured elsewhere (a diffusers pipeline, say) fits as it is: its levels (α, σ) say how to go from one to
the other, and all solvers here commute with that change.

Hosts call under `torch.inference_mode()`: sampling takes no derivative, and calibration takes them by `torch.func`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from steindiff.calibrating import Recipe, calibrate
from steindiff.calibration import Calibration
from steindiff.denoisers.base import CountingDenoiser
from steindiff.levels import Level, Levels
from steindiff.loop import StepInfo, sample
from steindiff.model import Model
from steindiff.schedules import EDM, Flow
from steindiff.schedules.base import Schedule
from steindiff.solvers import DPMSolverMultistep, Solver


class HostModel(Protocol):
    """What these hosts call a model: a denoiser of states `(B, *)` at noise levels `(B,)`, guidance already applied."""

    def __call__(self, x: Tensor, sigma: Tensor, **extra_args: Any) -> Tensor:
        """Denoise."""


class HostDenoiser(CountingDenoiser):
    r"""A host's model as a denoiser: D(x, level) = model(x/α; σ/α), or model(x; σ) for flow matching.

    Args:
        model: the host's model.
        extra_args: passed on at every call.
        flow: whether it is a flow-matching model.
        dtype: the model is called with it.
    """

    def __init__(self, model: HostModel, extra_args: Mapping[str, Any], *, flow: bool, dtype: torch.dtype) -> None:
        self.model = model
        self.extra_args = extra_args
        self.flow = flow
        self.dtype = dtype

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        state, noise = (x, level.t) if self.flow else (x / level.alpha, level.told * level.ratio)
        sigma = torch.full(x.shape[:1], noise, dtype=self.dtype, device=x.device)
        return self.model(state.to(self.dtype), sigma, **self.extra_args).to(x.dtype)


def levels_of(sigmas: Tensor, *, flow: bool = False) -> Levels:
    r"""The levels a host means by its `sigmas`, `(n,)`: strictly decreasing, usually ending in 0.

    Raises:
        ValueError: if there are fewer than two, or they do not decrease.
    """
    if sigmas.ndim != 1:
        raise ValueError(f"sigmas: shape {tuple(sigmas.shape)}, need a list of noise levels (n,)")
    schedule = Flow() if flow else EDM()
    return Levels(tuple(schedule.level(s) if s > 0.0 else schedule.clean() for s in sigmas.double().tolist()), schedule)


def sigmas_of(calibration: Calibration) -> Tensor:
    """The noise levels a host must be given to replay a calibration, `(steps + 1,)` float32."""
    flow = isinstance(calibration.levels.schedule, Flow)
    return torch.tensor([level.sigma if flow else level.ratio for level in calibration.levels])


def check_replay(
    calibration: Calibration, x: Tensor, sigmas: Tensor, *, solver: Solver | None, flow: bool, settings: dict[str, Any]
) -> None:
    """Refuse a calibration for another solver, shape, grid, kind of model, or other settings.

    Raises:
        ValueError: naming what differs.
    """
    if found := calibration.differences(solver=solver, shape=tuple(x.shape[1:]), conditions=settings):
        raise ValueError(f"calibration does not fit: {'; '.join(found)}")
    if isinstance(calibration.levels.schedule, Flow) != flow:
        raise ValueError(f"flow = {flow}: the calibration was measured on {type(calibration.levels.schedule).__name__}")
    own, given = sigmas_of(calibration).double(), sigmas.double().cpu()
    if len(own) != len(given) or not torch.allclose(given, own, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"sigmas: {len(given) - 1} steps, {[float(f'{s:.4g}') for s in given]}, but the calibration is for "
            f"{len(own) - 1} steps, {[float(f'{s:.4g}') for s in own]}; sample on sigmas_of(calibration)"
        )


def sample_steindiff(
    model: HostModel,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Mapping[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    disable: bool | None = None,
    solver: Solver | None = None,
    calibration: Calibration | None = None,
    flow: bool = False,
    settings: dict[str, Any] | None = None,
) -> Tensor:
    r"""Sample with k-diffusion's calling convention.

    Args:
        model: denoiser, called as `model(x, sigma, **extra_args)` with `sigma` of shape `(B,)`.
        x: noise scaled to sigmas[0], `(B, *)`, of any floating dtype; arithmetic here is in float32 at least.
        sigmas: noise levels, `(n,)`, from noise to data; with a calibration, its own (`sigmas_of`).
        extra_args: passed to the model.
        callback: called after every step with `x`, `i`, `sigma`, `sigma_hat`, `denoised`, as k-diffusion does.
        disable: hide the progress bar; only False shows one.
        solver: default: the calibration's, else DPM-Solver++(2M).
        calibration: replayed if given.
        flow: a flow-matching model, α = 1 − σ.
        settings: what must equal the calibration's record, e.g. its guidance.

    Returns:
        The samples, `(B, *)`, in the dtype of `x`.

    Raises:
        ValueError: if `sigmas` do not decrease, or anything is not as the calibration was measured.
    """
    levels, correction = levels_of(sigmas, flow=flow), None
    if calibration is not None:
        check_replay(calibration, x, sigmas, solver=solver, flow=flow, settings=settings or {})
        levels, solver, correction = calibration.levels, calibration.solver, calibration.replay()

    def unit(level: Level) -> float:
        return 1.0 if flow else level.alpha

    def report(moment: StepInfo) -> None:
        if callback is not None:
            found = moment.x if moment.denoised is None else moment.denoised
            callback(
                {
                    "x": (moment.x / unit(moment.level)).to(x.dtype),
                    "i": moment.i,
                    "sigma": sigmas[moment.i],
                    "sigma_hat": sigmas[moment.i],
                    "denoised": found.to(x.dtype),
                }
            )

    out = sample(
        HostDenoiser(model, extra_args or {}, flow=flow, dtype=x.dtype),
        x.to(torch.promote_types(x.dtype, torch.float32)) * unit(levels[0]),
        levels,
        solver or DPMSolverMultistep(2),
        correction,
        callback=report,
    )
    return (out.x / unit(levels[-1])).to(x.dtype)


def calibrate_steindiff(
    model: HostModel,
    shape: Sequence[int],
    nfe: int,
    sigma_min: float,
    sigma_max: float,
    extra_args: Mapping[str, Any] | None = None,
    *,
    solver: Solver | None = None,
    flow: bool = False,
    recipe: Recipe = Recipe(),  # noqa: B008
    seeds: Sequence[int] = range(32),
    batch: int = 4,
    settings: dict[str, Any] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    callback: Callable[..., bool | None] | None = None,
) -> Calibration:
    r"""Calibrate a host's model, also under `torch.inference_mode()`.

    Args:
        model: as in `sample_steindiff`; `extra_args` must suit any batch of up to `batch` samples.
        shape: of one sample.
        nfe: evaluations of a run.
        sigma_min: smallest noise level of the model, in the host's coordinates.
        sigma_max: largest.
        extra_args: passed to the model.
        solver: default DPM-Solver++(2M).
        flow: a flow-matching model, α = 1 − σ.
        recipe: how to calibrate.
        seeds: of the calibration samples.
        batch: at most so many samples in one call.
        settings: what to record and to compare when sampling, e.g. the guidance.
        device: where to run.
        dtype: the model is called with it; the state is float32.
        callback: as in `steindiff.loop`.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0.0 < sigma_min < sigma_max:
        raise ValueError(f"sigma_min must be > 0 and below sigma_max, got {sigma_min} and {sigma_max}")
    schedule: Schedule = Flow(sigma_min, sigma_max) if flow else EDM(sigma_min, sigma_max)
    denoiser = HostDenoiser(model, extra_args or {}, flow=flow, dtype=dtype)
    wrapped = Model(denoiser, schedule, tuple(shape), device=device)
    recipe = replace(recipe, seeds=seeds, to_zero=True)  # the host's runs end at σ = 0
    made = calibrate(wrapped, nfe, solver or DPMSolverMultistep(2), recipe=recipe, batch=batch, callback=callback)
    return replace(made, conditions={**made.conditions, **(settings or {})})
