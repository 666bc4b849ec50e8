"""The field's table: every method in one harness, on one network, with the same seeds.

    python benchmarks/comparison.py --samples 10000 --compile --tf32 --out benchmarks/results/comparison.json
    python benchmarks/comparison_tables.py

Rows are solver × method, columns true network calls. Every record holds, for seeds 0 to samples − 1 (with `--choices`,
by which defaults are chosen, for others):

- `fid`: Fréchet distance of Inception features to real images, where statistics of them are given;
- `own`: the same distance to the model's own many-step samples of *other* seeds, the honest one: sharpening cannot
  lower it. Its floor is the teacher's row, two sets of many-step samples. `precision` and `recall` are to them, too;
- `own_limit`, from 15 calls on: the same to samples in 60 steps. The teacher's 35 calls end farther from the limit than
  the best plain solvers do in 15 (`fine_trajectory.py`), so `own` cannot tell those apart;
- `own_second`: that distance by other features, EfficientNet-Lite0's where a file is given, else a random network's;
- `psnr`, and `lpips` where its weights are given: to the teacher's image of the same seed; `spread`: standard deviation
  within a condition over the teacher's;
- what was needed before: `training`, `data`, seeds, evaluations of the network (one sample each), backward passes,
  seconds and memory beyond the network, all measured in this run. Preparation uses seeds that are not evaluated and the
  float32 network; sampling may use half precision and a compiled one.

Records are appended to `--out` as they are made; cells already there are skipped, so an interrupted run goes on where
it stopped. `--quick` judges by random features alone and needs no file.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from networks.labelled import labelled
from recording import Records, machine, options, real_images
from rivals.analytical_first_step import AnalyticalFirstStep
from rivals.dpm_v3 import DPMSolverV3, ModelStatistics, measure
from rivals.epsilon_scaling import EpsilonScaling
from rivals.gits import GITS, with_free_level
from rivals.iia import IIA
from rivals.learned import LearnedSolver, Training
from rivals.restart import Restart
from steindiff import GRIDS, SOLVERS, datasets, zoo
from steindiff._files import atomic
from steindiff.bases import Identity
from steindiff.calibrating import FEW_CALLS, ByAlignment, Recipe, calibrate, step_weights
from steindiff.calibration import Calibration
from steindiff.comparison import Yardstick
from steindiff.corrections.replay import Replay
from steindiff.denoisers import Denoiser
from steindiff.grids import Grid
from steindiff.images import to_uint8
from steindiff.levels import Level, Levels
from steindiff.loop import sample
from steindiff.metrics import LPIPS, EfficientNetFeatures, Moments, frechet_distance, precision_recall, references
from steindiff.metrics.features import InceptionFeatures, RandomFeatures
from steindiff.metrics.scores import psnr, spread
from steindiff.model import Model
from steindiff.models import CALIBRATIONS
from steindiff.reference import ReferenceRun, reference_run
from steindiff.sampler import Sampler, levels_for
from steindiff.search import Search
from steindiff.seeding import in_batches
from steindiff.solvers import Solver
from steindiff.stein import ByEnergy, SteinDensity

T = TypeVar("T")

BUDGETS = (3, 4, 5, 6, 8, 10)
SEEDS = 256
"""How many seeds most methods prepare with, and the calibrations that are kept in files."""
PREPARATION_SEED = 10**6
"""First of the seeds methods may prepare with."""
OTHER_SEED = 2**31
"""First of the seeds of the model's other many-step samples."""
CHOICE_SEED = 5 * 10**5
"""First of the seeds defaults are chosen by; those that are evaluated begin at 0."""
TEACHER = ("heun", "edm-to-zero", 35)
"""Many steps, as the field runs them: solver, grid, evaluations."""
FINEST = ("dpmpp-3m", "logsnr", 60)
"""Runs of many calls end nearer to the limit than the teacher; these end nearer still."""
LATE = 15
"""From so many calls on."""
IMAGES = {"strong": "cifar10"}
"""What models were trained on, where it is not what they are called."""
SCALES = (0.99, 0.995, 0.998, 1.0, 1.001, 1.002, 1.003, 1.004, 1.005, 1.006, 1.008, 1.01, 1.015, 1.02, 1.04)
"""λ that epsilon scaling may take."""
MOST_NEAREST = 10_000
"""Precision and recall look at this many samples at most."""
CACHED = 1_000
"""Images of the teacher in one file."""


class Made(NamedTuple):
    """Samples `(B, *)` and what one of them cost."""

    x: Tensor
    nfe: int
    network_calls: int


Run = Callable[[Model, Sequence[int]], Made]
"""Samples the given seeds in one batch."""


class Cost(NamedTuple):
    """What preparation took; `memory_mb` is the peak beyond what was allocated before, known on a GPU only."""

    seconds: float = 0.0
    memory_mb: float | None = None
    evaluations: int = 0
    backward_passes: int = 0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        memory = [m for m in (self.memory_mb, other.memory_mb) if m is not None]
        return Cost(
            self.seconds + other.seconds,
            max(memory) if memory else None,
            self.evaluations + other.evaluations,
            self.backward_passes + other.backward_passes,
        )


