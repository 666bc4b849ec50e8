r"""Stein alignment: lead a coarse step where the model's own fine trajectory goes, band by band.

Write any step as T = r x + b D̄ with r = σ_t/σ_s, b = α_t − r α_s; D̄ is the solver's effective denoised image. What a
coarse solver gets wrong about D̄ it gets wrong for all samples in the same way: too little of the latest change of D,
and less the finer the detail. So D̄_f is replaced, in every band f of an orthonormal basis, by

    ρ_f D̄_f + Σ_k τ_{k,f} ∇D_{k,f},        ∇D_k = D_{(k−1)} − D_{(k)},

with D_(0), D_(1), … the latest denoised images, newest first. No evaluation is added: the solver made them all.

*Alignment.* ρ and τ are the least-squares fit, over samples, of the G with y = r x + b G, y the state of the same seed
on the fine trajectory at the next level. Every tensor is split into the mean over samples of the same condition and the
deviation from it, Z = Z̄ + Z′, and

    w = argmin Σ ω (|κ G′ − Σ_k w_k F′_k|² + |Ḡ − Σ_k w_k F̄_k|²),        κ = 1.

Samples are weighted by ω = 1/(|G′_f|² + tail · E|G′_f|²): band energies of images are heavy-tailed, and without weights
a few busy images decide for all. Deviations, because a large mean or a strong condition would drown what varies.

*Balance.* A least-squares fit is too smooth by what it could not explain. The factor κ of the goal's deviations rises
until the next state varies as the fine trajectory's does, E log(|x′_f|² + t_f) = E log(|y′_f|² + t_f): the typical
image, not the mean one. t_f = E|y′_f|²/100: else in a band of one coefficient, such as a colour's mean, the sample
nearest to 0 would decide. Where nothing has a mean this is one factor for ρ and τ together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._distributed import gather, mean, standard_error
from steindiff.bases import Basis
from steindiff.corrections.base import Correction, Transition
from steindiff.levels import Level, Levels, linear
from steindiff.tableau import Step, latest

TINY = 1e-12
"""Energies below this count as it: their logarithms must stay finite."""
FAINT = 0.01
"""t_f over the mean energy of the band: what is added before a logarithm is taken."""


def differences(denoised: Sequence[Tensor], terms: int) -> list[Tensor]:
    """∇D_1, ∇D_2, …, at most `terms`, as many as there are images for, each `(B, *)`."""
    return [a - b for a, b in pairwise(denoised[: terms + 1])]


def significant(values: Tensor, errors: float) -> Tensor:
    """Which means of `values`, `(N, K)`, are more than that many standard errors from 0, `(K,)`."""
    return mean(values).abs() > errors * standard_error(values)


def weights_of(energy: Tensor, tail: float) -> Tensor:
    r"""How much every sample counts, by its band energies `(N, K)`: 1/(|y_f|² + tail · E|y_f|²)."""
    level = mean(energy)
    level = level.clamp(min=1e-8 * float(level.max()))  # a band that does not vary must not decide everything
    return 1.0 / (energy + tail * level + TINY)


@dataclass(frozen=True, eq=False)
class Groups:
    """Which samples share a condition: the group of each local sample, `(N,)` int64, and that of all (`whole`)."""

    index: Tensor
    whole: Tensor

    @classmethod
    def of(cls, labels: Sequence[Hashable], local: Sequence[int] | None = None) -> Groups:
        """Group samples by label, those whose label no other has as one; `local` are this process's."""
        times = Counter(labels)
        shared: list[Hashable] = [None if times[label] < 2 else (label,) for label in labels]
        if shared.count(None) == 1:  # nobody to deviate from: all are compared with all
            shared = [None] * len(labels)
        numbers = {label: k for k, label in enumerate(dict.fromkeys(shared))}
        whole = torch.tensor([numbers[label] for label in shared], dtype=torch.int64)
        return cls(whole if local is None else whole[torch.tensor(local, dtype=torch.int64)], whole)

    def means(self, values: Tensor) -> Tensor:
        """Every sample's group mean, `(N, *)`, of `values`, `(N, *)`; to the bit that of one process."""
        average, index = averaging(self, values.device)
        # One product, in one order on every device: sums by index are not, on a GPU.
        means = average @ gather(values).flatten(1).double()
        return means[index].reshape(values.shape).to(values.dtype)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must also serve where gradients are taken
