r"""Stein alignment: lead a coarse step where the model's own fine trajectory goes, band by band.

Write any step as T = r x + b D̄ with r = σ_t/σ_s, b = α_t − r α_s; D̄ is the solver's effective denoised image. What a
coarse solver gets wrong about D̄ it gets wrong for all samples in the same way: too little of the latest change of D,
and less the finer the detail. So D̄_f is replaced, in every band f of an orthonormal basis, by

    ρ_f D̄_f + Σ_k τ_{k,f} ∇D_{k,f},        ∇D_k = D_{(k−1)} − D_{(k)},

with D_(0), D_(1), … the latest denoised images, newest first. No evaluation is added: the solver made them all.

*Alignment.* ρ and τ are the least-squares fit, over samples, of the G with y = r x + b G, y the state of the same seed
on the fine trajectory at the next level. Samples are weighted by 1/(|G_f|² + tail · E|G_f|²): band energies of images
are heavy-tailed, and without weights a few busy images decide for all.

*Balance.* A least-squares fit is too smooth by what it could not explain. One factor for ρ and τ together gives the
next state the energy of the fine trajectory's, E log|x_f|² = E log|y_f|², for the typical image, not for the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from steindiff.averages import mean, standard_error
from steindiff.bases import Basis
from steindiff.corrections.balance import split_step
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Level, Levels
from steindiff.tableau import Evaluation, Step

TINY = 1e-12
"""Energies below this count as it: their logarithms must stay finite."""


def latest(evaluations: Sequence[Evaluation], history: Sequence[Evaluation]) -> list[Tensor]:
    """The denoised images a correction may use, newest first: this step's, then those of earlier steps."""
    return [e.d for e in (*reversed(evaluations), *history)]


def differences(denoised: Sequence[Tensor], terms: int) -> list[Tensor]:
    """∇D_1, ∇D_2, …, at most `terms`, as many as there are images for, each `(B, *)`."""
    return [a - b for a, b in pairwise(denoised[: terms + 1])]


def significant(values: Tensor, errors: float) -> Tensor:
    """Which means of `values`, `(N, K)`, are more than so many standard errors from 0, `(K,)`."""
    return mean(values).abs() > errors * standard_error(values)


def weights_of(energy: Tensor, tail: float) -> Tensor:
    r"""How much every sample counts, by its band energies `(N, K)`: 1/(|y_f|² + tail · E|y_f|²)."""
    return 1.0 / (energy + tail * mean(energy) + TINY)


def mismatch(basis: Basis, x: Tensor, goal: Tensor, tail: float = 0.1) -> float:
    r"""How far `x` is from `goal`, both `(N, *)`: what alignment and balance could still correct, mean over bands.

    E[|x_f − y_f|²/(|y_f|² + tail · E|y_f|²)], the share of energy that is wrong, plus (E log|x_f|² − E log|y_f|²)², the
    square of what the typical image has too much or too little.
    """
    made, known = basis.forward(x), basis.forward(goal)
    energy, wanted = basis.average(made.square()), basis.average(known.square())
    error = mean(weights_of(wanted, tail) * basis.average((made - known).square()))
    gap = mean(energy.clamp(min=TINY).log() - wanted.clamp(min=TINY).log())
    return float((error + gap.square()).mean())


def fit(
    basis: Basis, features: Sequence[Tensor], goal: Tensor, *, tail: float, ridge: float, significance: float
) -> Tensor:
    r"""Weights w, `(k, K)`, of the features that come closest to the goal, band by band.

    Args:
        basis: whose coefficients all tensors are, `(N, *)`.
        features: the first is what stands if nothing can be gained: weights (1, 0, …).
        goal: what to reproduce.
        tail: samples count with weight 1/(|goal_f|² + tail · E|goal_f|²).
        ridge: pull towards (1, 0, …), as a part of every feature's own energy.
        significance: a band keeps (1, 0, …) unless its error falls by more than so many standard errors.
    """
    weight = weights_of(basis.average(goal.square()), tail)
    k = len(features)
    stay = torch.zeros(basis.bands, k, dtype=torch.float64, device=goal.device)
    stay[:, 0] = 1.0
    gram = stay.new_zeros(basis.bands, k, k)
    right = stay.new_zeros(basis.bands, k)
    for i, feature in enumerate(features):
        right[:, i] = mean(weight * basis.average(feature * goal))
        for j in range(i + 1):
            gram[:, i, j] = gram[:, j, i] = mean(weight * basis.average(feature * features[j]))
    pull = ridge * gram.diagonal(dim1=1, dim2=2) + TINY
    found = torch.linalg.solve(gram + torch.diag_embed(pull), right + pull * stay)
    before = weight * basis.average((goal - features[0]).square())
    after = weight * basis.average((goal - combine(basis, found.T, features)).square())
    gain = before - after
    gained = significant(gain, significance) & (mean(gain) > 0)
    return torch.where(gained[:, None], found, stay).T


