r"""Search, not guess: where to step, and what level the network is told there, with forward passes only.

The weights of every step stay the closed-form fit of `corrections.alignment`, redone at each trial. Searched are only

    the levels   log(σ_i/α_i) of every level but the last, the start included;
    the telling  log c_i: the network is asked for D at c_i σ_i/α_i. A coarse state carries a little less noise than its
                 level says; c is 0.85 to 1.

A trial runs the coarse trajectory of the calibration seeds and compares its end x with the fine trajectory's end y,

    J = Σ_f w_f (E[|x_f − y_f|²/(|y′_f|² + tail E|y′_f|²)] + (E log(|x′_f|² + t_f) − E log(|y′_f|² + t_f))²),

    w_f ∝ (E|y′_f|²)^p,   t_f = E|y′_f|²/100,

primes for deviations from the mean of the same condition. J is a sum of squares, and the end of a run is a smooth
function of a handful of numbers: Levenberg–Marquardt steps, with a Jacobian by finite differences, find its minimum. A
trial that moves level i repeats only the evaluations from i on.

The weights of the last step make the second term vanish: an end may have the energy of a fine one in every band, and
yet the network finds more to remove in it. So J may count that, too (`Search.probe`): the second term again, of

    P(x) = D(x + σ n, σ) − x,   σ = 0.6 σ_data,

with the same noise n for x and y. It costs one evaluation a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least, number
from steindiff._distributed import gather, mean
from steindiff.bases import Basis, band_index, band_sizes
from steindiff.corrections.alignment import FAINT, TINY, Groups, weights_of
from steindiff.corrections.base import Correction
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level, Levels
from steindiff.loop import State, advance
from steindiff.reference import ReferenceRun
from steindiff.schedules.base import Schedule
from steindiff.solvers.base import Solver
from steindiff.tableau import Evaluation

LEVEL_STEP, TOLD_STEP = 0.05, 0.02
"""Widths of the finite differences, in log(σ/α) and log c."""
FARTHEST = {True: 0.6, False: 0.15}
"""How far one iteration may move a level (True) or a telling (False), in the same units."""
LEAST_GAP = 0.1
"""Two levels stay this far apart in log(σ/α)."""
FEWEST_STEPS = 4
"""Runs below this many steps are searched for longer."""
TELLING = (math.log(0.6), math.log(1.4))
"""Bounds of log c."""
PROBED = 0.6
"""σ/α of what is probed, over σ_data."""


@dataclass(frozen=True)
class Probe:
    r"""What the network still removes: P(x) = D(x + σ n, σ) − x of ends x of a reference's seeds, `(N, *)`.

    In J it counts `weight` times as much as the ends themselves.
    """

    denoiser: Denoiser
    level: Level
    noise: Tensor
    weight: float

    @classmethod
    def of(cls, reference: ReferenceRun, denoiser: Denoiser, weight: float) -> Probe:
        """At σ = 0.6 σ_data, with noise no run begins with."""
        schedule = reference.model.schedule
        ratio = max(schedule.ratio_min, min(schedule.ratio_max, PROBED * reference.sigma_data))
        level = schedule.at(-math.log(ratio))
        noise = reference.model.noise([seed ^ 2**31 for seed in reference.local_seeds], level)
        return cls(denoiser, level, noise, weight)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        return self.denoiser(self.level.alpha * x + self.noise, self.level) - x


class Energies:
    """The band energies of coefficients `(N, *)` that others should have, too, and how much each band counts."""

    def __init__(self, basis: Basis, known: Tensor, groups: Groups, power: float) -> None:
        self.basis, self.groups = basis, groups
        self.wanted = basis.average((known - groups.means(known)).square())
        energy = mean(self.wanted).clamp(min=TINY)
        self.bands = energy**power / (energy**power).sum()
        self.faint = FAINT * energy

    def gap(self, made: Tensor) -> Tensor:
        """E log(|x′_f|² + t_f) − E log(|y′_f|² + t_f) for coefficients `made`, `(K,)`."""
        energy = self.basis.average((made - self.groups.means(made)).square())
        return mean((energy + self.faint).log() - (self.wanted + self.faint).log())


class Mismatch:
    r"""J, as a vector of residuals whose squares add up to it.

    Args:
        basis: and its bands.
        goal: ends of the fine trajectory, `(N, *)`.
        groups: which of the samples that count share a condition.
        power: p.
        tail: weight of busy samples.
        rows: which samples count, `(N,)` bool; None: all.
        probe: what the network still removes; None: that does not count.
    """

    def __init__(
        self,
        basis: Basis,
        goal: Tensor,
        groups: Groups,
        power: float = 0.5,
        tail: float = 0.1,
        rows: Tensor | None = None,
        probe: Probe | None = None,
    ) -> None:
        self.basis = basis
        self.rows = slice(None) if rows is None else rows.to(goal.device)
        self.known = basis.forward(goal[self.rows])
        self.energies = Energies(basis, self.known, groups, power)
        self.probed: tuple[Probe, Energies] | None = None
        if probe is not None:
            self.probed = probe, Energies(basis, basis.forward(probe(goal)[self.rows]), groups, power)
        index = band_index(basis, goal.device)
        size = band_sizes(basis, goal.device) * len(groups.whole)
        factors = (self.energies.bands * weights_of(self.energies.wanted, tail) / size).sqrt()  # (N, K)
        self.factors = factors[:, index].to(goal.dtype)

    def residuals(self, x: Tensor) -> Residuals:
        """The residuals of ends `x`, `(N, *)`."""
        made = self.basis.forward(x[self.rows])
        gaps = [self.energies.bands.sqrt() * self.energies.gap(made)]
        if self.probed is not None:
            probe, energies = self.probed
            gaps.append((probe.weight * energies.bands).sqrt() * energies.gap(self.basis.forward(probe(x)[self.rows])))
        return Residuals(((made - self.known) * self.factors).flatten(1), torch.cat(gaps))

    def __call__(self, x: Tensor) -> float:
        """J of ends `x`."""
        return self.residuals(x).mismatch


class Residuals(NamedTuple):
    """The parts of J: coefficients of this process's samples, `(N, D)`, and bands of all, `(K,)`; probed, `(2 K,)`."""

    errors: Tensor
    gaps: Tensor

    def dot(self, other: Residuals) -> Tensor:
        """Inner product over all processes, summed sample by sample: how they are cut into processes is not seen."""
        rows = (self.errors.double() * other.errors.double()).sum(1)
        return gather(rows).sum() + self.gaps @ other.gaps

    @property
    def mismatch(self) -> float:
        """J; infinite where an end is not finite."""
        found = float(self.dot(self))
        return found if math.isfinite(found) else math.inf

    def slope(self, before: Residuals, width: float) -> Residuals:
        """(self − before)/width."""
        return Residuals((self.errors - before.errors) / width, (self.gaps - before.gaps) / width)


