r"""Calibration: find once where to step, what to tell the network and how to correct each step; replay for free."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch

from steindiff._checks import at_least, number
from steindiff._distributed import all_reduce_sum
from steindiff._version import __version__
from steindiff.calibration import Calibration
from steindiff.corrections.alignment import Alignment
from steindiff.corrections.base import Correction, Plain
from steindiff.corrections.replay import StepWeights
from steindiff.denoisers.base import Denoiser
from steindiff.grids.base import Grid
from steindiff.grids.rules import Explicit, Karras, LogSNR, UniformTime
from steindiff.levels import Levels
from steindiff.loop import Cancelled, StepInfo, sample
from steindiff.model import SAME_MODEL, Model, fingerprint_gap
from steindiff.reference import STEPS, GaussianDensity, ReferenceRun, reference_run
from steindiff.sampler import levels_for
from steindiff.search import Mismatch, Probe, Search, Trial, Trials, resampled
from steindiff.solvers import SOLVERS, Solver

logger = logging.getLogger(__name__)

Chosen = Callable[[int], bool]
"""Which samples of a reference run count, by their places."""

Density = Callable[[ReferenceRun], Grid]
"""A grid that depends on the model."""

STARTS = ((2.0, 0.2), (1.2, 0.2), (1.2, 0.35))
"""Where a search may begin: at this many root energies of the strongest band, on a density with this exponent."""
LEAST_START = 3.0
"""No runs are told to begin below this many σ_data: there noise alone does not pass for a state."""
JUDGES = 3
"""Every third seed judges: no weight is fitted to it before it is known what to keep."""
FEW_STEPS = 5
"""Runs below this many steps are corrected with fewer differences."""
STEPS_EACH = 3
"""Steps of a fine trajectory for each evaluation of the runs it judges."""
SEARCHED = ("searched", "searched from another start")
"""What runs are called that a search found from the nearest starting point, or from others where that led nowhere."""
BETTER = 0.97
"""A calibration's mismatch must be below this share of the plain solver's to be kept."""


def judges(conditions: Sequence[Hashable]) -> frozenset[int]:
    """The places of the samples that judge: every third, so that every condition is on both sides.

    Where conditions are dealt out in threes that leaves some out; then it is every third sample of each.
    """
    places: dict[Hashable, list[int]] = {}
    for place, condition in enumerate(conditions):
        places.setdefault(condition, []).append(place)
    third = frozenset(range(JUDGES - 1, len(conditions), JUDGES))
    if all(0 < len(third.intersection(own)) < len(own) for own in places.values() if len(own) >= JUDGES):
        return third
    return frozenset(place for own in places.values() for place in own[JUDGES - 1 :: JUDGES])


class Progress(NamedTuple):
    """What a callback is told: what is being done, how much of it, and the smallest mismatch so far."""

    stage: str
    done: int
    total: int
    mismatch: float | None = None


@dataclass(frozen=True)
class ByAlignment:
    r"""Align with the model's own fine trajectory and match its typical energy; see `corrections.alignment`.

    Args:
        below: balance the energy of steps that end at σ/α <= below · σ_data; ∞ all.
        bound: keep the energy factor in [1/bound, bound].
        significance: leave a band alone unless the correction exceeds this many standard errors.
        terms: how many differences of the latest denoised images to use; None: one in runs below five steps, else 3.
        tail: weight of busy images in the fit; a large number (1e9) counts all alike.
        ridge: pull towards the plain step.
    """

    below: float = math.inf
    bound: float = 4.0
    significance: float = 0.0
    terms: int | None = None
    tail: float = 0.1
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        if self.terms is not None:
            at_least("terms", self.terms, 0)
        number("below", self.below, 0.0)
        number("significance", self.significance, 0.0)
        for name, least in (("bound", 1.0), ("tail", 0.0), ("ridge", 0.0)):
            number(name, getattr(self, name), least, 1e12)

    def __call__(self, reference: ReferenceRun, steps: int, fitted: Chosen | None = None) -> Correction:
        """The correction for runs of `steps` steps, fitted to some samples or all."""
        terms = (1 if steps < FEW_STEPS else 3) if self.terms is None else self.terms
        settings = asdict(replace(self, below=self.below * reference.sigma_data, terms=terms))
        groups = reference.groups() if fitted is None else reference.groups(fitted)
        rows = None if fitted is None else reference.rows(fitted)
        return Alignment(reference.basis, reference.trajectory, groups, rows, **settings)


Fits = Callable[..., Correction]
"""`ByAlignment`, or another map of a reference run, steps and the samples that count to a correction that says ρ, τ."""


@dataclass(frozen=True)
class Recipe:
    r"""How to calibrate.

    Args:
        seeds: of the calibration samples; use others than those you evaluate on.
        steps: of the fine trajectory; None: three for each evaluation, at least 24. A plain solver of 15 evaluations
            is as near to the limit as 24 steps are, and what is fitted to them cannot beat it.
        to_zero: whether runs end at σ = 0; None: where the schedule suggests.
        grid: where the search begins, or where to step if there is none: a density of the model's own, or any grid.
        fit: how to correct a step.
        search: how to search; None: step where `grid` says.
        rivals: plain grids the result must beat; one that wins is kept instead. Empty: no comparison is made.
    """

    seeds: Sequence[int] = range(10**6, 10**6 + 64)
    steps: int | None = None
    to_zero: bool | None = None
    grid: Density | Grid = field(default_factory=GaussianDensity)
    fit: Fits = field(default_factory=ByAlignment)
    search: Search | None = field(default_factory=Search)
    rivals: tuple[Grid, ...] = (LogSNR(), Karras(), UniformTime())

    def __post_init__(self) -> None:
        if self.steps is not None:
            at_least("steps", self.steps, 2)
        if self.search is not None and self.search.begins is not None and isinstance(self.grid, Explicit):
            raise ValueError(f"start must be True or False with an Explicit grid, got {self.search.start!r}")
        if self.search is not None and len(self.seeds) < JUDGES:
            raise ValueError(f"seeds must hold at least {JUDGES} to search and judge, got {len(self.seeds)}")

    def reference_steps(self, nfes: Iterable[int]) -> int:
        """Steps of a fine trajectory that serves all these budgets."""
        return self.steps or max([STEPS, *(STEPS_EACH * nfe for nfe in nfes)])


FEW_CALLS = Recipe(search=Search(start=0.75, probe=3.0, enough=0.0))
"""For three or four evaluations: begin at less noise, and count what the network still removes from an end.