def combine(basis: Basis, weights: Tensor, features: Sequence[Tensor]) -> Tensor:
    """Σ_k w_k ⊙ F_k, `(N, *)`, for weights `(k, K)` per band."""
    spread = [basis.spread(row).to(features[0].dtype) for row in weights]
    return torch.stack([w * f for w, f in zip(spread, features, strict=True)]).sum(0)


def typical_scale(still: Tensor, cross: Tensor, moved: Tensor, target: Tensor, bound: float) -> Tensor:
    r"""The s in [1/bound, bound] with E log(still + 2 s cross + s² moved) = E log target; all `(N, K)`, s `(K,)`.

    By bisection in log s; the energy |r x + s b P|² grows with s wherever P adds to the state.
    """
    low = torch.full_like(target[0], 1.0 / bound)
    high = torch.full_like(target[0], bound)
    wanted = mean(target.clamp(min=TINY).log())
    for _ in range(40):
        s = (low * high).sqrt()
        short = mean((still + 2.0 * s * cross + s.square() * moved).clamp(min=TINY).log()) < wanted
        low, high = torch.where(short, s, low), torch.where(short, high, s)
    return (low * high).sqrt()


@dataclass(frozen=True)
class Alignment(Correction):
    r"""ρ and τ fitted on the batch itself. Run it to calibrate; sample with `Replay`.

    Args:
        basis: orthonormal basis and its bands.
        target: the state of the same seeds on the fine trajectory, at any level, `(N, *)`.
        below: balance the energy of steps that end at σ_t/α_t <= below; alignment acts on all steps.
        bound: the energy factor is kept in [1/bound, bound].
        significance: a band is left alone unless the correction exceeds this many of its standard errors.
        terms: how many differences ∇D_k are used.
        tail: see `fit`.
        ridge: see `fit`.
    """

    basis: Basis
    target: Callable[[Level], Tensor]
    below: float = float("inf")
    bound: float = 4.0
    significance: float = 2.0
    terms: int = 2
    tail: float = 0.1
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in {"below": 0, "bound": 1, "significance": 0, "terms": 0, "tail": 0, "ridge": 0}.items():
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} = {value}: allowed are numbers >= {least}")
        for name in ("bound", "tail", "ridge"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{name} = inf: allowed are finite numbers")

    @property
    def memory(self) -> int:
        return self.terms + 1

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        s, t = levels[i], levels[i + 1]
        r, b = split_step(s, t)
        candidate, evaluations = step(x)
        forward = self.basis.forward
        state, goal = forward(x), forward(self.target(t).to(x))
        features = [(forward(candidate) - r * state) / b]
        features += [forward(d) for d in differences(latest(evaluations, step.history), self.terms)]
        weights = fit(
            self.basis,
            features,
            (goal - r * state) / b,
            tail=self.tail,
            ridge=self.ridge,
            significance=self.significance,
        )
        error = torch.zeros(self.basis.bands, dtype=torch.float64, device=x.device)
        if t.ratio <= self.below:
            scale, error = self.balance(r * state, b * combine(self.basis, weights, features), goal)
            weights = weights * scale
        aligned = self.basis.inverse(r * state + b * combine(self.basis, weights, features))
        rho, *tau = weights
        return Transition(aligned, evaluations, {"rho": rho, "tau": tau, "error": error})

    def balance(self, still: Tensor, moved: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of `moved` that gives still + moved the goal's typical energy, and its standard error, `(K,)`."""
        average = self.basis.average
        terms = average(still.square()), average(still * moved), average(moved.square())
        target = average(goal.square())
        scale = typical_scale(*terms, target, self.bound)
        made = (terms[0] + 2.0 * terms[1] + terms[2]).clamp(min=TINY)
        gap = made.log() - target.clamp(min=TINY).log()
        scale = torch.where(significant(gap, self.significance), scale, torch.ones_like(scale))
        # How fast E log energy answers to log s turns the spread of the gap into one of the factor.
        slope = mean((2.0 * terms[1] + 2.0 * terms[2]) / made).abs().clamp(min=TINY)
        return scale, scale * standard_error(gap) / slope
