r"""DPM-Solver-v3: the parameterisation of the ODE is itself fitted, per dimension, to statistics of the model.

With y = x/α the ODE is y' = −l y − f in λ, f = (σ ε − l x)/α = (1 − l) x/α − D, for any l(λ). Then f' is predicted
from f: g = e^{−∫s} f − ∫ e^{−∫s} b is constant where f' = s f + b. The authors choose, for every λ and dimension,

    l = E[diag(σ ∂ε/∂x)] = 1 − α E[diag J],        (s, b) = least squares of f' on f over samples,

and expand g in λ. Integrals of l, s, b are taken numerically. (l, s, b) = (1, 0, 0) expands D (DPM-Solver++, exact
exponential form), (0, −1, 0) expands ε (DPM-Solver). On Gaussian data f does not depend on x: one step is exact.

The authors' statistics come from noised real data; here from the model's own fine trajectory, whose states have the
same marginals, so that f' along the ODE is a difference of neighbours and needs no derivative. l needs one pull-back.
The coefficients are tensors, which the tables of `steindiff.solvers` do not hold: hence a sampler of its own.
Not included: the authors' half-corrector for guided models.

References:
    DPM-Solver-v3: Improved Diffusion ODE Solver with Empirical Model Statistics (Zheng et al., 2023), arXiv:2310.13268.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from steindiff.denoisers import Denoiser
from steindiff.levels import Level, Levels
from steindiff.probes.hutchinson import pullback
from steindiff.reference import Trajectory

NODES = 64
"""Intervals of the quadrature in one step; even, for Simpson's rule."""