def products(residuals: Sequence[Residuals]) -> Tensor:
    """Inner products of all pairs, over all processes, `(P, P)` float64; a sample at a time, so the cut is not seen."""
    rows = (torch.stack(row).double() for row in zip(*(r.errors for r in residuals), strict=True))
    bands = torch.stack([r.gaps for r in residuals])
    return gather(torch.stack([row @ row.T for row in rows]).to(bands.device)).sum(0) + bands @ bands.T


class Remembering(Denoiser):
    """A denoiser that knows some answers: those of a run that agrees with this one up to here."""

    def __init__(self, denoiser: Denoiser, known: Sequence[Evaluation]) -> None:
        self.denoiser, self.known = denoiser, known

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        for evaluation in self.known:
            if evaluation.x is x and evaluation.level == level:
                return evaluation.d
        return self.denoiser(x, level)

    @property
    def calls(self) -> int:
        return self.denoiser.calls


@dataclass(frozen=True)
class Trial:
    """One coarse run of all calibration seeds, kept in main memory: a device holds what sampling needs.

    States before every step and after the last, the evaluations of every step, residuals of its end, and J.
    """

    levels: Levels
    states: tuple[Tensor, ...]
    made: tuple[tuple[Evaluation, ...], ...]
    residuals: Residuals
    mismatch: float

    def ended(self) -> Trial:
        """The trial without what led to its end."""
        return replace(self, states=self.states[-1:], made=())

    def at(self, i: int, memory: int, device: torch.device | str) -> tuple[State, list[Evaluation]]:
        """Where the run stood before step i, on a device, and what was evaluated there."""
        x = self.states[i].to(device)
        past = [e for step in reversed(self.made[:i]) for e in reversed(step)][:memory]
        history = tuple(Evaluation(e.x.to(device), e.d.to(device), e.level) for e in past)
        known = [Evaluation(x, e.d.to(device), e.level) for e in self.made[i] if e.x is self.states[i]]
        return State(i, x, history), known