def averaging(groups: Groups, device: torch.device) -> tuple[Tensor, Tensor]:
    """What all samples are averaged by, `(G, N)` float64, and the group of each local one, made once per device."""
    member = torch.nn.functional.one_hot(groups.whole).T.double()
    return (member / member.sum(1, keepdim=True)).to(device), groups.index.to(device)


def combine(basis: Basis, weights: Tensor, features: Sequence[Tensor]) -> Tensor:
    """Σ_k w_k ⊙ F_k, `(N, *)`, for weights `(k, K)` per band."""
    spread = [basis.spread(row).to(features[0].dtype) for row in weights]
    total = spread[0] * features[0]
    for w, feature in zip(spread[1:], features[1:], strict=True):
        total = total.addcmul(w.expand_as(feature), feature)
    return total


def typical_scale(still: Tensor, cross: Tensor, moved: Tensor, target: Tensor, bound: float) -> Tensor:
    r"""The s in [1/bound, bound] with E log(still + 2 s cross + s² moved) = E log target; all `(N, K)`, s `(K,)`.

    By Newton's method in u = log s, by bisection where it leaves the bracket: |A + s B|² grows with s wherever B adds
    to A. Where no root lies within the bounds, s is the nearer one.
    """
    still, cross, moved, target = map(gather, (still, cross, moved, target))  # all are here, and nobody waits again
    wanted = target.clamp(min=TINY).log().mean(0)

    def at(u: Tensor) -> tuple[Tensor, Tensor]:
        """E log energy − E log target, and its derivative by u."""
        s = u.exp()
        first, second = 2.0 * s * cross, s.square() * moved
        energy = (still + first + second).clamp(min=TINY)
        return energy.log().mean(0) - wanted, ((first + 2.0 * second) / energy).mean(0)

    u = torch.zeros_like(wanted)
    low, high = u - math.log(bound), u + math.log(bound)
    for _ in range(45):
        gap, slope = at(u)
        low, high = torch.where(gap < 0, u, low), torch.where(gap < 0, high, u)
        last, u = u, u - gap / slope
        u = torch.where((u >= low) & (u <= high), u, 0.5 * (low + high))
        if bool(((u - last).abs() < 1e-12).all()):
            break
    return u.exp()


class Fitted(NamedTuple):
    """Weights `(k, K)` of the features, and the standard errors `(K,)` of the energy factor they contain."""

    weights: Tensor
    error: Tensor


