r"""A sampler with k-diffusion's signature, for everything that speaks it: k-diffusion, A1111, reForge, ComfyUI.

There a sampler is a function of a denoiser `model(x, sigma)` and an array of noise levels, from noise to data. This one
runs any solver of this library and replays a calibration, without depending on any of those hosts. Two kinds of
coordinates occur:

    y = x/α at noise σ/α      everything but flow matching: noise is added to an unscaled image
    x = (1 − σ) x* + σ ε      flow matching

A calibration measured elsewhere (a diffusers pipeline, say) fits as it is: its levels (α, σ) say how to go from one to
the other, and all solvers here commute with that change. To measure one in the host, make its model a `Model`:

    calibrate(hosted(HostDenoiser(model, extra_args), shape, sigma_min, sigma_max), nfe=5)

Only forward passes are made, so networks that work in place or under `torch.inference_mode()` are fine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steindiff._progress import bar
from steindiff.calibration import Calibration, check_calibration
from steindiff.denoisers.base import CountingDenoiser
from steindiff.levels import Level, Levels
from steindiff.loop import StepInfo, sample
from steindiff.model import Model
from steindiff.schedules import EDM, Flow
from steindiff.solvers import SOLVERS, Solver

HostModel = Callable[..., Tensor]
"""What these hosts call a model: `model(x, sigma, **extra_args)`, a denoiser of states `(B, *)` at noise levels `(B,)`,
guidance already applied."""


class HostDenoiser(CountingDenoiser):
    r"""A host's model as a denoiser: D(x, level) = model(x/α; σ/α), or model(x; σ) for flow matching.

    A level that is told as another, σ′ for σ, means what it means to the network inside: a flow network is asked for
    its velocity v = (x − D′)/σ′ and D = x − σ v; one in EDM's coordinates answers D′ itself; on any other schedule it
    is taken for a noise prediction, whose input x = α y stays: D = y − σ f, f = (y′ − D′)/σ′, y′ = y √(1+σ′²)/√(1+σ²).

    Args:
        model: the host's model.
        extra_args: passed on at every call.
        flow: whether it is a flow-matching model.
        dtype: the model is called with it; None: the state's.
        device: where the model runs; None: where the state is.
        conditions: what a calibration must agree on, by name.
    """

    def __init__(
        self,
        model: HostModel,
        extra_args: Mapping[str, Any] | None = None,
        *,
        flow: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.extra_args, self._conditions = model, extra_args or {}, conditions or {}
        self.flow, self.dtype, self.device = flow, dtype, device
        self.watched: dict[Level, tuple[Tensor, Tensor]] | None = None
        """If a dict: the latest state at each level, in the host's coordinates, and its denoised image."""

    @property
    def conditions(self) -> Mapping[str, Any]:
        return self._conditions

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        y = x if self.flow else x / level.alpha
        found = self._denoised(y, level)
        if self.watched is not None:
            self.watched[level] = y, found
        return found

    def _denoised(self, y: Tensor, level: Level) -> Tensor:
        if self.flow:
            found = self._ask(y, level.t)
            return found if level.told == 1.0 else y - level.sigma / level.t * (y - found)
        sigma, told = level.ratio, level.told * level.ratio
        if level.told == 1.0 or level.alpha == 1.0:
            return self._ask(y, told)
        scaled = y * math.sqrt((1.0 + told**2) / (1.0 + sigma**2))
        return y - sigma / told * (scaled - self._ask(scaled, told))

    def _ask(self, x: Tensor, sigma: float) -> Tensor:
        """The model's answer. Copies, both ways: it may write into its input or use the memory of its output again."""
        dtype, device = self.dtype or x.dtype, x.device if self.device is None else torch.device(self.device)
        levels = torch.full(x.shape[:1], sigma, dtype=dtype, device=device)
        return self.model(x.to(device, dtype, copy=True), levels, **self.extra_args).to(x.device, x.dtype, copy=True)


def hosted(denoiser: HostDenoiser, shape: Sequence[int], sigma_min: float, sigma_max: float) -> Model:
    """A host's model with its range of noise levels, ready for `calibrate`.

    Args:
        denoiser: the host's model.
        shape: of one sample.
        sigma_min: smallest noise level the model knows, in the host's coordinates.
        sigma_max: largest; a flow that begins at pure noise, σ = 1, is begun just below.
    """
    if not 0.0 < sigma_min < sigma_max:
        raise ValueError(f"sigma_min must be > 0 and below sigma_max, got {sigma_min} and {sigma_max}")
    schedule = Flow(sigma_min, min(sigma_max, 1.0)) if denoiser.flow else EDM(sigma_min, sigma_max)
    device, name = denoiser.device or "cpu", type(denoiser.model).__name__
    return Model(denoiser, schedule, tuple(shape), device=device, name=name).trust()


def levels_of(sigmas: Tensor, *, flow: bool = False) -> Levels:
    r"""The levels a host means by its `sigmas`, `(n,)`: strictly decreasing, usually ending in 0."""
    schedule, values = Flow() if flow else EDM(), sigmas.double().tolist()
    if not all(0.0 <= s < math.inf for s in values):
        raise ValueError(f"sigmas must be finite and >= 0, got {values}")
    return Levels(tuple(schedule.level(s) if s > 0.0 else schedule.clean() for s in values), schedule)