@dataclass
class Trials:
    """Coarse runs of a reference's seeds, whose denoiser is `reference.denoiser()`."""

    reference: ReferenceRun
    denoiser: Denoiser
    solver: Solver
    correction: Correction
    objective: Mismatch
    told: Callable[[float], None] = lambda mismatch: None

    def __post_init__(self) -> None:
        self.unit = self.reference.model.noise(self.reference.local_seeds, Level(0.0, 1.0, 1.0)).cpu()

    @torch.no_grad()
    def __call__(self, levels: Levels, like: Trial | None = None) -> Trial:
        """Run over `levels`, from where they leave those of an earlier trial."""
        device = self.reference.model.device
        if like is not None and like.levels.steps == levels.steps and like.levels[0] == levels[0]:
            pairs = zip(levels, like.levels, strict=True)
            i = next((i for i, (a, b) in enumerate(pairs) if a != b), levels.steps) - 1
            state, known = like.at(i, max(self.solver.memory, self.correction.memory), device)
            states, made = [*like.states[: i + 1]], [*like.made[:i]]
        else:
            state, known = State(0, self.unit.to(device) * levels[0].sigma), []
            states, made = [state.x.cpu()], []
        denoiser = Remembering(self.denoiser, known)
        while state.i < levels.steps:
            before, kept = state.x, states[-1]
            state, transition = advance(denoiser, state, levels, self.solver, self.correction)
            places = [(kept if e.x is before else e.x.cpu(), e) for e in transition.evaluations]
            made.append(tuple(Evaluation(x, e.d.cpu(), e.level) for x, e in places))
            states.append(state.x.cpu())
        residuals = self.objective.residuals(state.x)
        mismatch = residuals.mismatch
        self.told(mismatch)
        return Trial(levels, tuple(states), tuple(made), residuals._replace(errors=residuals.errors.cpu()), mismatch)


class Coordinate(NamedTuple):
    """What is searched: the level (or, if not, the telling) of place `i`."""

    i: int
    level: bool


