r"""Replaying a calibration: no derivative, no extra network call, two cosine transforms a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from steindiff.bases import Basis
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Levels, linear
from steindiff.solvers.base import Solver
from steindiff.tableau import HERE, Step, latest

Weighted = tuple[Tensor, float]
"""A tensor `(B, *)` and its weight in the solver's own T − r x."""


@dataclass(frozen=True)
class StepWeights:
    r"""What was fitted for one step. Empty: the step is left alone.

    Attributes:
        rho: ρ, K weights of the solver's effective denoised image D̄, or none.
        tau: τ, for each difference ∇D_1, ∇D_2, … of the latest denoised images K weights.
        error: standard errors of the energy correction contained in `rho`, K of them or none.
        gamma: γ of the paper's relaxation; 1 leaves the step alone.
    """

    rho: tuple[float, ...] = ()
    tau: tuple[tuple[float, ...], ...] = ()
    error: tuple[float, ...] = ()
    gamma: float = 1.0

    def check(self, name: str, bands: int) -> None:
        """Refuse weights that do not fit a basis of `bands` bands."""
        for label, row in (
            ("rho", self.rho),
            ("error", self.error),
            *((f"tau[{k}]", r) for k, r in enumerate(self.tau)),
        ):
            if (row or label.startswith("tau")) and (len(row) != bands or not all(map(math.isfinite, row))):
                raise ValueError(f"{name}.{label} must hold {bands} finite numbers, got {len(row)}")
        if self.tau and not self.rho:
            raise ValueError(f"{name}.tau needs a rho beside it")
        if not math.isfinite(self.gamma):
            raise ValueError(f"{name}.gamma must be finite, got {self.gamma}")


@dataclass(frozen=True)
class Replay(Correction):
    r"""x_next = (1 − γ) x + γ (r x + b (ρ D̄ + Σ_k τ_k ∇D_k)), with γ, ρ and τ fitted for these very steps.

    The solver's b D̄ = T − r x is a sum of states and denoised images with the weights of its table, and ∇D_k are
    differences of denoised images: each tensor gets one factor per band, and all go through one transform and back
    through one. A sample depends on itself alone, never on its batch. Where γ = 1 and no ρ is given the candidate
    passes unchanged, so empty weights are the plain solver to the bit.

    Args:
        solver: whose steps were fitted; another one's are refused.
        levels: of the run; others are refused.
        basis: in which ρ and τ act.
        steps: one entry a step.
    """

    solver: Solver
    levels: Levels
    basis: Basis
    steps: tuple[StepWeights, ...]
    _factors: dict[object, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.steps) != self.levels.steps:
            raise ValueError(f"steps must hold {self.levels.steps} entries, one a step, got {len(self.steps)}")
        for i, weights in enumerate(self.steps):
            weights.check(f"steps[{i}]", self.basis.bands)

    @property
    def memory(self) -> int:
        return 1 + max(len(weights.tau) for weights in self.steps)

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        self._check(x, levels)
        if step.tableau != self.solver.tableau(levels, i):
            raise ValueError(f"solver must be the one the steps were fitted with, {self.solver!r}")
        stages, row = step.tableau
        if not self._acts(i, len(stages) + len(step.history)):
            candidate, evaluations = step(x)
            return Transition(self._relaxed(i, x, candidate), evaluations)
        # The row of T is part of the sum below; HERE keeps the step from forming it as well.
        _, evaluations = replace(step, tableau=step.tableau._replace(output=HERE))(x)
        past = [*row.past, *[(0.0, 0.0)] * (len(step.history) - len(row.past))]
        now = [*row.d, *[0.0] * (len(stages) - len(row.d))]
        r, _ = linear(levels[i], levels[i + 1])
        states = [(x, 0.0 if math.isclose(row.x, r, rel_tol=1e-9) else row.x - r)]
        states += [(e.x, u) for e, (u, _) in zip(step.history, past, strict=True)]
        weights = [*reversed(now), *(v for _, v in past)]
        denoised = list(zip(latest(evaluations, step.history), weights, strict=True))
        return Transition(self._aligned(i, x, r, denoised, states), evaluations)

    def apply(self, i: int, x: Tensor, candidate: Tensor, levels: Levels, denoised: Sequence[Tensor] = ()) -> Tensor:
        """The next state from a state, the solver's candidate for it and the latest denoised images, all `(B, *)`.

        For hosts that run the solver themselves and vouch that it is this one.

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
        r, _ = linear(levels[i], levels[i + 1])
        return self._aligned(i, x, r, [(d, 0.0) for d in denoised], [(candidate, 1.0), (x, -r)])

    def _check(self, x: Tensor, levels: Levels) -> None:
        if levels is not self.levels and levels.levels != self.levels.levels:
            raise ValueError("levels must be those of the calibration; sample on calibration.levels")
        if tuple(x.shape[1:]) != self.basis.shape:
            raise ValueError(f"x must hold samples of shape {self.basis.shape}, got {tuple(x.shape[1:])}")

    def _acts(self, i: int, denoised: int) -> bool:
        """Whether step i is corrected, with that many denoised images at hand."""
        weights = self.steps[i]
        return bool(weights.rho) and denoised > (len(weights.tau) if weights.tau else -1)

    def _relaxed(self, i: int, x: Tensor, candidate: Tensor) -> Tensor:
        gamma = self.steps[i].gamma
        return candidate if gamma == 1.0 else x.lerp(candidate, gamma)

    def _aligned(self, i: int, x: Tensor, r: float, denoised: Sequence[Weighted], states: Sequence[Weighted]) -> Tensor:
        """The next state r x + ρ (T − r x) + b Σ_k τ_k ∇D_k, relaxed by γ; `denoised` newest first."""
        tau = self.steps[i].tau
        differenced = len(tau) + 1 if tau else 0
        used = [*denoised[:differenced], *(p for p in (*denoised[differenced:], *states) if p[1] != 0.0)]
        tensors, weights = zip(*used, strict=True)
        key = (i, weights, differenced, x.device, x.dtype)
        with torch.inference_mode(False):  # a factor made in a host's inference mode could never meet a gradient
            if key not in self._factors:
                self._factors[key] = self._bands(i, weights, differenced).to(x.device, x.dtype)
        with torch.autocast(x.device.type, enabled=False):  # the host's is meant for its network, not for the state
            coefficients = self.basis.forward(torch.cat(tensors)).unflatten(0, (len(tensors), len(x)))
            moved = self.basis.inverse((coefficients * self._factors[key]).sum(0))
        return self._relaxed(i, x, moved.add_(x, alpha=r))

    def _bands(self, i: int, weights: Sequence[float], differenced: int) -> Tensor:
        """What every coefficient of every tensor is multiplied with, `(tensors, 1, *)`: ρ w, and b τ for ∇D's two."""
        _, b = linear(self.levels[i], self.levels[i + 1])
        rho = torch.tensor(self.steps[i].rho, dtype=torch.float64)
        rows = [w * rho for w in weights]
        for k, tau in enumerate(self.steps[i].tau):
            change = b * torch.tensor(tau, dtype=torch.float64)
            rows[k] = rows[k] + change
            rows[k + 1] = rows[k + 1] - change
        return torch.stack([self.basis.spread(row) for row in rows]).unsqueeze(1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_factors": {}}