def sigmas_of(calibration: Calibration) -> Tensor:
    """The noise levels a host must be given to replay a calibration, `(steps + 1,)` float32."""
    check_calibration(calibration)
    flow = isinstance(calibration.levels.schedule, Flow)
    return torch.tensor([level.sigma if flow else level.ratio for level in calibration.levels])


def check_replay(
    calibration: Calibration,
    x: Tensor,
    sigmas: Tensor,
    *,
    solver: Solver | None = None,
    flow: bool = False,
    conditions: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a calibration for another solver, shape, grid, kind of model, or other conditions."""
    check_calibration(calibration)
    if found := calibration.differences(solver=solver, shape=tuple(x.shape[1:]), conditions=conditions):
        raise ValueError(f"calibration does not fit: {'; '.join(found)}")
    schedule = calibration.levels.schedule
    if isinstance(schedule, Flow) != flow:
        raise ValueError(f"flow = {flow}: the calibration was measured on {type(schedule).__name__}")
    if any(level.told != 1.0 for level in calibration.levels) and not isinstance(schedule, EDM | Flow):
        preserving = all(math.isclose(math.hypot(level.alpha, level.sigma), 1.0) for level in calibration.levels)
        if not preserving or calibration.conditions.get("prediction") != "epsilon":
            raise ValueError(
                f"calibration: it tells the network other levels than it steps on, on {type(schedule).__name__}; here "
                "that works for noise prediction only, and conditions do not say prediction = 'epsilon'; measure it "
                "in this host, or without Search.telling"
            )
    own, given = sigmas_of(calibration).double(), sigmas.double().cpu()
    if len(own) != len(given) or not torch.allclose(given, own, rtol=1e-3, atol=1e-6):
        here, there = (f"{len(row) - 1} steps, {[float(f'{s:.4g}') for s in row]}" for row in (given, own))
        raise ValueError(f"sigmas: {here}, but the calibration is for {there}; sample on sigmas_of(calibration)")


def sample_steindiff(
    model: HostModel,
    x: Tensor,
    sigmas: Tensor,
    extra_args: Mapping[str, Any] | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    disable: bool | None = None,
    *,
    solver: Solver | str | None = None,
    calibration: Calibration | None = None,
    flow: bool = False,
    conditions: Mapping[str, Any] | None = None,
) -> Tensor:
    r"""Sample with k-diffusion's calling convention.

    Args:
        model: denoiser, called as `model(x, sigma, **extra_args)` with `sigma` of shape `(B,)`.
        x: noise scaled to sigmas[0], `(B, *)`, of any floating dtype; arithmetic here is in float32 at least.
        sigmas: noise levels, `(n,)`, from noise to data; with a calibration, its own (`sigmas_of`). One or none: `x`
            comes back.
        extra_args: passed to the model.
        callback: called after every step with k-diffusion's entries: `x`, the state before the step (for UniPC the
            predicted one, where it evaluates), at `sigma` and `sigma_hat`; `denoised`, the model's answer to it; `i`.
        disable: hide the progress bar; only False shows one.
        solver: a solver or its name; default: the calibration's, else DPM-Solver++(2M).
        calibration: replayed if given.
        flow: a flow-matching model, α = 1 − σ.
        conditions: what must equal the calibration's, e.g. its guidance.

    Returns:
        The samples, `(B, *)`, in the dtype of `x`.
    """
    if sigmas.ndim != 1:
        raise ValueError(f"sigmas must be a list of noise levels (n,), got shape {tuple(sigmas.shape)}")
    if len(sigmas) < 2:
        return x
    chosen = None if solver is None else SOLVERS.resolve("solver", solver)
    correction = None
    if calibration is not None:
        check_replay(calibration, x, sigmas, solver=chosen, flow=flow, conditions=conditions)
        levels, chosen, correction = calibration.levels, calibration.solver, calibration.replay()
    else:
        levels = levels_of(sigmas, flow=flow)
    units = [1.0 if flow else level.alpha for level in (levels[0], levels[-1])]
    denoiser = HostDenoiser(model, extra_args, flow=flow, dtype=x.dtype)
    denoiser.watched = None if callback is None else {}
    state = x.to(torch.promote_types(x.dtype, torch.float32)) * units[0]

    with bar("sampling", levels.steps, shown=disable is False) as advance:

        def report(info: StepInfo) -> None:
            advance(1)
            if callback is not None and denoiser.watched is not None:
                here, found = (t.to(x.dtype) for t in denoiser.watched[levels[info.i]])
                later = levels[info.i + 1]  # some solvers have evaluated there already
                denoiser.watched = {level: seen for level, seen in denoiser.watched.items() if level == later}
                sigma = sigmas[info.i]
                callback({"x": here, "i": info.i, "sigma": sigma, "sigma_hat": sigma, "denoised": found})

        out = sample(denoiser, state, levels, chosen or SOLVERS["dpmpp-2m"], correction, callback=report)
    return (out.x / units[-1]).to(x.dtype)