@dataclass(frozen=True)
class Search:
    r"""How to search.

    Args:
        iterations: Levenberg–Marquardt steps, at most; each costs about n (n + 1) evaluations of a seed, n steps. None:
            three in runs below four steps, else two: from there on a third lowers J, but not the distance of samples.
        levels: search the levels.
        start: search the first level too. False: it stays the schedule's, as hosts need that begin with unit noise. A
            number: it stays at that many root energies of the strongest band, but not below 3 σ_data.
        telling: search what the network is told.
        power: p of J: bands count by their energy to this power.
        probe: how much it counts what the network still removes from an end; 0: nothing is probed.
        enough: stop when an iteration lowers J by less than this share.
    """

    iterations: int | None = None
    levels: bool = True
    start: bool | float = True
    telling: bool = True
    power: float = 0.5
    enough: float = 0.01
    probe: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations is not None:
            at_least("iterations", self.iterations, 0)
        if self.begins is not None:
            number("start", self.start, 0.0, open_end=True)
        number("power", self.power, 0.0, 4.0)
        number("enough", self.enough, 0.0, 1.0)
        number("probe", self.probe, 0.0, 1e6)

    @property
    def begins(self) -> float | None:
        """Where runs begin, in root energies of the strongest band; None: that is searched, or the schedule's."""
        return None if isinstance(self.start, bool) else self.start

    def coordinates(self, solver: Solver, levels: Levels) -> list[Coordinate]:
        """What there is to search: levels the solver may move, and levels at which it evaluates."""
        asked = {stage.level for i in range(levels.steps) for stage in solver.tableau(levels, i).stages}
        first = 0 if self.start is True else 1
        found = [Coordinate(i, True) for i in range(first, levels.steps)] if self.levels else []
        if self.telling:
            found += [Coordinate(i, False) for i, level in enumerate(levels) if level in asked and level.alpha > 0]
        # Late ones first: their trials are cheap, and all share the beginning.
        return sorted(found, key=lambda c: (-c.i, c.level))

    def iterations_of(self, steps: int) -> int:
        """How many iterations runs of `steps` steps are searched for, at most."""
        return (3 if steps < FEWEST_STEPS else 2) if self.iterations is None else self.iterations

    def trials(self, solver: Solver, levels: Levels) -> int:
        """How many trials a search may take, at most."""
        coordinates = len(self.coordinates(solver, levels))
        return self.iterations_of(levels.steps) * (coordinates + 3) if coordinates else 0

    def from_nearest(self, trials: Trials, first: Trial, others: Sequence[Levels]) -> Iterator[tuple[int, Trial]]:
        """Improve the nearest of some starting points, and the next, and so on, as long as that leads nowhere.

        Where rare samples decide the slopes, no step from a start may lower J. Yields the first start and every trial
        better than all before, with the place of its start in their order.
        """
        nearest, known = first, {first.levels: first.mismatch}
        yield 0, nearest
        for trial in map(trials, others):
            known[trial.levels] = trial.mismatch
            if trial.mismatch < nearest.mismatch:
                nearest = trial
                yield 0, nearest
        if not self.trials(trials.solver, nearest.levels):
            return
        least = nearest.mismatch
        for place, levels in enumerate(sorted(known, key=known.__getitem__)):
            # Later ones are run anew: to keep all of them till then would fill main memory.
            for better in self(trials, trials(levels) if place else nearest):
                if better.mismatch < least:
                    least = better.mismatch
                    yield place, better
            if least < nearest.mismatch:
                return

    def __call__(self, trials: Trials, best: Trial) -> Iterator[Trial]:
        """Improve a trial; yields every better one."""
        damping = 0.1
        for _ in range(self.iterations_of(best.levels.steps)):
            coordinates, slopes = [], []
            for c in self.coordinates(trials.solver, best.levels):
                moved, width = nudged(best.levels, c)
                tried = trials(moved, best)
                if math.isfinite(tried.mismatch):  # a run that overflows says nothing of the slope
                    coordinates.append(c)
                    slopes.append(tried.residuals.slope(best.residuals, width))
            if not coordinates:
                return
            normal = products([*slopes, best.residuals])
            normal, gradient = normal[:-1, :-1], normal[:-1, -1]
            found = None
            for _ in range(3):
                ridge = damping * normal.diagonal().mean() * 1e-2 + damping * normal.diagonal() + TINY
                change = -torch.linalg.solve(normal + torch.diag(ridge), gradient)
                steps = {
                    c: max(-FARTHEST[c.level], min(FARTHEST[c.level], float(d)))
                    for c, d in zip(coordinates, change, strict=True)
                }
                tried = trials(move(best.levels, steps), best)
                if tried.mismatch < best.mismatch:
                    found, damping = tried, max(damping / 4.0, 1e-3)
                    break
                damping *= 6.0
            if found is None:
                return
            gained = 1.0 - found.mismatch / best.mismatch
            best = found
            yield best
            if gained < self.enough:
                return


