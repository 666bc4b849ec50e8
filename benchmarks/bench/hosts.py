"""The same network in diffusers' own loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.schedules.base import Schedule


class Missing(ImportError):
    """There is nothing to compare with."""


def diffusers_loop(
    denoiser: Denoiser, schedule: Schedule, nfe: int, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], Levels]:
    """DPM-Solver++(2M) by diffusers' `DPMSolverMultistepScheduler`, written as its documentation has it.

    The scheduler works on VP states; a network with another time is called at its own level of equal σ/α, as any
    wrapper would. Levels are looked up before the loop, so nothing of ours runs inside it but the denoiser.

    Returns:
        A function from unit noise `(B, *)` to samples `(B, *)`, and the levels it visits, for the same run by us.

    Raises:
        Missing: if diffusers cannot be imported.
    """
    try:
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
    except ImportError as error:
        raise Missing(f"diffusers: not installed ({error})") from None
    scheduler = DPMSolverMultistepScheduler(prediction_type="sample", use_karras_sigmas=True, final_sigmas_type="zero")
    scheduler.set_timesteps(nfe, device=device)
    ratios = scheduler.sigmas.tolist()
    states = [Level(float(t), (1 + r * r) ** -0.5, r * (1 + r * r) ** -0.5) for t, r in enumerate(ratios)]
    own = [schedule.at(state.lam) for state in states[:-1]]

    def run(x: Tensor) -> Tensor:
        scheduler.set_timesteps(nfe, device=device)
        with torch.no_grad():
            for t, state, level in zip(scheduler.timesteps, states, own, strict=False):
                denoised = denoiser(x * (level.alpha / state.alpha), level)
                x = scheduler.step(denoised, t, x).prev_sample
        return x

    return run, Levels((*own, schedule.clean()), schedule)
