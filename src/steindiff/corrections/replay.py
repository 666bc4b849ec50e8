r"""Replaying a calibration: no derivative, no extra network call, two transforms a step."""

from __future__ import annotations

import torch
from torch import Tensor

from steindiff.calibration import Calibration
from steindiff.corrections.balance import rebalance
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Levels
from steindiff.tableau import Step


class Replay(Correction):
    r"""x_next = (1 − γ) x + γ (r x + b ρ D̄), with γ and ρ from a calibration.

    A sample depends on itself alone, never on its batch. Where γ = 1 and no ρ is given the candidate passes
    unchanged, so an empty calibration is the plain solver to the bit.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        basis = calibration.basis
        self._excess: list[dict[tuple[torch.device, torch.dtype], Tensor] | None] = []
        for row in calibration.rho:
            excess = basis.spread(torch.tensor(row, dtype=torch.float64) - 1.0) if row else None
            self._excess.append(None if excess is None else {(excess.device, excess.dtype): excess})

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        candidate, evaluations = step(x)
        return Transition(self.apply(i, x, candidate, levels), evaluations)

    def apply(self, i: int, x: Tensor, candidate: Tensor, levels: Levels) -> Tensor:
        """The next state from a state and the solver's candidate for it, both `(B, *)`.

        Raises:
            ValueError: if `levels` or the shape of `x` are not the calibration's.
        """
        own = self.calibration.levels
        if levels is not own and levels.levels != own.levels:
            raise ValueError("levels: not those of the calibration; sample on calibration.levels")
        if tuple(x.shape[1:]) != self.calibration.shape:
            raise ValueError(f"x: samples of shape {tuple(x.shape[1:])}, calibrated for {self.calibration.shape}")
        made = self._excess[i]
        if made is not None:
            key = (candidate.device, candidate.dtype)
            if key not in made:
                made[key] = next(iter(made.values())).to(*key)
            candidate = rebalance(self.calibration.basis, x, candidate, levels[i], levels[i + 1], made[key])
        gamma = self.calibration.gamma[i]
        return candidate if gamma == 1.0 else x.lerp(candidate, gamma)
