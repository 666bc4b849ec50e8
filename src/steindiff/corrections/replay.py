r"""Replaying a calibration: no derivative, no extra network call, a few cosine transforms a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steindiff.calibration import Calibration
from steindiff.corrections.alignment import differences, latest
from steindiff.corrections.balance import split_step
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Levels
from steindiff.tableau import Step


class Replay(Correction):
    r"""x_next = (1 − γ) x + γ (r x + b (ρ D̄ + Σ_k τ_k ∇D_k)), with γ, ρ and τ from a calibration.

    A sample depends on itself alone, never on its batch. Where γ = 1 and no ρ is given the candidate passes
    unchanged, so an empty calibration is the plain solver to the bit.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._factors: list[dict[tuple[torch.device, torch.dtype], Tensor] | None] = []
        for i in range(calibration.levels.steps):
            factors = self._stacked(i)
            self._factors.append(None if factors is None else {(factors.device, factors.dtype): factors})

    @property
    def memory(self) -> int:
        return 1 + max((len(rows) for rows in self.calibration.tau), default=0)

    def _stacked(self, i: int) -> Tensor | None:
        """ρ − 1 and b τ_k of every coefficient, `(1 + k, *)`; None where step i is left alone."""
        rho, tau = self.calibration.rho[i], self.calibration.tau[i]
        if not rho:
            return None
        _, b = split_step(self.calibration.levels[i], self.calibration.levels[i + 1])
        rows = [torch.tensor(rho, dtype=torch.float64) - 1.0]
        rows += [b * torch.tensor(row, dtype=torch.float64) for row in tau]
        return torch.stack([self.calibration.basis.spread(row) for row in rows])

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        candidate, evaluations = step(x)
        return Transition(self.apply(i, x, candidate, levels, latest(evaluations, step.history)), evaluations)

    def apply(self, i: int, x: Tensor, candidate: Tensor, levels: Levels, denoised: Sequence[Tensor] = ()) -> Tensor:
        """The next state from a state, the solver's candidate for it and the latest denoised images, all `(B, *)`.

        Args:
            i: the step.
            x: the state.
            candidate: the solver's T(x).
            levels: of the run.
            denoised: newest first. Where there are fewer than the step was fitted with (a run that begins in the
                middle, as in img2img), ρ and τ do not belong together, and the candidate stands.

        Raises:
            ValueError: if `levels` or the shape of `x` are not the calibration's.
        """
        own = self.calibration.levels
        if levels is not own and levels.levels != own.levels:
            raise ValueError("levels: not those of the calibration; sample on calibration.levels")
        if tuple(x.shape[1:]) != self.calibration.shape:
            raise ValueError(f"x: samples of shape {tuple(x.shape[1:])}, calibrated for {self.calibration.shape}")
        made, changes = self._factors[i], differences(denoised, len(self.calibration.tau[i]))
        if made is not None and len(changes) == len(self.calibration.tau[i]):
            key = (candidate.device, candidate.dtype)
            if key not in made:
                made[key] = next(iter(made.values())).to(*key)
            r, _ = split_step(levels[i], levels[i + 1])
            # b D̄ = T − r x, and T + (ρ − 1) b D̄ + b Σ τ ∇D: all terms go through one transform and back through one.
            terms = [candidate if r == 0.0 else candidate.sub(x, alpha=r), *changes]
            basis = self.calibration.basis
            with torch.autocast(x.device.type, enabled=False):  # the host's is meant for its network, not for the state
                coefficients = basis.forward(torch.cat(terms)).unflatten(0, (len(terms), len(x)))
                candidate = candidate + basis.inverse((coefficients * made[key].unsqueeze(1)).sum(0))
        gamma = self.calibration.gamma[i]
        return candidate if gamma == 1.0 else x.lerp(candidate, gamma)
