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
        restarted: the weights of this step in runs that begin at level 1, 2, …, as img2img does; see `with_restarts`.
    """

    rho: tuple[float, ...] = ()
    tau: tuple[tuple[float, ...], ...] = ()
    error: tuple[float, ...] = ()
    gamma: float = 1.0
    restarted: tuple[StepWeights, ...] = ()

    def check(self, name: str, bands: int) -> None:
        """Refuse weights that do not fit a basis of `bands` bands."""
        rows = {"rho": self.rho, "error": self.error, **{f"tau[{k}]": row for k, row in enumerate(self.tau)}}
        for label, row in rows.items():
            if (row or label.startswith("tau")) and (len(row) != bands or not all(map(math.isfinite, row))):
                raise ValueError(f"{name}.{label} must hold {bands} finite numbers, got {len(row)}")
        if self.tau and not self.rho:
            raise ValueError(f"{name}.tau needs a rho beside it")
        if not math.isfinite(self.gamma):
            raise ValueError(f"{name}.gamma must be finite, got {self.gamma}")
        for k, weights in enumerate(self.restarted):
            weights.check(f"{name}.restarted[{k}]", bands)
            if weights.restarted:
                raise ValueError(f"{name}.restarted[{k}] must have no restarted weights of its own")


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
            if len(weights.restarted) > i:
                raise ValueError(f"steps[{i}].restarted must hold at most {i} entries, got {len(weights.restarted)}")

    @property
    def memory(self) -> int:
        return 1 + max(len(weights.tau) for weights in self.steps)

    def weights(self, i: int, start: int = 0) -> StepWeights:
        """The weights of step i in a run that began at level `start`."""
        restarted = self.steps[i].restarted
        return restarted[start - 1] if 1 <= start <= len(restarted) else self.steps[i]

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        self._check(x, levels)
        weights = self.steps[i]
        if step.tableau != self.solver.tableau(levels, i):
            raise ValueError(f"solver must be the one the steps were fitted with, {self.solver!r}")
        stages, row = step.tableau
        if not acts(weights, len(stages) + len(step.history)):
            candidate, evaluations = step(x)
            return Transition(relaxed(weights, x, candidate), evaluations)
        # The row of T is part of the sum below; HERE keeps the step from forming it as well.
        _, evaluations = replace(step, tableau=step.tableau._replace(output=HERE))(x)
        past = [*row.past, *[(0.0, 0.0)] * (len(step.history) - len(row.past))]
        now = [*row.d, *[0.0] * (len(stages) - len(row.d))]
        r, _ = linear(levels[i], levels[i + 1])
        states = [(x, 0.0 if math.isclose(row.x, r, rel_tol=1e-9) else row.x - r)]
        states += [(e.x, u) for e, (u, _) in zip(step.history, past, strict=True)]
        parts = [*reversed(now), *(v for _, v in past)]
        denoised = list(zip(latest(evaluations, step.history), parts, strict=True))
        return Transition(self._aligned(weights, i, x, denoised, states), evaluations)

    def apply(
        self, i: int, x: Tensor, candidate: Tensor, levels: Levels, denoised: Sequence[Tensor] = (), start: int = 0
    ) -> Tensor:
        """The next state from a state, the solver's candidate for it and the latest denoised images, all `(B, *)`.

        For hosts that run the solver themselves and vouch that it is this one.

        Args:
            i: the step.
            x: the state.
            candidate: the solver's T(x).
            levels: of the run.
            denoised: newest first. Where there are fewer than the step was fitted with (a run that begins in the
                middle, without weights of its own), ρ and τ do not belong together, and the candidate stands.
            start: the level the run began at: 0, or a later one, as in img2img.
        """
        self._check(x, levels)
        weights = self.weights(i, start)
        if not acts(weights, len(denoised)):
            return relaxed(weights, x, candidate)
        r, _ = linear(levels[i], levels[i + 1])
        return self._aligned(weights, i, x, [(d, 0.0) for d in denoised], [(candidate, 1.0), (x, -r)])

    def _check(self, x: Tensor, levels: Levels) -> None:
        if levels is not self.levels and levels.levels != self.levels.levels:
            raise ValueError("levels must be those of the calibration; sample on calibration.levels")
        if tuple(x.shape[1:]) != self.basis.shape:
            raise ValueError(f"x must hold samples of shape {self.basis.shape}, got {tuple(x.shape[1:])}")

    def _aligned(
        self, step: StepWeights, i: int, x: Tensor, denoised: Sequence[Weighted], states: Sequence[Weighted]
    ) -> Tensor:
        """The next state r x + ρ (T − r x) + b Σ_k τ_k ∇D_k, relaxed by γ; `denoised` newest first."""
        differenced = len(step.tau) + 1 if step.tau else 0
        used = [*denoised[:differenced], *(p for p in (*denoised[differenced:], *states) if p[1] != 0.0)]
        tensors, weights = zip(*used, strict=True)
        key = (i, id(step), weights, x.device, x.dtype)
        with torch.inference_mode(False):  # a factor made in a host's inference mode could never meet a gradient
            if key not in self._factors:
                self._factors[key] = self._bands(step, i, weights).to(x.device, x.dtype)
        with torch.autocast(x.device.type, enabled=False):  # the host's is meant for its network, not for the state
            coefficients = self.basis.forward(torch.cat(tensors)).unflatten(0, (len(tensors), len(x)))
            moved = self.basis.inverse((coefficients * self._factors[key]).sum(0))
        r, _ = linear(self.levels[i], self.levels[i + 1])
        return relaxed(step, x, moved.add_(x, alpha=r))

    def _bands(self, step: StepWeights, i: int, weights: Sequence[float]) -> Tensor:
        """What every coefficient of every tensor is multiplied with, `(tensors, 1, *)`: ρ w, and b τ for ∇D's two."""
        _, b = linear(self.levels[i], self.levels[i + 1])
        rho = torch.tensor(step.rho, dtype=torch.float64)
        rows = [w * rho for w in weights]
        for k, tau in enumerate(step.tau):
            change = b * torch.tensor(tau, dtype=torch.float64)
            rows[k] = rows[k] + change
            rows[k + 1] = rows[k + 1] - change
        return torch.stack([self.basis.spread(row) for row in rows]).unsqueeze(1)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_factors": {}}


def acts(weights: StepWeights, denoised: int) -> bool:
    """Whether a step is corrected, with that many denoised images at hand."""
    return bool(weights.rho) and denoised > (len(weights.tau) if weights.tau else -1)


def relaxed(weights: StepWeights, x: Tensor, candidate: Tensor) -> Tensor:
    """(1 − γ) x + γ T; the candidate itself where γ = 1."""
    return candidate if weights.gamma == 1.0 else x.lerp(candidate, weights.gamma)