class Prepared(NamedTuple):
    """A method ready to sample, what that took, and what it chose."""

    run: Run
    cost: Cost = Cost()
    chosen: Mapping[str, Any] = {}


class Tally(Denoiser):
    """Counts the samples it is asked about, in a list that others share."""

    def __init__(self, denoiser: Denoiser, count: list[int]) -> None:
        self.denoiser, self.count = denoiser, count

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        self.count[0] += len(x)
        return self.denoiser(x, level)

    @property
    def calls(self) -> int:
        return self.denoiser.calls

    @property
    def conditions(self) -> Mapping[str, Any]:
        return self.denoiser.conditions


def by_sampler(sampler: Sampler) -> Run:
    """Run a sampler of the library."""

    def run(model: Model, seeds: Sequence[int]) -> Made:
        result = sampler(model, seeds, batch=len(seeds))
        return Made(result.x, result.nfe, result.network_calls)

    return run


def by_function(function: Callable[[Denoiser, Model, Sequence[int]], Tensor]) -> Run:
    """Run something that takes a denoiser, and count its calls."""

    def run(model: Model, seeds: Sequence[int]) -> Made:
        denoiser = model.denoiser_for(seeds)
        before = denoiser.calls
        x = function(denoiser, model, seeds)
        return Made(x, denoiser.calls - before, denoiser.calls - before)

    return run


def wrapped(run: Run, wrap: Callable[[Denoiser], Denoiser]) -> Run:
    """Run on the same model with its denoiser wrapped."""
    return lambda model, seeds: run(replace(model, denoiser=lambda part: wrap(model.denoiser_for(part))), seeds)


def analytically_begun(solver: Solver, levels: Levels) -> Run:
    """Run over levels, the first of which a formula answers for."""
    return wrapped(by_sampler(Sampler(solver, levels)), lambda denoiser: AnalyticalFirstStep(denoiser, levels[0]))


