r"""The sampling loop, the only one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from steindiff._checks import shown
from steindiff.corrections.base import Correction, Plain, Transition
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.solvers.base import Solver
from steindiff.tableau import Evaluation, Step


class StepInfo(NamedTuple):
    """What a callback sees after each step: the new state and its level, and the step's last denoised image."""

    i: int
    steps: int
    x: Tensor
    level: Level
    denoised: Tensor | None


class Cancelled(RuntimeError):
    """A callback asked to stop, and nothing was made."""


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """A finished run.

    Attributes:
        x: the samples, `(B, *)`.
        nfe: evaluations of the denoiser the solver asked for, per sample.
        network_calls: what the networks counted, guidance and finite-difference probes included, for one batch.
        backward_passes: backward passes through the network spent by the correction, for one batch.
        statistics: what the correction measured, one mapping per step (of the first batch).
        trajectory: all states from first to last if captured, else empty.
    """

    x: Tensor
    nfe: int
    network_calls: int
    backward_passes: int = 0
    statistics: tuple[Mapping[str, Any], ...] = ()
    trajectory: tuple[Tensor, ...] = ()


class State(NamedTuple):
    """Where a run stands: before step i, at the states `x`, `(B, *)`, with the latest evaluations, newest first."""

    i: int
    x: Tensor
    history: tuple[Evaluation, ...] = ()


def advance(
    denoiser: Denoiser, state: State, levels: Levels, solver: Solver, correction: Correction
) -> tuple[State, Transition]:
    """Take one step."""
    i, x, history = state
    step = Step(solver.tableau(levels, i), denoiser, history)
    transition = correction(step, x, levels, i)
    memory = max(solver.memory, correction.memory)
    kept = (*reversed(transition.evaluations), *history)[:memory]
    return State(i + 1, transition.x, kept), transition


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    x: Tensor,
    levels: Levels,
    solver: Solver,
    correction: Correction | None = None,
    *,
    callback: Callable[[StepInfo], bool | None] | None = None,
    capture: bool = False,
) -> SampleResult:
    """Carry the states `x` from levels[0] to levels[-1].

    This is what hosts call, which hold their own states. `Sampler` is the loop over seeds and batches around it.

    Args:
        denoiser: D(x, level).
        x: initial states, `(B, *)`, float32 or float64: the dtype all arithmetic outside the network uses.
        levels: where to step, from a grid.
        solver: how to step.
        correction: what to do with each step; default nothing.
        callback: called after every step; return False to cancel.
        capture: keep all states.

    Returns:
        The samples with their cost.

    Raises:
        TypeError: if an argument is not of its kind; the message says what to pass.
        ValueError: if `x` or a denoised image has the wrong shape or dtype.
        RuntimeError: if the network or the state became NaN or infinite, naming the step.
        Cancelled: if the callback returned False.
    """
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"x must be a batch of samples (B, *) with B >= 1, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x must be torch.float32 or torch.float64 (the network may use less), got {x.dtype}")
    correction = Plain() if correction is None else correction
    for name, value, kind, hint in (
        ("denoiser", denoiser, Denoiser, "wrap the network: Epsilon(network), Velocity, FlowVelocity, X0, EDMDenoiser"),
        ("levels", levels, Levels, "GRIDS['logsnr'](schedule, steps)"),
        ("solver", solver, Solver, "SOLVERS['dpmpp-2m']"),
        ("correction", correction, Correction, "calibration.replay()"),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {shown(value)}; pass for example {hint}")
    calls = denoiser.calls
    statistics: list[Mapping[str, Any]] = []
    sizes: list[list[Tensor]] = []
    trajectory = [x]
    nfe = backward_passes = 0
    state = State(0, x)
    while state.i < levels.steps:
        state, (x, evaluations, stats, passes) = advance(denoiser, state, levels, solver, correction)
        nfe += len(evaluations)
        backward_passes += passes
        statistics.append(stats)
        # The largest magnitude is finite if and only if all entries are. Kept on the device: looking at it here would
        # stall it at every step.
        sizes.append([vector_norm(t, inf) for t in (x, *(e.d for e in evaluations))])
        if capture:
            trajectory.append(x)
        if callback is not None:
            denoised = evaluations[-1].d if evaluations else None
            if callback(StepInfo(state.i - 1, levels.steps, x, levels[state.i], denoised)) is False:
                raise Cancelled(f"cancelled by the callback after step {state.i} of {levels.steps}")
    check_health(sizes, levels)
    return SampleResult(
        x=x,
        nfe=nfe,
        network_calls=denoiser.calls - calls,
        backward_passes=backward_passes,
        statistics=tuple(statistics),
        trajectory=tuple(trajectory) if capture else (),
    )


def check_health(sizes: Sequence[Sequence[Tensor]], levels: Levels) -> None:
    """Raise if a step's state (its first size) or a denoised image (the others) was not finite; waits once."""
    finite = iter(torch.stack([size for step in sizes for size in step]).isfinite().tolist())
    for i, step in enumerate(sizes):
        state, *networks = (next(finite) for _ in step)
        if state and all(networks):
            continue
        culprit = "the state" if all(networks) else f"the network's output (evaluation {networks.index(False) + 1})"
        place = f"step {i + 1} of {levels.steps}, sigma {levels[i].sigma:.4g} to {levels[i + 1].sigma:.4g}"
        raise RuntimeError(f"{place}: {culprit} became NaN or infinite")
