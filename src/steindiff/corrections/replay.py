r"""Replaying a calibration: no derivative, no extra network call, two cosine transforms a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from steindiff.calibration import Calibration
from steindiff.corrections.alignment import latest
from steindiff.corrections.balance import split_step
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Levels
from steindiff.tableau import HERE, Step

Weighted = tuple[Tensor, float]
"""A tensor `(B, *)` and its weight in the solver's own T − r x."""


class Replay(Correction):
    r"""x_next = (1 − γ) x + γ (r x + b (ρ D̄ + Σ_k τ_k ∇D_k)), with γ, ρ and τ from a calibration.

    The solver's b D̄ = T − r x is a sum of states and denoised images with the weights of its table, and ∇D_k are
    differences of denoised images: each tensor gets one factor per band, and all go through one transform and back
    through one. A sample depends on itself alone, never on its batch. Where γ = 1 and no ρ is given the candidate
    passes unchanged, so an empty calibration is the plain solver to the bit.
    """

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._factors: dict[tuple[int, tuple[float, ...], int, torch.device, torch.dtype], Tensor] = {}

    @property
    def memory(self) -> int:
        return 1 + max((len(rows) for rows in self.calibration.tau), default=0)

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        self._check(x, levels)
        stages, row = step.tableau
        if not self._acts(i, len(stages) + len(step.history)):
            candidate, evaluations = step(x)
            return Transition(self._relaxed(i, x, candidate), evaluations)
        # The row of T is part of the sum below; HERE keeps the step from forming it as well.
        _, evaluations = replace(step, tableau=step.tableau._replace(output=HERE))(x)
        past = [*row.past, *[(0.0, 0.0)] * (len(step.history) - len(row.past))]
        own = [*row.d, *[0.0] * (len(stages) - len(row.d))]
        r, _ = split_step(levels[i], levels[i + 1])
        states = [(x, 0.0 if math.isclose(row.x, r, rel_tol=1e-9) else row.x - r)]
        states += [(e.x, u) for e, (u, _) in zip(step.history, past, strict=True)]
        weights = [*reversed(own), *(v for _, v in past)]
        denoised = list(zip(latest(evaluations, step.history), weights, strict=True))
        return Transition(self._aligned(i, x, r, denoised, states), evaluations)

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
        self._check(x, levels)
        if not self._acts(i, len(denoised)):
            return self._relaxed(i, x, candidate)
        r, _ = split_step(levels[i], levels[i + 1])
        return self._aligned(i, x, r, [(d, 0.0) for d in denoised], [(candidate, 1.0), (x, -r)])

    def _check(self, x: Tensor, levels: Levels) -> None:
        own = self.calibration.levels
        if levels is not own and levels.levels != own.levels:
            raise ValueError("levels: not those of the calibration; sample on calibration.levels")
        if tuple(x.shape[1:]) != self.calibration.shape:
            raise ValueError(f"x: samples of shape {tuple(x.shape[1:])}, calibrated for {self.calibration.shape}")

    def _acts(self, i: int, denoised: int) -> bool:
        """Whether step i is corrected, with so many denoised images at hand."""
        tau = self.calibration.tau[i]
        return bool(self.calibration.rho[i]) and denoised > (len(tau) if tau else -1)

    def _relaxed(self, i: int, x: Tensor, candidate: Tensor) -> Tensor:
        gamma = self.calibration.gamma[i]
        return candidate if gamma == 1.0 else x.lerp(candidate, gamma)

    def _aligned(self, i: int, x: Tensor, r: float, denoised: Sequence[Weighted], states: Sequence[Weighted]) -> Tensor:
        """The next state r x + ρ (T − r x) + b Σ_k τ_k ∇D_k, relaxed by γ; `denoised` newest first."""
        differenced = len(self.calibration.tau[i]) + 1 if self.calibration.tau[i] else 0
        used = [*denoised[:differenced], *(p for p in (*denoised[differenced:], *states) if p[1] != 0.0)]
        tensors, weights = zip(*used, strict=True)
        key = (i, weights, differenced, x.device, x.dtype)
        if key not in self._factors:
            self._factors[key] = self._bands(i, weights, differenced).to(x.device, x.dtype)
        basis = self.calibration.basis
        with torch.autocast(x.device.type, enabled=False):  # the host's is meant for its network, not for the state
            coefficients = basis.forward(torch.cat(tensors)).unflatten(0, (len(tensors), len(x)))
            moved = basis.inverse((coefficients * self._factors[key]).sum(0))
        return self._relaxed(i, x, moved.add_(x, alpha=r))

    def _bands(self, i: int, weights: Sequence[float], differenced: int) -> Tensor:
        """What every coefficient of every tensor is multiplied with, `(tensors, 1, *)`: ρ w, and b τ for ∇D's two."""
        _, b = split_step(self.calibration.levels[i], self.calibration.levels[i + 1])
        rho = torch.tensor(self.calibration.rho[i], dtype=torch.float64)
        rows = [w * rho for w in weights]
        for k, tau in enumerate(self.calibration.tau[i]):
            change = b * torch.tensor(tau, dtype=torch.float64)
            rows[k] = rows[k] + change
            rows[k + 1] = rows[k + 1] - change
        return torch.stack([self.calibration.basis.spread(row) for row in rows]).unsqueeze(1)