@dataclass
class Bench:
    """The model, what it is judged by, and what several methods share, each made when first needed.

    Args:
        model: that samples; may be compiled for batches of `batch`.
        plain: the same in float32 and not compiled, for preparation.
        forward: the same, perhaps in half precision, for preparation by forward passes alone.
        samples: how many to judge by.
        batch: samples in a call.
        seeds: how many a method may prepare with.
        iterations: of methods that train.
        inception: the file; None judges by random features.
        efficientnet: the file; None: random features.
        reference: statistics of real images under Inception's features.
        real: real images as bytes; precision and recall are to them, where given.
        tf32: let Inception multiply in TF32.
        calibrations: folder to keep calibrations of the default recipe in, and to read them from.
        shared: other work runs on the device, so that times do not count.
        lpips: the file; None: LPIPS is not measured.
        first: first of the seeds to judge by; the model's other samples begin as much later.
        many: the teacher: solver, grid, evaluations.
        paired: how many samples are compared with the teacher's of the same seeds, at most.
        cache: folder to keep the teacher's images in, and to read them from.
        fid_only: measure FID alone, which needs no images of the teacher.
        sampled_in: the precision of the network that samples, for the records.
    """

    model: Model
    plain: Model
    forward: Model
    samples: int
    batch: int
    seeds: int
    iterations: int
    inception: Path | None = None
    efficientnet: Path | None = None
    reference: Moments | None = None
    real: Tensor | None = None
    tf32: bool = False
    calibrations: Path | None = None
    shared: bool = False
    lpips: Path | None = None
    first: int = 0
    many: tuple[str, str, int] = TEACHER
    paired: int = MOST_NEAREST
    cache: Path | None = None
    fid_only: bool = False
    sampled_in: str = "float32"
    kept: dict[Any, tuple[Any, Cost]] = field(default_factory=dict)

    # What is judged by

    @cached_property
    def features(self) -> Callable[[Tensor], Tensor]:
        """Bytes `(B, C, H, W)` to features `(B, F)`."""
        if self.inception is None:
            return self.random
        network = InceptionFeatures.load(self.inception, self.model.device, tf32=self.tf32)
        return lambda pixels: network(pixels.expand(-1, 3, -1, -1))

    @cached_property
    def second(self) -> Callable[[Tensor], Tensor]:
        if self.efficientnet is None:
            return self.random
        network = EfficientNetFeatures.load(self.efficientnet, self.model.device)
        return lambda pixels: network(pixels.expand(-1, 3, -1, -1))

    @cached_property
    def random(self) -> Callable[[Tensor], Tensor]:
        network = RandomFeatures(self.model.shape[0])

        def features(pixels: Tensor) -> Tensor:
            vectors = network(pixels.float() / 127.5 - 1.0)
            return vectors.unflatten(0, (len(pixels), -1)).mean(1)

        return features

    @cached_property
    def yardstick(self) -> Yardstick:
        """Measures LPIPS, where its weights are given."""
        network = self.lpips and LPIPS.load(self.lpips, self.model.device)
        return Yardstick(RandomFeatures(self.model.shape[0]), lpips=network)

    def described(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Both kinds of features of bytes `(N, C, H, W)`."""
        return self.seen(self.features, pixels), self.seen(self.second, pixels)

    @torch.no_grad()
    def seen(self, features: Callable[[Tensor], Tensor], pixels: Tensor) -> Tensor:
        """Features of one kind."""
        few = torch.device(self.model.device).type == "cpu"  # whose caches hold no more
        return torch.cat([features(part) for part in pixels.to(self.model.device).split(4 if few else 500)])

    def moments(self, pixels: Tensor) -> Moments:
        """Moments of the first features of bytes `(N, C, H, W)`."""
        return Moments.of(self.seen(self.features, pixels))

    def images(self, run: Run, seeds: Sequence[int], spent: dict[str, Any] | None = None) -> Tensor:
        """Bytes `(N, C, H, W)` of some seeds: the only place that samples what is judged."""
        parts = []
        for part in in_batches(seeds, self.batch):
            # A compiled network would be compiled once more for a last batch of another size.
            made = run(self.model if len(part) == self.batch else self.plain, part)
            parts.append(to_uint8(made.x))
            if spent is not None:
                spent.update(nfe_counted=made.nfe, network_calls=made.network_calls)
        return torch.cat(parts)

    @property
    def judged(self) -> range:
        """The seeds to judge by."""
        return range(self.first, self.first + self.samples)

    @property
    def other(self) -> range:
        """The seeds of the model's other samples."""
        return range(self.first + OTHER_SEED, self.first + OTHER_SEED + self.samples)

    def taught(self, seeds: Sequence[int]) -> Tensor:
        """The teacher's images of some seeds, a thousand a file where they are kept."""
        run = self.many_steps().run
        if self.cache is None:
            return self.images(run, seeds)
        parts = []
        for part in in_batches(seeds, CACHED):
            path = self.cache / "-".join(map(str, (self.model.name, *self.many, part[0], f"{len(part)}.npy")))
            if not path.exists():
                with atomic(path) as unfinished, unfinished.open("wb") as file:
                    np.save(file, self.images(run, part).cpu().numpy())
            parts.append(torch.from_numpy(np.load(path)))
        return torch.cat(parts)

    @cached_property
    def teacher(self) -> Tensor:
        """The teacher's images of the first seeds that are judged."""
        return self.taught(self.judged[: self.paired])

    @cached_property
    def others(self) -> tuple[Tensor, Moments, Moments]:
        """Features of the teacher's images of other seeds, and the moments of both kinds."""
        first, second = self.described(self.taught(self.other))
        return first, Moments.of(first), Moments.of(second)

    @cached_property
    def limit(self) -> Moments:
        """Moments of the first features of those seeds in 60 steps."""
        solver, grid, nfe = FINEST
        return self.moments(self.images(self.on_grid(SOLVERS[solver], nfe, grid).run, self.other))

    @cached_property
    def near(self) -> Tensor:
        """Features precision and recall are to."""
        if self.real is None:
            return self.others[0][:MOST_NEAREST]
        return self.seen(self.features, self.real)[:MOST_NEAREST]

    def fid(self, moments: Moments) -> float | None:
        """To real images, where their moments are known."""
        return None if self.reference is None else round(frechet_distance(self.reference, moments), 4)

    def judge(self, images: Tensor, late: bool = False) -> dict[str, Any]:
        """All measures of the images of the first seeds; `late`, of runs near the limit."""
        first, second = self.described(images)
        _, own, own_second = self.others
        moments = Moments.of(first)
        near = precision_recall(self.near, first[:MOST_NEAREST], k=3)
        # Halves of bytes are exact in float32: 127.5 (x + 1).
        made, known = (p.float() / 127.5 - 1.0 for p in (images[: self.paired], self.teacher.to(images.device)))
        conditions = [self.model.condition_of(seed) for seed in self.judged[: self.paired]]
        likeness, lpips = psnr(made, known), self.yardstick.perceived(made, known)
        return {
            "fid": self.fid(moments),
            "own": round(frechet_distance(own, moments), 4),
            **({"own_limit": round(frechet_distance(self.limit, moments), 4)} if late else {}),
            "own_second": round(frechet_distance(own_second, Moments.of(second)), 4),
            "precision": round(near.precision, 4),
            "recall": round(near.recall, 4),
            "psnr": None if likeness == float("inf") else round(likeness, 3),
            "lpips": None if lpips is None or likeness == float("inf") else round(lpips, 5),
            "spread": round(spread(made, known, conditions), 4),
        }

    # What methods prepare with

    def prepare(
        self, work: Callable[[Model], T], backward_passes: int = 0, model: Model | None = None
    ) -> tuple[T, Cost]:
        """Do some preparation with a model that counts, by default the float32 one, and say what it took."""
        count, used = [0], model or self.plain
        counting = replace(used, denoiser=lambda seeds: Tally(used.denoiser_for(seeds), count))
        cuda = torch.device(self.plain.device).type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        begun = time.monotonic()
        result = work(counting)
        if cuda:
            torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        memory = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
        return result, Cost(seconds, memory, count[0], backward_passes)

    def once(self, key: Any, work: Callable[[Model], T], backward_passes: int = 0) -> tuple[T, Cost]:
        """The same, done for the first to ask and charged to all."""
        if key not in self.kept:
            self.kept[key] = self.prepare(work, backward_passes)
        return self.kept[key]

    def preparation_seeds(self, count: int) -> range:
        return range(PREPARATION_SEED, PREPARATION_SEED + count)

    def ends(self, run: Run, model: Model, seeds: Sequence[int]) -> Tensor:
        """Samples of the seeds a method prepares with, in smaller batches than those that are judged."""
        return torch.cat([run(model, part).x for part in in_batches(seeds, min(self.batch, 256))])

    def fine(self, seeds: int, steps: int) -> tuple[ReferenceRun, Cost]:
        """A fine trajectory."""
        return self.once(
            ("fine", seeds, steps),
            lambda model: reference_run(model, self.preparation_seeds(seeds), steps=steps, batch=min(self.batch, 256)),
        )

    # The methods

    def levels(self, solver: Solver, grid: Grid | str, nfe: int) -> Levels:
        """Levels of a run that spends `nfe` evaluations, from a finite log-SNR."""
        schedule = self.model.schedule
        found = levels_for(solver, GRIDS.resolve("grid", grid), schedule.finite_start(), nfe)
        return Levels(found.levels, schedule)

    def on_grid(self, solver: Solver, nfe: int, grid: str) -> Prepared:
        return Prepared(by_sampler(Sampler(solver, self.levels(solver, grid, nfe))), chosen={"grid": grid})

    def many_steps(self) -> Prepared:
        solver, grid, nfe = self.many
        return self.on_grid(SOLVERS[solver], nfe, grid)

    def gits_grid(self, seeds: int = SEEDS, steps: int = 60) -> tuple[GITS, Cost]:
        count = min(seeds, self.seeds)
        reference, cost = self.fine(count, steps)
        grid, more = self.once(("gits", count), lambda model: GITS.of(reference.trajectory, device=model.device))
        return grid, cost + more

    def gits(self, solver: Solver, nfe: int) -> Prepared:
        grid, cost = self.gits_grid()
        levels = self.levels(solver, grid, nfe)
        return Prepared(by_sampler(Sampler(solver, levels)), cost, {"sigmas": sigmas(levels)})

    def afs(self, solver: Solver, nfe: int, grid: str) -> Prepared:
        """One step more, whose evaluation is a formula: as many calls of the network."""
        found, cost = self.gits_grid() if grid == "gits" else (grid, Cost())
        levels = self.levels(solver, found, nfe + 1)
        return Prepared(analytically_begun(solver, levels), cost, {"grid": grid, "sigmas": sigmas(levels)})

    def gits_afs(self, solver: Solver, nfe: int) -> Prepared:
        """GITS with a free level after its first, as its authors place it: where runs end nearest to the fine ones.

        Any level of the fine trajectory between the first two may be it; a run answers the first by a formula.
        """
        grid, cost = self.gits_grid()
        reference, _ = self.fine(min(SEEDS, self.seeds), 60)
        levels = self.levels(solver, grid, nfe)

        def work(model: Model) -> Levels:
            def error(tried: Levels) -> float:
                x = self.ends(analytically_begun(solver, tried), model, reference.seeds)
                return float((x - reference.samples.to(x)).flatten(1).norm(dim=1).double().mean())

            return min(with_free_level(levels, reference.trajectory.levels), key=error)

        found, more = self.prepare(work)
        return Prepared(analytically_begun(solver, found), cost + more, {"grid": "gits", "sigmas": sigmas(found)})

    def iia(self, solver: Solver, nfe: int, grid: str) -> Prepared:
        levels = self.levels(solver, grid, nfe)
        seeds, shape = self.preparation_seeds(self.seeds), self.model.shape

        def work(model: Model) -> Replay:
            denoiser = model.denoiser_for(seeds, min(self.batch, 256))
            found = sample(denoiser, model.noise(seeds, levels[0]), levels, solver, IIA()).statistics
            return Replay(solver, levels, Identity(shape), tuple(map(step_weights, found)))

        replay, cost = self.prepare(work)
        return Prepared(by_sampler(Sampler(solver, levels, correction=replay)), cost, {"grid": grid})

    def epsilon_scaling(self, solver: Solver, nfe: int, grid: str) -> Prepared:
        """λ by the Fréchet distance to the model's own fine samples, as its authors choose it by FID."""
        levels = self.levels(solver, grid, nfe)
        reference, cost = self.fine(self.seeds, 24)
        seeds = self.preparation_seeds(self.seeds)

        def scaled(scale: float) -> Run:
            run = by_sampler(Sampler(solver, levels))
            return wrapped(run, lambda denoiser: EpsilonScaling(denoiser, levels, scale))

        def work(model: Model) -> float:
            goal = self.moments(to_uint8(reference.samples))

            def distance(scale: float) -> float:
                return frechet_distance(goal, self.moments(to_uint8(self.ends(scaled(scale), model, seeds))))

            return min(SCALES, key=distance)

        self.features  # noqa: B018, loaded before the clock starts
        scale, more = self.prepare(work)
        return Prepared(scaled(scale), cost + more, {"grid": grid, "scale": scale})

    def model_statistics(self, seeds: int = 512, steps: int = 120) -> tuple[ModelStatistics, Cost]:
        count, batch = min(seeds, 2 * self.seeds), min(self.batch, 128)
        reference, cost = self.fine(count, steps)

        def work(model: Model) -> ModelStatistics:
            return measure(
                lambda part: model.denoiser_for(reference.seeds[part]), reference.trajectory, batch, model.device
            )

        passes = steps * len(in_batches(range(count), batch))
        statistics, more = self.once(("ems", count), work, passes)
        return statistics, cost + more

    def dpm_v3(self, solver: Solver, nfe: int, grid: str, pseudo: bool) -> Prepared:
        """Its own solver: the argument says the order of predictor and corrector only."""
        statistics, cost = self.model_statistics()
        place: Grid = replace(GRIDS[grid], to_zero=False)  # type: ignore[type-var]
        levels = place(self.model.schedule.finite_start(), nfe)
        v3 = DPMSolverV3(statistics, levels, order=3, pseudo=pseudo)
        run = by_function(lambda denoiser, model, seeds: v3(denoiser, model.noise(seeds, levels[0])))
        return Prepared(run, cost, {"grid": grid, "pseudo": pseudo})

    def learned(self, solver: Solver, nfe: int, grid: str) -> Prepared:
        found, cost = self.gits_grid() if grid == "gits" else (grid, Cost())
        levels = self.levels(solver, found, nfe)
        reference, more = self.fine(self.seeds, 24)
        alpha = reference.trajectory.levels[-1].alpha
        training = Training(self.iterations, batch=min(64, self.seeds))

        def work(model: Model) -> LearnedSolver:
            solved = LearnedSolver(solver, levels)
            seeds = reference.seeds
            training(
                solved,
                lambda rows: model.denoiser_for([seeds[k] for k in rows]),
                model.noise(seeds, Level(0.0, 1.0, 1.0)).cpu(),
                reference.samples / alpha,
                model.device,
            )
            return solved

        solved, most = self.prepare(work, self.iterations * nfe)

        @torch.no_grad()
        def run(denoiser: Denoiser, model: Model, seeds: Sequence[int]) -> Tensor:
            y = solved(denoiser, solved.begin(model.noise(seeds, Level(0.0, 1.0, 1.0))))
            return solved.last.alpha * y

        told = [round(v, 4) for v in (-solved.told).exp().tolist()]
        chosen = {"begun": grid, "sigmas": sigmas(solved.levels()), "told": told, "iterations": self.iterations}
        return Prepared(by_function(run), cost + more + most, chosen)

    def calibrated(
        self, solver: Solver, nfe: int, seeds: int = SEEDS, nth: int = 0, one_band: bool = False, **changes: Any
    ) -> Prepared:
        """Ours: forward passes only, so the network of half precision serves; `nth` takes other seeds."""
        count = min(seeds, self.seeds)
        first = PREPARATION_SEED + 10_000 * nth
        recipe = Recipe(seeds=range(first, first + count), **changes)
        batch = min(self.batch, 256)

        def work(model: Model) -> Calibration:
            basis = Identity(model.shape) if one_band else None
            steps = recipe.reference_steps([nfe])
            reference = reference_run(model, recipe.seeds, steps=steps, batch=batch, basis=basis)
            return calibrate(model, nfe, solver, recipe=recipe, reference=reference, batch=batch)

        plain = self.on_grid(solver, nfe, "logsnr").run
        sampling = Cost()
        for _ in range(2 if torch.device(self.model.device).type == "cuda" else 0):
            # The first run is for cuDNN, which tries kernels in memory of their own.
            _, sampling = self.prepare(lambda model: plain(model, recipe.seeds[:batch]), model=self.forward)
        made, cost = self.prepare(work, model=self.forward)
        if self.calibrations is not None and seeds == SEEDS and not (nth or one_band or changes):
            name = f"{self.model.name}-{SOLVERS.name_of(solver)}-{nfe}.json"
            replace(made, fingerprint=self.plain.fingerprint).save(self.calibrations / name)
        chosen = {
            "sigmas": sigmas(made.levels),
            "told": [round(level.told, 4) for level in made.levels[:-1]],
            "kept": made.provenance.get("kept"),
            "mismatch": made.provenance.get("mismatch"),
            "reference_steps": made.provenance.get("reference_steps"),
            "sampling_memory_mb": sampling.memory_mb and round(sampling.memory_mb),
        }
        return Prepared(by_sampler(made.sampler(check=False)), cost, chosen)

    def from_file(self, solver: Solver, nfe: int) -> Prepared:
        """A calibration made before, in `calibrations`."""
        assert self.calibrations is not None, "--calibrations names the folder"
        return self.replayed(self.calibrations, self.model.name, solver, nfe)

    def transferred(self, solver: Solver, nfe: int) -> Prepared:
        """The calibration of the embedded CIFAR-10 model, on this one: another precision, another guidance."""
        return self.replayed(self.calibrations or CALIBRATIONS, "cifar10", solver, nfe)

    def replayed(self, folder: Path, name: str, solver: Solver, nfe: int) -> Prepared:
        made = Calibration.load(folder / f"{name}-{SOLVERS.name_of(solver)}-{nfe}.json")
        return Prepared(by_sampler(made.sampler(check=False)), chosen={"sigmas": sigmas(made.levels)})

    def restart(self, solver: Solver, nfe: int) -> Prepared:
        levels = self.levels(solver, "edm-to-zero", nfe)
        restart = Restart(levels, solver=solver)
        return Prepared(
            by_function(lambda denoiser, model, seeds: restart(denoiser, seeds, model.shape, model.device)),
            chosen={"main": nfe, "low": restart.low, "high": restart.high, "repetitions": restart.repetitions},
        )

    def run(self, cell: Cell) -> dict[str, Any]:
        method, solver = METHODS[cell.method], SOLVERS[cell.solver]
        prepared = method.prepare(self, solver, cell.nfe)
        late = cell.nfe >= LATE and not self.fid_only
        if not self.fid_only:
            self.teacher, self.others, self.near  # noqa: B018, made before the clock starts
        if late:
            self.limit  # noqa: B018, this too
        begun, spent = time.monotonic(), dict[str, Any]()
        images = self.images(prepared.run, self.judged, spent)
        sampled = time.monotonic() - begun
        judged = {"fid": self.fid(self.moments(images))} if self.fid_only else self.judge(images, late)
        cost = prepared.cost
        return {
            **self.identity(cell),
            **spent,
            **judged,
            "training": method.training,
            "data": method.data,
            "preparation": {
                "seeds": min(method.seeds, self.seeds if method.seeds <= SEEDS else 2 * self.seeds),
                "teacher_nfe": prepared.chosen.get("reference_steps", method.teacher_nfe),
                "seconds": round(cost.seconds, 2),
                "memory_mb": None if cost.memory_mb is None else round(cost.memory_mb),
                "evaluations": cost.evaluations,
                "backward_passes": cost.backward_passes,
                "alone": not self.shared,
            },
            "chosen": dict(prepared.chosen),
            "features": ["random" if path is None else path.stem for path in (self.inception, self.efficientnet)],
            "tf32": self.tf32,
            "sampled_in": self.sampled_in,
            "teacher": list(self.many),
            "paired": min(self.paired, self.samples),
            "sampling_seconds": round(sampled, 2),
            "seconds": round(time.monotonic() - begun, 2),
            **machine(torch.device(self.model.device).type),
        }

    def identity(self, cell: Cell) -> dict[str, Any]:
        """The fields that tell cells apart."""
        return {"model": self.model.name, **cell._asdict(), "samples": self.samples, "seed": self.first}


def sigmas(levels: Levels) -> list[float]:
    """σ/α of levels, to four digits."""
    return [float(f"{level.ratio:.4g}") for level in levels]


class Cell(NamedTuple):
    """One record: a solver, a method, and how often the network is called (for `restart`: in the main run)."""

    solver: str
    method: str
    nfe: int


@dataclass(frozen=True)
class Method:
    """A way to sample.

    Args:
        title: as printed.
        prepare: makes it ready on a bench, for a solver and a budget.
        training: whether it back-propagates into parameters of its own.
        data: whether it needs real data.
        seeds: how many it prepares with.
        teacher_nfe: evaluations of its fine trajectory.
    """

    title: str
    prepare: Callable[[Bench, Solver, int], Prepared]
    training: bool = False
    data: bool = False
    seeds: int = 0
    teacher_nfe: int = 0


METHODS: dict[str, Method] = {
    "teacher": Method("many steps", lambda bench, solver, nfe: bench.many_steps()),
    "edm": Method("plain, EDM grid", partial(Bench.on_grid, grid="edm")),
    "edm-to-zero": Method("plain, EDM grid to 0", partial(Bench.on_grid, grid="edm-to-zero")),
    "logsnr": Method("plain, log-SNR grid", partial(Bench.on_grid, grid="logsnr")),
    "gits": Method("GITS", Bench.gits, seeds=SEEDS, teacher_nfe=60),
    "afs": Method("EDM grid + AFS", partial(Bench.afs, grid="edm")),
    "gits-afs": Method("GITS + AFS", Bench.gits_afs, seeds=SEEDS, teacher_nfe=60),
    "gits-longer-afs": Method(
        "GITS, one step more, + AFS", partial(Bench.afs, grid="gits"), seeds=SEEDS, teacher_nfe=60
    ),
    "iia-edm": Method("IIA, EDM grid", partial(Bench.iia, grid="edm"), seeds=SEEDS, teacher_nfe=8),
    "iia-logsnr": Method("IIA, log-SNR grid", partial(Bench.iia, grid="logsnr"), seeds=SEEDS, teacher_nfe=8),
    "epsilon-scaling": Method(
        "epsilon scaling", partial(Bench.epsilon_scaling, grid="edm"), seeds=SEEDS, teacher_nfe=24
    ),
    "dpm-v3": Method("DPM-Solver-v3", partial(Bench.dpm_v3, grid="logsnr", pseudo=False), seeds=512, teacher_nfe=120),
    "dpm-v3-pseudo": Method(
        "DPM-Solver-v3, pseudo-order", partial(Bench.dpm_v3, grid="logsnr", pseudo=True), seeds=512, teacher_nfe=120
    ),
    "learned": Method(
        "learned weights and steps", partial(Bench.learned, grid="gits"), training=True, seeds=SEEDS, teacher_nfe=60
    ),
    "restart": Method("Restart", Bench.restart),
    "calibrated": Method("calibrated", Bench.calibrated, seeds=SEEDS, teacher_nfe=24),
    "from-file": Method("calibrated, from its file", Bench.from_file),
    "transferred": Method("calibrated on the embedded model", Bench.transferred),
    "calibrated-64": Method("calibrated, 64 seeds", partial(Bench.calibrated, seeds=64), seeds=64, teacher_nfe=24),
}
"""IIA's teacher makes that many steps in each coarse one."""

ABLATIONS: dict[str, dict[str, Any]] = {
    "no search": {"search": None},
    "no search, no telling, Stein grid": {"search": None, "grid": SteinDensity()},
    "no telling": {"search": Search(telling=False)},
    "telling alone": {"search": Search(levels=False)},
    **{f"p = {power:g}": {"search": Search(power=power)} for power in (0.0, 0.25, 0.75, 1.0)},
    "two iterations": {"search": Search(iterations=2)},
    "three iterations": {"search": Search(iterations=3)},
    "one band": {"one_band": True},
    "one difference": {"fit": ByAlignment(terms=1)},
    "no difference": {"fit": ByAlignment(terms=0)},
    "energy of low noise only": {"fit": ByAlignment(below=2.0)},
    "energy alone": {"fit": ByEnergy()},
}
"""One change at a time from the default."""
METHODS |= {
    name: Method(name, partial(Bench.calibrated, **changes), seeds=SEEDS, teacher_nfe=24)
    for name, changes in ABLATIONS.items()
}
REPEATED = {f"{count} seeds, nth {nth}": (count, nth) for count in (64, 256) for nth in range(1, 6)}
"""Calibrations from other seeds, to say how sure a figure is."""
METHODS |= {
    name: Method(name, partial(Bench.calibrated, seeds=count, nth=nth), seeds=count, teacher_nfe=24)
    for name, (count, nth) in REPEATED.items()
}

REPEATED_FEW = {f"few, 64 seeds, nth {nth}": nth for nth in range(1, 6)}
METHODS |= {
    name: Method(title, partial(Bench.calibrated, search=FEW_CALLS.search, **how), seeds=how["seeds"], teacher_nfe=24)
    for name, title, how in (
        ("calibrated-few", "calibrated for few", {"seeds": SEEDS}),
        ("calibrated-few-64", "calibrated for few, 64 seeds", {"seeds": 64}),
        *((name, name, {"seeds": 64, "nth": nth}) for name, nth in REPEATED_FEW.items()),
    )
}
TRIED = (*ABLATIONS, *REPEATED, *REPEATED_FEW)
"""Measured when asked for by name."""

CALIBRATED = ("dpmpp-2m", "ipndm-4", "unipc-bh1-3", "ddim", "dpmpp-3m", "heun")
"""Solvers a calibration is measured with."""
PLAN: dict[str, tuple[str, ...]] = {
    "calibrated": CALIBRATED,
    "from-file": ("dpmpp-2m",),
    "transferred": ("dpmpp-2m",),
    "calibrated-64": CALIBRATED,
    "edm": ("ipndm-4", "ipndm-3", "dpmpp-2m", "unipc-bh1-3", "ddim"),
    "logsnr": ("dpmpp-2m", "dpmpp-3m", "unipc-bh1-3", "ipndm-4"),
    "gits": ("ipndm-4", "ipndm-3", "dpmpp-2m"),
    "afs": ("ipndm-4",),
    "gits-afs": ("ipndm-4",),
    "gits-longer-afs": ("ipndm-4",),
    "iia-edm": ("ipndm-4", "dpmpp-2m"),
    "iia-logsnr": ("ipndm-4", "dpmpp-2m"),
    "epsilon-scaling": ("ipndm-4", "ddim"),
    "dpm-v3": ("unipc-bh1-3",),
    "dpm-v3-pseudo": ("unipc-bh1-3",),
    "learned": ("ipndm-4",),
}
PLAN |= dict.fromkeys(["calibrated-few", "calibrated-few-64", *TRIED], ("dpmpp-2m",))
"""Solvers of each method. DPM-Solver-v3 is a solver of its own, filed under its nearest relative."""


def cells(
    methods: Sequence[str], solvers: Sequence[str], budgets: Sequence[int], many: tuple[str, str, int] = TEACHER
) -> Iterator[Cell]:
    """The chosen cells; the teacher first, whose row is the floor."""
    if "teacher" in methods:
        yield Cell(many[0], "teacher", many[2])
    for nfe in budgets:
        for method in methods:
            for solver in PLAN.get(method, ()):
                if (not solvers or solver in solvers) and (solver != "heun" or nfe % 2 == 0):
                    yield Cell(solver, method, nfe)
    if "restart" in methods:  # for the table of costs: its budgets are larger
        yield from (Cell("heun", "edm-to-zero", nfe) for nfe in (17, 35))
        yield from (Cell("heun", "restart", nfe) for nfe in (17, 35))


def load_model(spec: str, device: str, *, half: bool, compiled: bool) -> Model:
    """A model of the zoo by name, or what `module:function` returns for `device`, `half` and `compiled`."""
    module, _, function = spec.partition(":")
    if function:
        model: Model = getattr(importlib.import_module(module), function)(device, half=half, compiled=compiled)
        return model
    return labelled(zoo.load(spec, device), spec, device, half=half, compiled=compiled)


def main() -> None:
    parser = options(__doc__, "comparison")
    parser.add_argument("--model", default="cifar10", help="of the zoo, or module:function(device, half, compiled)")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=[
            "teacher",
            *(name for name in PLAN if name not in (*TRIED, "from-file", "transferred")),
        ],
    )
    parser.add_argument("--calibrations", type=Path, help="folder to keep what the method `calibrated` makes in")
    parser.add_argument("--shared", action="store_true", help="other work runs on the device: times do not count")
    parser.add_argument("--choices", action="store_true", help="judge by the seeds defaults are chosen by")
    parser.add_argument(
        "--teacher",
        nargs=3,
        default=TEACHER,
        metavar=("SOLVER", "GRID", "NFE"),
        help="the many steps; default: %(default)s",
    )
    parser.add_argument("--cache", type=Path, help="folder to keep the teacher's images in: many runs can share them")
    parser.add_argument("--paired", type=int, help="compare this many samples with the teacher's; default: all")
    parser.add_argument("--fid-only", action="store_true", help="measure FID alone: no many-step samples are made")
    parser.add_argument("--half", action="store_true", help="on a CPU too, sample in half precision")
    parser.add_argument("--solvers", nargs="+", default=[], help="only these; default: all of the plan")
    parser.add_argument("--nfe", nargs="+", type=int, default=list(BUDGETS))
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds a method may prepare with")
    parser.add_argument("--iterations", type=int, default=400, help="of methods that train")
    parser.add_argument("--compile", action="store_true", help="compile the network: three times as fast, 30 s to wait")
    parser.add_argument("--quick", action="store_true", help="judge by random features alone")
    parser.add_argument("--efficientnet", type=Path, help="weights of the second features; default: random ones")
    parser.add_argument("--lpips", type=Path, help="weights of LPIPS (steindiff.datasets.lpips); default: not measured")
    parser.add_argument("--reference", type=Path, help="moments of real images; default: those that ship for the model")
    parser.add_argument("--real", type=Path, help=".npz with bytes `images`: precision and recall are to them")
    args = parser.parse_args()

    begun = time.monotonic()
    cuda = args.device == "cuda"
    half = cuda or args.half
    model = load_model(args.model, args.device, half=half, compiled=args.compile)
    plain = load_model(args.model, args.device, half=False, compiled=False) if half or args.compile else model
    # bfloat16, a CPU's half precision, rounds too much for the differences a search takes.
    forward = load_model(args.model, args.device, half=True, compiled=False) if cuda else plain
    shipped = references.FOLDER / f"{IMAGES.get(model.name, model.name)}-train.npz"
    path = args.reference or (shipped if shipped.exists() else None)
    bench = Bench(
        model,
        plain,
        forward,
        args.samples,
        args.batch,
        args.seeds,
        args.iterations,
        None if args.quick else args.inception or datasets.inception(),
        args.efficientnet,
        None if args.quick or path is None else references.read(path).to(args.device),
        None if args.real is None else real_images(model.name, args.real, min(args.samples, MOST_NEAREST)),
        args.tf32,
        args.calibrations,
        args.shared,
        args.lpips,
        CHOICE_SEED if args.choices else 0,
        (args.teacher[0], args.teacher[1], int(args.teacher[2])),
        args.paired or args.samples,
        args.cache,
        args.fid_only,
        ("float16" if cuda else "bfloat16") if half else "float32",
    )
    for folder in (args.calibrations, args.cache):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    chosen = cells(args.methods, args.solvers, args.nfe, bench.many)
    Records(args.out).measure(chosen, bench.identity, bench.run, begun + args.seconds)


if __name__ == "__main__":
    main()