Samples are nearer to the model's as a set, and less like its many-step samples of the same seeds. Other seeds:
`dataclasses.replace(FEW_CALLS, seeds=…)`.
"""


def calibrate(
    model: Model,
    nfe: int,
    solver: Solver | str = "dpmpp-2m",
    *,
    recipe: Recipe | None = None,
    reference: ReferenceRun | None = None,
    batch: int = 64,
    callback: Callable[[Progress], bool | None] | None = None,
) -> Calibration:
    r"""Calibrate a solver at a budget. Only forward passes are made, in batches of the size of sampling.

    The model is sampled with many small steps. Coarse runs of the same seeds are fitted to it, step by step
    in closed form, and where they step and what the network is told is searched. On seeds no weight was fitted to the
    result must end nearer to the fine trajectory than the plain solver on any of the usual grids; else that is kept.

    Args:
        model: what to calibrate.
        nfe: evaluations of a run.
        solver: a solver or its name.
        recipe: how; default `Recipe()`.
        reference: a fine trajectory made before, to be shared by several calibrations; its seeds are used.
        batch: samples in one network call, at most; a reference has its own.
        callback: told the progress; False stops the search and keeps the best so far (before it: raises `Cancelled`).
            So does Ctrl-C during the search.
    """
    made = calibrate_budgets(model, [nfe], solver, recipe=recipe, reference=reference, batch=batch, callback=callback)
    return made[nfe]


def calibrate_budgets(
    model: Model,
    nfes: Iterable[int],
    solver: Solver | str = "dpmpp-2m",
    *,
    recipe: Recipe | None = None,
    reference: ReferenceRun | None = None,
    batch: int = 64,
    callback: Callable[[Progress], bool | None] | None = None,
) -> dict[int, Calibration]:
    """Calibrate several budgets as `calibrate` does one, on one fine trajectory, each search begun near the last.

    Stopped, it returns those it has.
    """
    recipe = recipe or Recipe()
    solver = SOLVERS.resolve("solver", solver)
    nfes = sorted(set(nfes))
    for nfe in nfes:
        at_least("nfe", nfe, 1)
    if not isinstance(model, Model):
        raise TypeError(f"model must be a steindiff.Model, got {type(model).__name__}; wrap the denoiser in one")
    to_zero = recipe.to_zero if reference is None else reference.to_zero
    for nfe in nfes:  # before anything is spent
        levels_for(solver, LogSNR(to_zero=to_zero), model.schedule.finite_start(), nfe)
    known = model.fingerprint  # a network that cannot answer says so now
    if reference is not None and fingerprint_gap(reference.model.fingerprint, known) > SAME_MODEL:
        raise ValueError(
            f"reference must be of the model {model.name}, got one of {reference.model.name}; make it anew"
        )

    def step(info: StepInfo) -> bool | None:
        return None if callback is None else callback(Progress("reference", info.i + 1, info.steps))

    steps = recipe.reference_steps(nfes)
    if reference is None:
        reference = reference_run(model, recipe.seeds, steps=steps, to_zero=to_zero, batch=batch, callback=step)
    elif (taken := reference.trajectory.levels.steps) < steps:
        logger.warning(
            "the reference takes %d steps, and %d evaluations want %d: no calibration ends nearer to the limit than it",
            taken,
            max(nfes),
            steps,
        )
    made: dict[int, Calibration] = {}
    for nfe in nfes:
        near = made[max(made)].levels if made else None
        try:
            made[nfe] = Budget(reference, solver, nfe, recipe, callback).calibrate(near)
        except (Cancelled, KeyboardInterrupt):
            if not made:
                raise
            logger.warning("stopped: keeping the calibrations of %s evaluations", ", ".join(map(str, made)))
            break
        if made[nfe].provenance["stopped"]:
            break
    return made


class Stopped(Exception):
    """The callback asked to stop searching."""


class Found(NamedTuple):
    """A candidate: its trial, of which only the end is kept, and whether it is corrected."""

    trial: Trial
    corrected: bool


@dataclass
class Budget:
    """The calibration of one solver at one budget."""

    reference: ReferenceRun
    solver: Solver
    nfe: int
    recipe: Recipe
    callback: Callable[[Progress], bool | None] | None = None
    done: int = field(default=0, init=False)
    total: int = field(default=1, init=False)
    least: float | None = field(default=None, init=False)

    def levels(self, grid: Grid, start: float | None = None) -> Levels:
        """Levels on a grid, begun at `start` root energies of the strongest band, ended where the reference ended."""
        schedule = self.reference.model.schedule
        begun = schedule.finite_start()
        if start is not None:
            begun = begun.starting_at(max(start * self.reference.peak_band_rms, 4.0 * schedule.ratio_min))
        if grid.to_zero is None:
            grid = replace(grid, to_zero=self.reference.to_zero)  # type: ignore[type-var]
        return Levels(levels_for(self.solver, grid, begun, self.nfe).levels, schedule)

    @property
    def power(self) -> float:
        """How much bands count by their energy, also where nothing is searched."""
        return (self.recipe.search or Search()).power

    def told(self, mismatch: float) -> None:
        """Report a trial; stop where that is asked for."""
        self.done += 1
        self.least = mismatch if self.least is None else min(self.least, mismatch)
        if self.callback is not None:
            progress = Progress(f"{self.nfe} evaluations", self.done, max(self.done, self.total), self.least)
            if self.callback(progress) is False:
                raise Stopped

    def calibrate(self, near: Levels | None = None) -> Calibration:
        """Search, judge, and fit what is kept; `near` are levels found for another budget."""
        reference, recipe = self.reference, self.recipe
        device = reference.model.device
        denoiser = reference.denoiser()
        calls = denoiser.calls
        weight = recipe.search.probe if recipe.search else 0.0
        probe = Probe.of(reference, denoiser, weight) if weight else None
        judged_apart = bool(recipe.rivals or recipe.search) and len(reference.seeds) >= 2 * JUDGES
        apart = judges([reference.model.condition_of(seed) for seed in reference.seeds]) if judged_apart else None
        fitted = None if apart is None else lambda place: place not in apart
        stopped = False
        plain = Trials(reference, denoiser, self.solver, Plain(), self.objective(), self.told)
        starts = self.starting_points(near)
        searched_by = plain.objective if probe is None else self.objective(probe=probe)
        trials = replace(plain, correction=recipe.fit(reference, starts[0].steps, fitted), objective=searched_by)
        self.total = len(starts) + len(recipe.rivals)
        self.total += recipe.search.trials(self.solver, starts[0]) if recipe.search else 0
        found: dict[str, Found] = {}
        try:
            for grid in recipe.rivals:
                name = f"plain, {type(grid).__name__}"
                found[f"plain, {grid!r}" if name in found else name] = Found(plain(self.levels(grid)).ended(), False)
            unsearched = trials(starts[0])
            found["unsearched"] = Found(unsearched.ended(), True)
            if recipe.search is not None:
                for place, better in recipe.search.from_nearest(trials, unsearched, starts[1:]):
                    found[SEARCHED[place > 0]] = Found(better.ended(), True)
        except (KeyboardInterrupt, Stopped):
            if not any(candidate.corrected for candidate in found.values()):
                raise Cancelled("stopped before the first calibrated run; there is nothing to keep") from None
            stopped = True
            logger.warning("stopped: keeping the best of %d trials", self.done)
        name, judged = self.judge(found, None if apart is None else apart.__contains__, probe)
        kept = found[name]
        steps: tuple[StepWeights, ...] = (StepWeights(),) * kept.trial.levels.steps
        if kept.corrected:
            steps = self.refit(kept.trial.levels, denoiser)
        spent = denoiser.calls - calls
        return Calibration(
            solver=self.solver,
            levels=kept.trial.levels,
            basis=reference.basis,
            steps=steps,
            fingerprint=reference.model.fingerprint,
            conditions=dict(reference.model.conditions),
            provenance={
                "model": reference.model.name,
                "seeds": [reference.seeds[0], len(reference.seeds)],
                "reference_steps": reference.trajectory.levels.steps,
                "kept": name,
                "mismatch": {name: float(f"{j:.4g}") if math.isfinite(j) else None for name, j in judged.items()},
                "fit": repr(recipe.fit),
                "search": repr(recipe.search),
                "trials": self.done,
                "stopped": stopped,
                "network_calls": reference.network_calls + int(all_reduce_sum(torch.tensor(spent))),
                "backward_passes": 0,
                "device": str(device),
                "steindiff": __version__,
                "torch": str(torch.__version__),
            },
        )

    def starting_points(self, near: Levels | None) -> list[Levels]:
        """Where a search may begin; the first is where an unsearched calibration steps."""
        grid, begins = self.recipe.grid, self.recipe.search.begins if self.recipe.search else None
        if begins is not None:
            begins = max(begins, LEAST_START * self.reference.sigma_data / self.reference.peak_band_rms)
        if isinstance(grid, Grid):
            return [self.levels(grid, begins)]
        first = self.levels(grid(self.reference), begins)
        if self.recipe.search is None:
            return [first]
        found = [first] if near is None else [first, resampled(near, first.steps)]
        if self.recipe.search.start is True:
            found += [self.levels(GaussianDensity(power)(self.reference), start) for start, power in STARTS]
        return list(dict.fromkeys(found))

    def objective(self, counted: Chosen | None = None, probe: Probe | None = None) -> Mismatch:
        """J of the ends of all samples, by those that are counted; None: all."""
        reference = self.reference
        goal = reference.samples.to(reference.model.device)
        if counted is None:
            return Mismatch(reference.basis, goal, reference.groups(), self.power, probe=probe)
        rows, groups = reference.rows(counted), reference.groups(counted)
        return Mismatch(reference.basis, goal, groups, self.power, rows=rows, probe=probe)

    def judge(
        self, found: Mapping[str, Found], counted: Chosen | None, probe: Probe | None
    ) -> tuple[str, dict[str, float]]:
        """Which candidate to keep, by J of samples nothing was fitted to, and that J of every candidate.

        A probe helps to choose among what it was searched with. That a plain run is beaten is for the ends to show.
        """
        device = self.reference.model.device
        corrected, rivals = ([name for name, c in found.items() if c.corrected is kind] for kind in (True, False))

        def by(objective: Mismatch, names: Iterable[str]) -> dict[str, float]:
            return {name: objective(found[name].trial.states[-1].to(device)) for name in names}

        judged, whole = by(self.objective(counted), found), by(self.objective(), found)
        chosen = judged if probe is None else by(self.objective(counted, probe), corrected)
        best = min(corrected, key=chosen.__getitem__)
        if not rivals:
            return best, judged
        # Nothing is fitted to a plain run, so all of its samples judge it. Few judge a calibration, and a rare one that
        # goes astray may not be among them: all of them must say so too.
        plain = min(rivals, key=whole.__getitem__)
        nearer = all(known[best] < BETTER * known[plain] for known in (judged, whole))
        return (best if nearer else plain), judged

    def refit(self, levels: Levels, denoiser: Denoiser) -> tuple[StepWeights, ...]:
        """The weights of every step, fitted to all seeds."""
        reference = self.reference
        x = reference.model.noise(reference.local_seeds, levels[0])
        made = sample(denoiser, x, levels, self.solver, self.recipe.fit(reference, levels.steps))
        return tuple(map(step_weights, made.statistics))


def step_weights(statistics: Mapping[str, Any]) -> StepWeights:
    """What a calibration keeps of a step, from what its correction said; empty where it changed nothing."""
    rho, tau = statistics.get("rho"), statistics.get("tau", ())
    if rho is None or not (bool((rho != 1.0).any()) or any(bool(row.any()) for row in tau)):
        return StepWeights()
    rows, error = tuple(tuple(row.tolist()) for row in tau), tuple(statistics["error"].tolist())
    return StepWeights(tuple(rho.tolist()), rows, error)


@torch.no_grad()
def with_restarts(
    calibration: Calibration,
    reference: ReferenceRun,
    fit: Fits | None = None,
    callback: Callable[[Progress], bool | None] | None = None,
) -> Calibration:
    r"""The calibration with runs that begin at a later level (img2img) fitted as well, n (n − 1)/2 steps of every seed.

    Such a run has no history: its first steps have fewer denoised images, and the solver a lower order, than the same
    steps of a whole run; and it has not yet strayed, while later steps of a whole run also bring back what earlier ones
    lost. So all its steps are fitted, from the fine trajectory's own states at that level. A calibration that corrects
    nothing is returned as it is; so it is if the callback returns False or Ctrl-C comes.
    """
    levels, model = calibration.levels, reference.model
    if not any(weights.rho for weights in calibration.steps):
        return calibration
    correction = (fit or ByAlignment())(reference, levels.steps)
    denoiser = model.denoiser_for(reference.local_seeds, reference.batch)
    restarts = []
    try:
        for j in range(1, levels.steps):
            tail = Levels(levels[j:], levels.schedule)
            x = reference.trajectory(tail[0]).to(model.device, model.dtype)
            statistics = sample(denoiser, x, tail, calibration.solver, correction).statistics
            restarts.append([replace(step_weights(row), error=()) for row in statistics])
            if callback is not None and callback(Progress("later starts", j, levels.steps - 1)) is False:
                return calibration
    except KeyboardInterrupt:
        logger.warning("stopped: keeping the calibration without later starts")
        return calibration
    steps = tuple(
        replace(weights, restarted=tuple(restarts[j][i - j - 1] for j in range(i)))
        for i, weights in enumerate(calibration.steps)
    )
    return replace(calibration, steps=steps)