def nudged(levels: Levels, c: Coordinate) -> tuple[Levels, float]:
    """Levels with a coordinate moved for a finite difference, and by how much; the other way where a bound is near."""
    width = LEVEL_STEP if c.level else TOLD_STEP
    for step in (width, -width):
        moved = move(levels, {c: step})
        before, after = levels[c.i], moved[c.i]
        if before == after:
            continue
        went = math.log(after.ratio / before.ratio) if c.level else math.log(after.told / before.told)
        if math.isclose(went, step, rel_tol=1e-6):
            return moved, step
    return moved, -width if before == after else went


def move(levels: Levels, steps: dict[Coordinate, float]) -> Levels:
    """Levels and tellings moved by amounts in log(σ/α) and log c, kept in order and in the schedule's range."""
    schedule = levels.schedule
    end = levels[-1]
    first = schedule.finite_start()
    ceiling, floor = math.log(first.ratio_max), math.log(end.ratio if end.sigma > 0.0 else schedule.ratio_min)
    floor += LEAST_GAP if end.sigma > 0.0 else 0.0
    places: list[float] = []
    told: list[float] = []
    for i, level in enumerate(levels[:-1]):
        place = ceiling if math.isinf(level.ratio) else math.log(level.ratio)
        moved = place + steps.get(Coordinate(i, True), 0.0)
        if i:
            moved = min(moved, places[-1] - LEAST_GAP)
        lowest = floor + LEAST_GAP * (levels.steps - 1 - i)
        places.append(max(min(moved, max(ceiling, place)), min(lowest, place)))
    lowest_told = math.log(schedule.ratio_min)
    for i, level in enumerate(levels):
        asked = math.log(level.told) + steps.get(Coordinate(i, False), 0.0)
        asked = max(TELLING[0], min(TELLING[1], asked))
        if i < len(places):  # a network knows the schedule's times, and no others
            asked = max(min(asked, max(ceiling - places[i], 0.0)), min(lowest_told - places[i], 0.0))
        told.append(math.exp(asked))
    new = [untold(level, schedule) for level in levels]
    for i, place in enumerate(places):
        if not (math.isinf(new[i].ratio) or math.isclose(place, math.log(new[i].ratio), abs_tol=1e-12)):
            new[i] = schedule.at(-place)
    return Levels(tuple(new), schedule).tell(told)


def untold(level: Level, schedule: Schedule) -> Level:
    """The level with the network told what it is."""
    return level if level.told == 1.0 else level._replace(t=schedule.time(level.lam), told=1.0)


def resampled(levels: Levels, steps: int) -> Levels:
    """Levels of another number of steps along the same curve of log(σ/α) over the share of the run."""
    schedule, end = levels.schedule, levels[-1]
    stop = end.ratio if end.sigma > 0.0 else schedule.ratio_min
    start = min(levels[0].ratio, schedule.finite_start().ratio_max)
    curve = [math.log(start), *(math.log(level.ratio) for level in levels[1:-1]), math.log(stop)]
    floor = curve[-1] + (LEAST_GAP if end.sigma > 0.0 else 0.0)
    places: list[float] = []
    for k in range(steps):
        at = k * (len(curve) - 1) / steps
        i = min(int(at), len(curve) - 2)
        place = curve[i] + (at - i) * (curve[i + 1] - curve[i])
        # Where the curve is flat, as before σ = 0 on a schedule's own grid, levels would coincide.
        place = min(place, places[-1] - LEAST_GAP) if places else place
        places.append(max(place, floor + LEAST_GAP * (steps - 1 - k)))
    return move(Levels((*(schedule.at(-place) for place in places), untold(end, schedule)), schedule), {})