@dataclass(frozen=True)
class ModelStatistics:
    """l, s and b, each `(K, *)` float64, at increasing half log-SNR `lams`, `(K,)`; linear between, constant beyond."""

    lams: Tensor
    l: Tensor  # noqa: E741, the paper's name
    s: Tensor
    b: Tensor

    def at(self, lam: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(l, s, b), each `(M, *)`, at `lam`, `(M,)`."""
        if len(self.lams) == 1:
            index = torch.zeros_like(lam, dtype=torch.int64)
            return self.l[index], self.s[index], self.b[index]
        i = torch.searchsorted(self.lams, lam).clamp(1, len(self.lams) - 1)
        share = ((lam - self.lams[i - 1]) / (self.lams[i] - self.lams[i - 1])).clamp(0, 1)
        share = share.reshape(-1, *[1] * (self.l.ndim - 1))
        l, s, b = (torch.lerp(v[i - 1], v[i], share) for v in (self.l, self.s, self.b))  # noqa: E741
        return l, s, b

    @classmethod
    def constant(cls, l: float, s: float, b: float, shape: Sequence[int] = (1,)) -> ModelStatistics:  # noqa: E741
        """The same everywhere."""
        l_, s_, b_ = (torch.full((1, *shape), v, dtype=torch.float64) for v in (l, s, b))
        return cls(torch.zeros(1, dtype=torch.float64), l_, s_, b_)


@torch.no_grad()
def gain_diagonal(denoiser: Denoiser, x: Tensor, level: Level, probes: int, seed: int) -> Tensor:
    """E[diag ∂D/∂x] over the samples `x`, `(N, *)`, by Rademacher probes: `(*)` float64."""
    generator = torch.Generator().manual_seed(seed)
    _, pull = pullback(lambda z: denoiser(z, level), x)
    total = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
    for _ in range(probes):
        v = (2 * torch.randint(2, x.shape, generator=generator) - 1).to(x)
        total += (v * pull(v)).double().mean(0)
    return total / probes


def slopes(lams: Tensor, values: Tensor) -> Tensor:
    """D values/dλ at every λ, second order inside, `(K, *)`."""
    return torch.gradient(values, spacing=(lams,), dim=0)[0]


@torch.no_grad()
def measure(
    denoisers: Callable[[slice], Denoiser], path: Trajectory, batch: int, device: str = "cpu", probes: int = 1
) -> ModelStatistics:
    """Statistics along a fine trajectory that starts and ends at finite log-SNR.

    Args:
        denoisers: the denoiser of a part of the trajectory's samples.
        path: the trajectory.
        batch: samples in a network call.
        device: where to run the network.
        probes: pull-backs for each sample and level.
    """
    levels = path.levels[: len(path.denoised)]
    lams = torch.tensor([level.lam for level in levels], dtype=torch.float64)
    count = len(path.states[0])
    parts = [slice(k, min(k + batch, count)) for k in range(0, count, batch)]
    l = []  # noqa: E741
    for i, level in enumerate(levels):
        gain = torch.zeros(path.states[0].shape[1:], dtype=torch.float64)
        for k, part in enumerate(parts):
            x = path.states[i][part].to(device)
            found = gain_diagonal(denoisers(part), x, level, probes, i * len(parts) + k)
            gain += found.cpu() * (part.stop - part.start) / count
        l.append(1.0 - level.alpha * gain)
    kept = torch.stack(l)
    sums = torch.zeros(4, *kept.shape, dtype=torch.float64)  # of f, f', f², f f'
    for part in parts:
        f = torch.stack(
            [
                (1.0 - kept[i]) / level.alpha * path.states[i][part].double() - path.denoised[i][part].double()
                for i, level in enumerate(levels)
            ]
        )
        df = slopes(lams, f)
        sums += torch.stack([f.sum(1), df.sum(1), f.square().sum(1), (f * df).sum(1)])
    mean, slope, square, cross = sums / count
    spread = square - mean.square()
    certain = spread > 1e-12 * (1.0 + square)
    s = torch.where(certain, (cross - mean * slope) / spread.clamp(min=1e-12), torch.zeros_like(spread))
    return ModelStatistics(lams, kept, s, slope - s * mean)


@dataclass(frozen=True)
class Weights:
    """x_t = x · state + constant + Σ_k f_k · past_k, all `(*)`: f_0 at s, f_1, … before it; a target's f comes last."""

    state: Tensor
    constant: Tensor
    past: tuple[Tensor, ...]


@dataclass(frozen=True)
class DPMSolverV3:
    """The sampler on given levels, which must end above σ = 0.

    Args:
        statistics: of the model.
        levels: of the run; n steps cost n evaluations.
        order: points that the predictor's polynomial goes through, at most.
        corrector: correct with the evaluation at the predicted state, which the next step needs anyway.
        pseudo: estimate every derivative from as few points as it needs, the authors' choice for few steps.
    """

    statistics: ModelStatistics
    levels: Levels
    order: int = 3
    corrector: bool = True
    pseudo: bool = False

    def __post_init__(self) -> None:
        if self.levels[-1].sigma == 0.0 or self.levels[0].alpha == 0.0:
            raise ValueError("levels must have finite log-SNR: use a grid with to_zero=False")

    @cached_property
    def _lams(self) -> list[float]:
        return [level.lam for level in self.levels]

    @cached_property
    def _primitives(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """λ, `(M,)`, at all nodes of all steps, and ∫l, ∫s and ∫ e^{−∫s} b from the first, each `(M, *)`."""
        steps = [torch.linspace(a, b, NODES + 1, dtype=torch.float64) for a, b in pairwise(self._lams)]
        lams = torch.cat([steps[0], *(step[1:] for step in steps[1:])])
        l, s, b = self.statistics.at(lams)  # noqa: E741

        def primitive(values: Tensor) -> Tensor:
            widths = lams.diff().reshape(-1, *[1] * (values.ndim - 1))
            parts = 0.5 * widths * (values[1:] + values[:-1])
            return torch.cat([torch.zeros_like(values[:1]), parts.cumsum(0)])

        big_s = primitive(s)
        return lams, primitive(l), big_s, primitive((-big_s).exp() * b)

    def weights(self, i: int, *, corrected: bool, order: int) -> Weights:
        """Of step i, with the polynomial through `order` points: the target if `corrected`, s, and those before."""
        lams, big_l, big_s, big_b = self._primitives
        here, there = i * NODES, (i + 1) * NODES
        u = lams[here : there + 1] - lams[here]
        growth = (big_l[here : there + 1] - big_l[here] + big_s[here : there + 1] - big_s[here]).exp()
        offset = big_s[here].exp() * (big_b - big_b[here])  # B relative to s, at every node
        simpson = torch.full((NODES + 1,), 2.0, dtype=torch.float64)
        simpson[1::2], simpson[0], simpson[-1] = 4.0, 1.0, 1.0
        simpson = simpson * (u[-1] / NODES / 3.0)

        def integral(values: Tensor) -> Tensor:
            return torch.tensordot(simpson, values, dims=1)

        points = [i - k for k in range(order - corrected)] + [i + 1] * corrected
        nodes = [self._lams[k] - self._lams[i] for k in points]
        moments = [integral(growth * (u**k).reshape(-1, *[1] * (growth.ndim - 1))) for k in range(len(points))]
        past, constant = [], -integral(growth * offset[here : there + 1])
        for k, polynomial in enumerate(self._basis(nodes, pseudo=self.pseudo and not corrected)):
            weight = sum(c * moment for c, moment in zip(polynomial, moments, strict=True))
            node = points[k] * NODES
            constant = constant + weight * offset[node]
            past.append(-weight * (big_s[here] - big_s[node]).exp())
        shrink = self.levels[i + 1].alpha * (big_l[here] - big_l[there]).exp()
        return Weights(shrink / self.levels[i].alpha, shrink * constant, tuple(shrink * w for w in past))

    @staticmethod
    def _basis(nodes: list[float], *, pseudo: bool) -> list[list[float]]:
        """Coefficients, lowest power first, of what every point's value contributes to the polynomial in λ − λ_s."""
        size = len(nodes)
        rows = torch.zeros(size, size, dtype=torch.float64)
        if not pseudo:
            return torch.tensor([[n**k for k in range(size)] for n in nodes], dtype=torch.float64).inverse().T.tolist()
        for k in range(size):  # the k-th divided difference, alone, is the coefficient of the k-th power
            for j in range(k + 1):
                others = [nodes[j] - nodes[m] for m in range(k + 1) if m != j]
                rows[j, k] = 1.0 / float(torch.tensor(others, dtype=torch.float64).prod())
        return rows.tolist()

    @cached_property
    def plan(self) -> list[tuple[Tensor, Weights, Weights | None]]:
        """Of every step: l at its start, and the weights of predictor and, but for the last step, corrector."""
        l, _, _ = self.statistics.at(torch.tensor(self._lams, dtype=torch.float64))  # noqa: E741
        rows: list[tuple[Tensor, Weights, Weights | None]] = []
        for i in range(self.levels.steps):
            order, corrected = min(self.order, i + 1), self.corrector and i + 1 < self.levels.steps
            predictor = self.weights(i, corrected=False, order=order)
            corrector = self.weights(i, corrected=True, order=max(order, 2)) if corrected else None
            rows.append((l[i], predictor, corrector))
        return rows

    @torch.no_grad()
    def __call__(self, denoiser: Denoiser, x: Tensor) -> Tensor:
        """Carry the states `x`, `(B, *)`, to the last level."""

        def evaluate(z: Tensor, i: int) -> Tensor:
            l, level = self.plan[i][0], self.levels[i]  # noqa: E741
            return ((1.0 - l) / level.alpha).to(z) * z - denoiser(z, level)

        def combined(weights: Weights, values: Sequence[Tensor]) -> Tensor:
            terms = (w.to(x) * f for w, f in zip(weights.past, values, strict=True))
            return weights.state.to(x) * x + weights.constant.to(x) + sum(terms)

        history = [evaluate(x, 0)]
        for i, (_, predictor, corrector) in enumerate(self.plan):
            ahead = combined(predictor, history[: len(predictor.past)])
            if i + 1 == self.levels.steps:
                return ahead
            target = evaluate(ahead, i + 1)
            x = ahead if corrector is None else combined(corrector, [*history[: len(corrector.past) - 1], target])
            history = [target, *history][: self.order]
        raise AssertionError("a run has at least one step")