@dataclass(frozen=True)
class Alignment(Correction):
    r"""ρ and τ fitted on the batch itself. Run it to calibrate; sample with `Replay`.

    `ByAlignment` makes it, explains the other settings and checks them.

    Args:
        basis: orthonormal basis and its bands.
        target: the state of the same seeds on the fine trajectory, at any level, `(N, *)`.
        groups: which of the fitted samples share a condition.
        fitted: which samples the weights are fitted to, `(N,)` bool; the others are corrected with them. None: all.
    """

    basis: Basis
    target: Callable[[Level], Tensor]
    groups: Groups
    fitted: Tensor | None = None
    below: float = float("inf")
    bound: float = 4.0
    significance: float = 0.0
    terms: int = 3
    tail: float = 0.1
    ridge: float = 1e-3

    @property
    def memory(self) -> int:
        return self.terms + 1

    def __call__(self, step: Step, x: Tensor, levels: Levels, i: int) -> Transition:
        s, t = levels[i], levels[i + 1]
        r, b = linear(s, t)
        candidate, evaluations = step(x)
        forward = self.basis.forward
        state, goal = forward(x), forward(self.target(t).to(x))
        features = [(forward(candidate) - r * state) / b]
        features += [forward(d) for d in differences(latest(evaluations, step.history), self.terms)]
        rows = slice(None) if self.fitted is None else self.fitted.to(x.device)
        weights, error = self.fit([f[rows] for f in features], state[rows], goal[rows], s, t)
        aligned = self.basis.inverse(r * state + b * combine(self.basis, weights, features))
        rho, *tau = weights
        return Transition(aligned, evaluations, {"rho": rho, "tau": tau, "error": error})

    def fit(self, features: Sequence[Tensor], state: Tensor, goal: Tensor, s: Level, t: Level) -> Fitted:
        r"""Weights of the features, band by band, that lead `state` to `goal`, all coefficients `(N, *)`.

        The first feature is what stands if nothing can be gained: weights (1, 0, …).
        """
        r, b = linear(s, t)
        basis = self.basis
        groups = self.groups
        goal_mean = groups.means(goal)
        state_mean = groups.means(state)
        means = [groups.means(feature) for feature in features]
        parts = [feature - m for feature, m in zip(features, means, strict=True)]
        still = r * (state - state_mean)
        wanted, wanted_mean = (goal - goal_mean - still) / b, (goal_mean - r * state_mean) / b
        weight = weights_of(basis.average(wanted.square()), self.tail)
        k = len(features)
        stay = torch.zeros(basis.bands, k, dtype=torch.float64, device=goal.device)
        stay[:, 0] = 1.0
        gram = stay.new_zeros(basis.bands, k, k)
        varying, constant = stay.new_zeros(basis.bands, k), stay.new_zeros(basis.bands, k)
        for i in range(k):
            varying[:, i] = mean(weight * basis.average(parts[i] * wanted))
            constant[:, i] = mean(weight * basis.average(means[i] * wanted_mean))
            for j in range(i + 1):
                product = basis.average(parts[i] * parts[j]) + basis.average(means[i] * means[j])
                gram[:, i, j] = gram[:, j, i] = mean(weight * product)
        own = gram.diagonal(dim1=1, dim2=2)
        pull = (self.ridge + TINY) * own + TINY * own.sum(1, keepdim=True) + 1e-300
        sides = torch.stack([varying, constant + pull * stay], 2)
        solved = torch.linalg.solve(gram + torch.diag_embed(pull), sides)
        moving, fixed = solved[..., 0].T, solved[..., 1].T  # w = κ moving + fixed

        def misfit(weights: Tensor) -> Tensor:
            gap = basis.average((wanted - combine(basis, weights, parts)).square())
            return weight * (gap + basis.average((wanted_mean - combine(basis, weights, means)).square()))

        gain = misfit(stay.T) - misfit(moving + fixed)
        gained = significant(gain, self.significance) & (mean(gain) > 0)
        moving, fixed = torch.where(gained, moving, 0.0), torch.where(gained, fixed, stay.T)
        error = torch.zeros(basis.bands, dtype=torch.float64, device=goal.device)
        if t.ratio > self.below:
            return Fitted(moving + fixed, error)
        # A band that keeps the plain step is balanced by a factor of that step.
        moving, fixed = torch.where(gained, moving, stay.T), torch.where(gained, fixed, 0.0)
        base = still + b * combine(basis, fixed, parts)
        kappa, error = self.balance(base, b * combine(basis, moving, parts), goal - goal_mean)
        return Fitted(kappa * moving + fixed, error)

    def balance(self, still: Tensor, moved: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        """The factor of `moved` that gives still + moved the goal's typical energy, and its standard error, `(K,)`."""
        average = self.basis.average
        target = average(goal.square())
        faint = FAINT * mean(target)
        target = target + faint
        terms = average(still.square()) + faint, average(still * moved), average(moved.square())
        scale = typical_scale(*terms, target, self.bound)
        made = (terms[0] + 2.0 * terms[1] + terms[2]).clamp(min=TINY)
        gap = made.log() - target.clamp(min=TINY).log()
        scale = torch.where(significant(gap, self.significance), scale, torch.ones_like(scale))
        # How fast E log energy answers to log s turns the spread of the gap into one of the factor.
        slope = mean((2.0 * terms[1] + 2.0 * terms[2]) / made).abs().clamp(min=TINY)
        return scale, scale * standard_error(gap) / slope
