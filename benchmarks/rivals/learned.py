r"""Learned multistep solvers: weights, levels and told levels by back-propagation through the whole sampler.

The kind of S4S, GAS, LD3 and BNS, in one form: with y = x/α and ρ = σ/α,

    y_{i+1} = (ρ_{i+1}/ρ_i) y_i + (1 − ρ_{i+1}/ρ_i) Σ_{j ≤ i} w_ij D_j,     D_j = D(α_j y_j, level_j told λ_j + c_j),

every w_ij, every inner λ_i, the start and every c_i free, begun at any solver of one evaluation a step, and fitted to
the end of the model's own fine trajectory of the same seeds. Memory is what this costs: the graphs of all evaluations.

References:
    S4S: Solving for a Diffusion Model Solver (Frankel et al., 2025), arXiv:2502.17423;
    GAS: Improving Discretization of Diffusion ODEs via Generalized Adversarial Solver (2025), arXiv:2510.17699;
    Learning to Discretize Denoising Diffusion ODEs (Tong et al., 2025), arXiv:2405.15506;
    Bespoke Non-Stationary Solvers (Shaul et al., 2024), arXiv:2403.01329.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from steindiff.denoisers import Denoiser
from steindiff.denoisers.base import CountingDenoiser
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.schedules.base import Schedule
from steindiff.solvers.base import Solver

Loss = Callable[[Tensor, Tensor], Tensor]
"""Two sets of images, `(B, *)`, to a number."""

DIFFERENCE = 1e-3
"""Of λ, for the network's derivative by the level it is told."""


class _Counted(CountingDenoiser):
    """Answers its k-th evaluation with the k-th unit vector: a run then spells out the solver's weights."""

    def denoise(self, x: Tensor, level: Level) -> Tensor:
        return nn.functional.one_hot(torch.tensor([self.calls]), x.shape[1]).to(x)


def history_weights(solver: Solver, levels: Levels) -> Tensor:
    """w, `(n, n)` float64, lower triangular, of a solver that evaluates once a step at the state it visits.

    Raises:
        ValueError: if the solver spends another number of evaluations, or the first λ is not finite.
    """
    n = levels.steps
    if solver.calls(levels) != n or levels[0].alpha == 0.0:
        raise ValueError(f"solver must evaluate once a step, from a finite log-SNR, got {solver!r}")
    start = torch.zeros(1, n + 1, dtype=torch.float64)
    start[0, 0] = 1.0
    states = sample(_Counted(), start, levels, solver, capture=True).trajectory
    rows = torch.zeros(n, n, dtype=torch.float64)
    for i, (s, t) in enumerate(pairwise(levels)):
        r = t.ratio / s.ratio
        rows[i] = ((states[i + 1] / t.alpha - r * states[i] / s.alpha) / (1.0 - r))[0, 1:]
    return rows


class LearnedSolver(nn.Module):
    """The solver and its parameters.

    Args:
        solver: to begin with; one evaluation a step.
        levels: to begin with; the last one is kept.
    """

    def __init__(self, solver: Solver, levels: Levels) -> None:
        super().__init__()
        self.schedule: Schedule = levels.schedule
        self.last = levels[-1]
        lams = torch.tensor([level.lam for level in levels[:-1]], dtype=torch.float64)
        self.floor, self.ceiling = levels[0].lam, self.last.lam if self.last.sigma > 0 else lams[-1].item() + 1e3
        self.weight = nn.Parameter(history_weights(solver, levels))
        self.start = nn.Parameter(lams[:1].clone())
        self.gaps = nn.Parameter(lams.diff().log())
        self.told = nn.Parameter(torch.zeros_like(lams))

    def lams(self) -> Tensor:
        """λ of every evaluation, `(n,)`, increasing, below the last level's."""
        lams = torch.cat([self.start, self.start + self.gaps.exp().cumsum(0)])
        return lams.clamp(max=self.ceiling - 1e-3)

    def levels(self) -> Levels:
        """Where it steps now."""
        return Levels((*(self.schedule.at(lam) for lam in self.lams().tolist()), self.last), self.schedule)

    def begin(self, unit: Tensor) -> Tensor:
        """The first y, `(B, *)`, from unit noise."""
        return (-self.lams()[0]).exp().to(unit) * unit

    def forward(self, denoiser: Denoiser, y: Tensor, *, slope: bool = False) -> Tensor:
        """The samples of the states `y` = x/α, `(B, *)`; with `slope` differentiable by the levels, too.

        How D answers to the level it is told is a difference of two calls, so that any denoiser will do.
        """
        lams = self.lams()
        rho = torch.cat([(-lams).exp(), lams.new_tensor([self.last.ratio])])
        denoised: list[Tensor] = []
        for i, (lam, shift) in enumerate(zip(lams, self.told, strict=True)):

            def ask(z: Tensor, place: float, told: float) -> Tensor:
                level = self.schedule.at(place)
                asked = level._replace(t=self.schedule.time(told), told=math.exp(place - told))
                return denoiser(level.alpha * z, asked)

            place, told = lam.item(), (lam + shift).item()
            d = ask(y, place, told)
            if slope:
                with torch.no_grad():
                    moved = (ask(y, place + DIFFERENCE, told) - d) / DIFFERENCE
                    retold = (ask(y, place, told + DIFFERENCE) - d) / DIFFERENCE
                d = d + moved * (lam - place).to(y) + retold * (lam + shift - told).to(y)
            denoised.append(d)
            r = (rho[i + 1] / rho[i]).to(y)
            mixed = sum(w.to(y) * e for w, e in zip(self.weight[i, : i + 1], denoised, strict=True))
            y = r * y + (1.0 - r) * mixed
        return y


@dataclass(frozen=True)
class Training:
    """How to train.

    Args:
        iterations: steps of Adam.
        batch: samples in each.
        rate: learning rate of the weights; levels and told levels have a half of it. Cosine to 0.
        loss: default: mean square error.
    """

    iterations: int = 400
    batch: int = 64
    rate: float = 1e-2
    loss: Loss = nn.functional.mse_loss

    def __call__(
        self,
        learned: LearnedSolver,
        denoisers: Callable[[Sequence[int]], Denoiser],
        unit: Tensor,
        goal: Tensor,
        device: str = "cpu",
    ) -> list[float]:
        """Fit in place; returns the loss of every iteration.

        Args:
            learned: the solver.
            denoisers: the denoiser of the samples with the given places in `unit`.
            unit: unit noise, `(N, *)`.
            goal: where the fine trajectory of the same noise ends, x/α, `(N, *)`.
            device: where to run.
        """
        level_parameters = [learned.start, learned.gaps, learned.told]
        optimizer = torch.optim.Adam(
            [
                {"params": [learned.weight], "lr": self.rate},
                {"params": level_parameters, "lr": 0.5 * self.rate},
            ],
            betas=(0.9, 0.99),
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)
        generator, losses = torch.Generator().manual_seed(0), []
        for _ in range(self.iterations):
            rows = torch.randperm(len(unit), generator=generator)[: self.batch]
            y = learned.begin(unit[rows].to(device))
            loss = self.loss(learned(denoisers(rows.tolist()), y, slope=True), goal[rows].to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learned.parameters(), 1.0)
            optimizer.step()
            learned.start.data.clamp_(min=learned.floor)
            schedule.step()
            losses.append(float(loss.detach()))
        return losses
