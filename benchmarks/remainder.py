"""What calibrated runs of few calls still lack, and whether anything at hand holds it.

    python benchmarks/remainder.py
    python benchmarks/comparison_tables.py    # the table of docs/comparison.md

Few-step images beside the fine trajectory's of the *same* seeds, by Inception's features: `features` is their root mean
square distance, `shift` the distance of the means of both sets; and PSNR. A run that ends where the fine trajectory
ends has 0, 0 and ∞. Seeds are those defaults are chosen by: two thirds are learned from, the others judge. Methods:

- `calibrated`: the default recipe, 64 seeds;
- `all differences`: at the same levels, fitted with as many differences as there are;
- `searched by features`: from there the search goes on by Inception's features in place of J. That trains on the
  measure, so it is no way to sample: it says what a better criterion of the search could gain;
- `convolutions`: four of them learn to lead the run's end to the fine one, from that end, the state before it and all
  denoised images, and get its typical energy: what a correction that is not linear could gain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from comparison import CHOICE_SEED, PREPARATION_SEED, load_model, sigmas
from recording import Records, machine, options
from steindiff import Calibration, Model, Recipe, calibrate, datasets, reference_run
from steindiff.calibrating import Budget, ByAlignment
from steindiff.images import to_uint8
from steindiff.levels import Levels
from steindiff.loop import StepInfo, sample
from steindiff.metrics.features import InceptionFeatures
from steindiff.metrics.scores import psnr
from steindiff.reference import ReferenceRun
from steindiff.search import Mismatch, Residuals, Search, Trials

BUDGETS = (3, 4, 5)
SOLVER = "dpmpp-2m"
SEEDS = 64
WIDTH = 48
"""Channels of the convolutions."""
ROUNDS, PATIENCE = 40, 5
"""They learn for so many passes at most, and stop after so many without gain on an eighth that is held back."""

Features = Callable[[Tensor], Tensor]
"""Images `(N, C, H, W)` in [−1, 1] to vectors `(N, F)`, smoothly."""


class ByFeatures:
    """The mean square distance of features to those of a goal, in the place of `search.Mismatch`."""

    def __init__(self, features: Features, goal: Tensor) -> None:
        self.features, self.known = features, features(goal)

    def residuals(self, x: Tensor) -> Residuals:
        """Residuals of ends `x`, `(N, *)`, whose squares add up to it."""
        errors = (self.features(x) - self.known) / math.sqrt(len(x))
        return Residuals(errors, errors.new_zeros(1, dtype=torch.float64))


class Ran(NamedTuple):
    """Runs of all seeds: their ends, `(N, C, H, W)`, and all that is known at the end, `(N, k C, H, W)`."""

    ends: Tensor
    known: Tensor


@dataclass
class Remainder:
    """A model, and what is measured of it.

    Args:
        model: what is sampled.
        features: to judge by.
        samples: how many seeds there are to learn from and to judge by.
        batch: samples in a call.
    """

    model: Model
    features: Features
    samples: int
    batch: int

    @property
    def recipe(self) -> Recipe:
        return Recipe(seeds=range(PREPARATION_SEED, PREPARATION_SEED + SEEDS))

    @property
    def learned(self) -> int:
        """How many seeds are learned from; the others judge."""
        return self.samples * 2 // 3

    @cached_property
    def reference(self) -> ReferenceRun:
        """What calibrations are fitted to."""
        return reference_run(self.model, self.recipe.seeds, batch=self.batch)

    @cached_property
    def fine(self) -> ReferenceRun:
        """The fine trajectories of the seeds to learn from and to judge by."""
        return reference_run(self.model, range(CHOICE_SEED, CHOICE_SEED + self.samples), batch=self.batch)

    @cached_property
    def wanted(self) -> Tensor:
        """Features of the fine ends that judge."""
        return self.features(rounded(self.fine.samples[self.learned :]))

    def judge(self, ends: Tensor) -> dict[str, float]:
        """All measures of the ends of the seeds that judge."""
        images, goal = rounded(ends[self.learned :]), rounded(self.fine.samples[self.learned :])
        gaps = (self.features(images) - self.wanted).double()
        found = {
            "features": float(gaps.square().sum(1).mean().sqrt()),
            "shift": float(gaps.mean(0).norm()),
            "psnr": psnr(images, goal),
        }
        return {name: round(value, 4) for name, value in found.items()}

    def run(self, calibration: Calibration) -> Ran:
        """Sample all seeds."""
        denoised: list[Tensor] = []

        def watch(info: StepInfo) -> None:
            assert info.denoised is not None, "the solver evaluates at every state"
            denoised.append(info.denoised.cpu())

        levels, fine = calibration.levels, self.fine
        x = self.model.noise(fine.seeds, levels[0]).to(self.model.device)
        correction = calibration.replay()
        result = sample(fine.denoiser(), x, levels, calibration.solver, correction, callback=watch, capture=True)
        before, end = (state.cpu() for state in result.trajectory[-2:])
        return Ran(end, torch.cat([end, before, *denoised], 1))

    def calibrated(self, nfe: int) -> Calibration:
        return calibrate(self.model, nfe, SOLVER, recipe=self.recipe, reference=self.reference)

    def refitted(self, made: Calibration, levels: Levels, fit: ByAlignment) -> Calibration:
        """The calibration at other levels, or with another fit."""
        reference = self.reference
        budget = Budget(reference, made.solver, made.nfe, replace(self.recipe, fit=fit))
        steps = budget.refit(levels, reference.denoiser())
        return replace(made, levels=levels, steps=steps)

    def searched(self, made: Calibration) -> Calibration:
        """The calibration, its search continued by features."""
        reference, fit = self.reference, ByAlignment()
        objective: Any = ByFeatures(self.features, reference.samples)
        correction = fit(reference, made.levels.steps)
        trials = Trials(reference, reference.denoiser(), made.solver, correction, objective)
        *_, best = Search().from_nearest(trials, trials(made.levels), [])
        return self.refitted(made, best[1].levels, fit)

    def convolved(self, ran: Ran) -> Tensor:
        """The ends, led on by convolutions that learned from some of the seeds."""
        goal = self.fine.samples
        scale = ran.known[: self.learned].std((0, 2, 3), keepdim=True)
        ends = led_on(ran.ends, ran.known / scale, goal, self.learned)
        basis, counted = self.fine.basis, self.fine.groups(range(self.learned).__contains__)
        objective = Mismatch(basis, goal[: self.learned], counted)
        coefficients = basis.forward(ends)
        factor = (-0.5 * objective.energies.gap(coefficients[: self.learned])).exp()
        return basis.inverse(coefficients * basis.spread(factor).to(ends.dtype))

    def records(self, nfe: int) -> list[dict[str, Any]]:
        """A record of every method at a budget."""
        made = self.calibrated(nfe)
        ran = self.run(made)
        found = [("calibrated", made, ran.ends), ("convolutions", made, self.convolved(ran))]
        for name, other in (
            ("all differences", self.refitted(made, made.levels, ByAlignment(terms=nfe - 1))),
            ("searched by features", self.searched(made)),
        ):
            found.append((name, other, self.run(other).ends))
        return [
            {
                "method": name,
                **self.judge(ends),
                "sigmas": sigmas(used.levels),
                "told": [round(level.told, 4) for level in used.levels[:-1]],
            }
            for name, used, ends in found
        ]


def rounded(x: Tensor) -> Tensor:
    """Images in [−1, 1] as they are stored, a byte a channel."""
    return to_uint8(x).float() / 127.5 - 1.0


@torch.random.fork_rng(devices=[])
def led_on(ends: Tensor, known: Tensor, goal: Tensor, learned: int) -> Tensor:
    """All ends, `(N, C, H, W)`, and what a small network adds that learned on the first ones to lead them to the goal.

    Of `known`, `(N, k C, H, W)`. What is kept is the best for the last eighth of the seeds learned from.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(known.shape[1], WIDTH, 3, padding=1), nn.SiLU()]
    for _ in range(2):
        layers += [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.SiLU()]
    network = nn.Sequential(*layers, nn.Conv2d(WIDTH, ends.shape[1], 3, padding=1))
    network[-1].weight.data.zero_()
    network[-1].bias.data.zero_()
    unit = float((goal - ends)[:learned].std())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    cut = learned * 7 // 8
    best, least, since = ends, float("inf"), 0
    for _ in range(ROUNDS):
        for rows in torch.randperm(cut).split(16):
            parts = [tensor[rows] for tensor in (ends, known, goal)]
            if torch.rand(()) < 0.5:
                parts = [tensor.flip(3) for tensor in parts]
            end, seen, wanted = parts
            loss = (end + unit * network(seen) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            made = torch.cat([e + unit * network(k) for e, k in zip(ends.split(64), known.split(64), strict=True)])
        error = float((made - goal)[cut:learned].square().mean())
        best, least, since = (made, error, 0) if error < least else (best, least, since + 1)
        if since == PATIENCE:
            break
    return best


def main() -> None:
    parser = options(__doc__, "remainder")
    parser.add_argument("--model", default="networks.strong:load", help="of the zoo, or module:function")
    parser.add_argument("--nfe", nargs="+", type=int, default=list(BUDGETS))
    parser.set_defaults(samples=768, batch=16)
    args = parser.parse_args()
    begun = time.monotonic()
    model = load_model(args.model, args.device, half=False, compiled=False)
    network = InceptionFeatures.load(args.inception or datasets.inception(), args.device, tf32=args.tf32)

    @torch.no_grad()
    def features(x: Tensor) -> Tensor:
        pixels = (x.clamp(-1.0, 1.0) + 1.0) * 127.5
        return torch.cat([network(part) for part in pixels.to(args.device).split(4)]).cpu()

    remainder = Remainder(model, features, args.samples, args.batch)
    records = Records(args.out)
    for nfe in args.nfe:
        identity = {"model": model.name, "solver": SOLVER, "nfe": nfe, "samples": args.samples, "seed": CHOICE_SEED}
        if identity in records or time.monotonic() - begun > args.seconds:
            continue
        cost = {"network_calls": nfe, "backward_passes": 0}
        for record in remainder.records(nfe):
            records.add({**identity, **record, **cost, **machine(args.device)})


if __name__ == "__main__":
    main()
