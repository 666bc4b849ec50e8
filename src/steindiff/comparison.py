r"""The measured comparison: the same seeds by several methods, and what each of them costs and gives.

Every number is measured on the images of this very run, nothing is looked up:

- Fréchet distance of features to those of real images where their statistics ship with the model, else to those of
  the many-step samples;
- distance to the same seed's many-step image, √(E‖x − x_ref‖²/d) with images in [−1, 1]. Mean-square error rewards
  blur: among all guesses the average of the plausible images has the smallest error, and an average is blurred;
- energy ratio: power in the upper half of the frequencies over that of the many-step images. Blur is below 1;
- network calls, backward passes and seconds.

Beside them stand, step by step, the grid, γ, ρ and the local Lipschitz constant of the solver's step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from steindiff.bases import DCT
from steindiff.calibration import Calibration
from steindiff.corrections.base import Correction
from steindiff.corrections.hook import WithHook
from steindiff.corrections.plain import Plain
from steindiff.corrections.relaxation import Relaxation
from steindiff.corrections.replay import Replay
from steindiff.denoisers.base import Denoiser
from steindiff.diagnostics._lipschitz import candidate, operator_norm
from steindiff.grids import GRIDS
from steindiff.grids.base import Grid
from steindiff.levels import Levels
from steindiff.loop import SampleResult, StepInfo, sample
from steindiff.metrics.frechet import Moments, frechet_distance
from steindiff.probes.vjp import VJP
from steindiff.schedules.base import Schedule
from steindiff.seeding import noise
from steindiff.solvers import SOLVERS, DPMSolverMultistep
from steindiff.solvers.base import Solver
from steindiff.tableau import Step

REFERENCE_NFE = 24
"""Evaluations of the many-step reference; the models here change little beyond."""
POWER_ITERATIONS = 4
"""At most so many for a Lipschitz constant, which they approach from below; `steindiff diagnose` takes more."""
LIPSCHITZ_EFFORT = 4 * POWER_ITERATIONS
"""Roughly how many evaluations' time one of them takes."""


class Features(Protocol):
    """A map of images in [−1, 1], `(B, C, H, W)`, to features `(M, F)`, M a multiple of B; `name` is for the table."""

    name: str

    def __call__(self, images: Tensor) -> Tensor: ...


class RandomFeatures:
    """Features of a fixed random convolutional network, one vector for each 10×10 neighbourhood.

    Needs no weights: the network is drawn from a fixed seed on the CPU. A vector for each place rather than for each
    image makes covariances of some dozens of images well conditioned. Their unit is arbitrary; `scale` puts distances
    between sets of natural images in the tens.

    Shapes: `(B, C, H, W)` → `(B · H/4 · W/4, width)`.

    Args:
        channels: of the images.
        width: number of features.
    """

    name = "random features"
    scale = 32.0

    def __init__(self, channels: int, width: int = 48) -> None:
        generator = torch.Generator().manual_seed(0)
        self.kernels = []
        for size_in, size_out in ((channels, 32), (32, width)):
            kernel = torch.empty(size_out, size_in * 16)
            nn.init.orthogonal_(kernel, generator=generator)
            self.kernels.append(kernel.reshape(size_out, size_in, 4, 4))

    def __call__(self, images: Tensor) -> Tensor:
        h = images
        for kernel in self.kernels:
            h = nn.functional.conv2d(h, kernel.to(h), stride=2, padding=1).abs()
        return self.scale * h.movedim(1, -1).flatten(0, 2)


@dataclass(frozen=True)
class Subject:
    """What is compared on.

    Attributes:
        name: for the report.
        denoisers: the denoiser for the samples of the given seeds (they may differ in their labels).
        schedule: the forward process.
        shape: of one image, `(C, H, W)`.
        features: what the Fréchet distance is taken on.
        reference: moments of real images under `features`; None compares with the many-step samples.
        calibrations: the calibration for a solver and a number of evaluations, where there is one.
        device: where to sample.
        compiled: whether its network is compiled, which changes images by rounding.
    """

    name: str
    denoisers: Callable[[Sequence[int]], Denoiser]
    schedule: Schedule
    shape: tuple[int, int, int]
    features: Features
    reference: Moments | None = None
    calibrations: Callable[[Solver, int], Calibration | None] = lambda solver, nfe: None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compiled: bool = False


class Plan(NamedTuple):
    """How a method samples: levels, correction, and roughly how many evaluations' time it takes (for progress)."""

    levels: Levels
    correction: Correction
    effort: float


class Method(ABC):
    """One row of the comparison. Children are frozen dataclasses with a `title`."""

    title: str

    @abstractmethod
    def plan(self, subject: Subject, solver: Solver, nfe: int) -> Plan | None:
        """How to spend `nfe` evaluations; None where this method has nothing to offer."""


@dataclass(frozen=True)
class OnGrid(Method):
    """The plain solver on a grid."""

    title: str
    grid: Grid

    def plan(self, subject: Subject, solver: Solver, nfe: int) -> Plan:
        return Plan(solver.levels(self.grid, subject.schedule, nfe), Plain(), nfe)


@dataclass(frozen=True)
class Relaxed(Method):
    """The paper's relaxation, γ clamped to (0, 1], on a grid; each probe is a backward pass."""

    title: str
    grid: Grid
    probes: int = 1

    def plan(self, subject: Subject, solver: Solver, nfe: int) -> Plan:
        correction = Relaxation(probe=VJP(probes=self.probes))
        return Plan(solver.levels(self.grid, subject.schedule, nfe), correction, nfe * (1.5 + self.probes))


@dataclass(frozen=True)
class Calibrated(Method):
    """Stein calibration, replayed."""

    title: str

    def plan(self, subject: Subject, solver: Solver, nfe: int) -> Plan | None:
        calibration = subject.calibrations(solver, nfe)
        return None if calibration is None else Plan(calibration.levels, Replay(calibration), nfe)


METHODS: dict[str, Method] = {
    "edm": OnGrid("EDM grid", GRIDS["edm-min"]),
    "logsnr": OnGrid("log-SNR grid", GRIDS["logsnr-min"]),
    "relaxation": Relaxed("relaxation", GRIDS["edm-min"]),
    "calibrated": Calibrated("calibrated"),
}
"""The methods by the name they have in files and on the command line, in the order of the table.

The plain grids end at the smallest σ instead of 0: that way no evaluation is spent there, and the baseline is the
stronger one.
"""

REFERENCE = "reference"
"""The many-step reference's name in the same places."""
REFERENCE_SOLVER = DPMSolverMultistep(2)
"""Its solver, whichever is compared: with many steps all that converge make the same of a model."""


class Part(NamedTuple):
    """What a plan made of some seeds: images `(B, C, H, W)` on the CPU, the run they came from, and its time."""

    seeds: Sequence[int]
    images: Tensor
    sampling: SampleResult
    seconds: float


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a batch did not fit."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def sample_parts(
    subject: Subject,
    solver: Solver,
    plan: Plan,
    seeds: Sequence[int],
    batch: int,
    *,
    advance: Callable[[float], None] = lambda amount: None,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[Part]:
    """Sample seeds by a plan, a batch at a time; the batch is halved, for good, where memory runs out.

    Args:
        subject: the model.
        solver: the solver.
        plan: levels and correction.
        seeds: one image each.
        batch: samples evaluated together.
        advance: told each bit of work done (a negative amount was in vain).
        note: told about a halved batch.

    Raises:
        ValueError: if `batch` is not positive.
        torch.OutOfMemoryError: if not even one sample fits.
    """
    if batch < 1:
        raise ValueError(f"batch = {batch}: allowed are whole numbers >= 1")
    start = 0
    while start < len(seeds):
        part = seeds[start : start + batch]
        share = len(part) * plan.effort / plan.levels.steps
        done: list[int] = []

        def callback(moment: StepInfo, share: float = share, done: list[int] = done) -> None:
            done.append(moment.i)
            advance(share)

        try:
            begun = time.perf_counter()
            x = noise(part, subject.shape, plan.levels[0]).to(subject.device)
            out = sample(subject.denoisers(part), x, plan.levels, solver, plan.correction, callback=callback)
            images = out.x.clamp(-1, 1).cpu()  # the copy waits for the device
            seconds = time.perf_counter() - begun
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or len(part) == 1:
                raise
            advance(-share * len(done))
            batch = len(part) // 2
            note(f"out of memory: the batch is halved to {batch}")
            continue
        yield Part(part, images, out, seconds)
        start += len(part)


class Run(NamedTuple):
    """What one method made of all seeds: images `(N, C, H, W)`, its cost per image, and the time of all."""

    images: Tensor
    network_calls: int
    backward_passes: int
    seconds: float
    gamma: tuple[float, ...]
    calibration: Calibration | None


def run(subject: Subject, solver: Solver, plan: Plan, seeds: Sequence[int], batch: int, **report: Any) -> Run:
    """Sample all seeds by one plan; `report` is `advance` and `note` of `sample_parts`."""
    parts = list(sample_parts(subject, solver, plan, seeds, batch, **report))
    first = parts[0].sampling
    return Run(
        torch.cat([part.images for part in parts]),
        first.network_calls,
        first.backward_passes,
        sum(part.seconds for part in parts),
        gammas(first.statistics),
        plan.correction.calibration if isinstance(plan.correction, Replay) else None,
    )


def gammas(statistics: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The relaxation's γ for each step (1 where it did not act); empty if it never acted."""
    if not any("gamma" in step for step in statistics):
        return ()
    return tuple(float(torch.as_tensor(step.get("gamma", 1.0)).mean()) for step in statistics)


@dataclass(frozen=True)
class Row:
    """One method at one number of evaluations; the columns of the table are its numbers.

    Attributes:
        method: the method's name.
        title: as printed.
        nfe: evaluations of the denoiser.
        frechet: Fréchet distance.
        distance: root mean square distance to the many-step image of the same seed.
        energy_ratio: high-frequency power over that of the many-step images.
        network_calls: for each image (guidance makes it more than `nfe`).
        backward_passes: for each image.
        seconds: for all images.
        levels: (σ, α) of every level.
        rho: the calibration's ρ, steps × bands; empty where there is none.
        tau: the calibration's τ_1, likewise.
        gamma: the relaxation's γ for each step; empty where there is none.
        spectrum: mean power for each frequency ring, all channels.
        lipschitz: local Lipschitz constant of the solver's plain step, for each step; empty where not measured.
    """

    method: str
    title: str
    nfe: int
    frechet: float
    distance: float
    energy_ratio: float
    network_calls: int
    backward_passes: int
    seconds: float
    levels: tuple[tuple[float, float], ...]
    rho: tuple[tuple[float, ...], ...]
    tau: tuple[tuple[float, ...], ...]
    gamma: tuple[float, ...]
    spectrum: tuple[float, ...]
    lipschitz: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    Attributes:
        subject: name of the model.
        solver: name of the solver.
        seeds: one for each image.
        settings: what was asked for, what it ran on and how long it took in all, by name.
        features: name of the features of the Fréchet distance.
        against: what they were compared with.
        rows: by method and number of evaluations; the many-step reference is last.
        images: `(N, C, H, W)` in [−1, 1] for each row, in the same order.
    """

    subject: str
    solver: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    features: str
    against: str
    rows: tuple[Row, ...]
    images: tuple[Tensor, ...]


def spectrum(images: Tensor) -> Tensor:
    r"""Mean power E|x_f|² for each ring f of equal max(k_x, k_y), averaged over channels; `(B, C, H, W)` to `(K,)`."""
    basis = DCT(tuple(images.shape[1:]))
    power = basis.average(basis.forward(images).square()).mean(0)
    return power.reshape(images.shape[1], -1).mean(0)


def high_frequency_power(power: Tensor) -> float:
    """Power in the upper half of the rings `(K,)`; ring k of a square image has 2k + 1 coefficients."""
    count = 2 * torch.arange(len(power)) + 1
    return float((power * count)[len(power) // 2 :].sum())


def lipschitz(
    subject: Subject, solver: Solver, levels: Levels, seeds: Sequence[int], advance: Callable[[float], None]
) -> tuple[float, ...]:
    """The largest local Lipschitz constant of each of the solver's plain steps on a run of some seeds."""
    denoiser = subject.denoisers(seeds)
    x = noise(seeds, subject.shape, levels[0]).to(subject.device)
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        norm = operator_norm(partial(candidate, step), x, generator, iterations=POWER_ITERATIONS, tolerance=0.05)
        found.append(float(norm.max()))
        advance(len(seeds) * LIPSCHITZ_EFFORT)

    sample(denoiser, x, levels, solver, WithHook(look))
    return tuple(found)


def compare(
    subject: Subject,
    solver: Solver,
    nfes: Sequence[int],
    seeds: Sequence[int],
    *,
    methods: Mapping[str, Method] | None = None,
    batch: int = 16,
    reference_nfe: int = REFERENCE_NFE,
    lipschitz_seeds: int = 1,
    settings: Mapping[str, Any] | None = None,
    begin: Callable[[float], None] = lambda total: None,
    advance: Callable[[float], None] = lambda amount: None,
    note: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Sample the same seeds by every method and measure.

    Args:
        subject: the model.
        solver: the solver of all rows but the reference.
        nfes: numbers of evaluations.
        seeds: one image each.
        methods: the rows; default all.
        batch: samples evaluated together.
        reference_nfe: evaluations of the many-step reference (DPM-Solver++(2M), EDM grid).
        lipschitz_seeds: on how many seeds Lipschitz constants are measured; 0 leaves them out.
        settings: put into the result as they are.
        begin: told the total work.
        advance: told each bit of work done (a negative amount was in vain).
        note: told what the user should know: a halved batch, a method left out.

    Raises:
        ValueError: if a number is not allowed; the message names it.
    """
    begun = time.perf_counter()
    if not nfes:
        raise ValueError("nfe: got none, need at least one")
    if len(seeds) < 2:
        raise ValueError(f"num = {len(seeds)}: allowed are whole numbers >= 2 (a Fréchet distance needs a covariance)")
    table = METHODS if methods is None else methods
    plans = {(name, nfe): method.plan(subject, solver, nfe) for nfe in nfes for name, method in table.items()}
    for name, nfe in (key for key, plan in plans.items() if plan is None):
        note(f"{table[name].title}: no calibration of {subject.name} for this solver at {nfe} evaluations, left out")
    titles = {name: method.title for name, method in table.items()}
    fine = OnGrid(f"many steps ({reference_nfe})", GRIDS["edm"]).plan(subject, REFERENCE_SOLVER, reference_nfe)
    kept = {key: plan for key, plan in plans.items() if plan is not None} | {(REFERENCE, reference_nfe): fine}
    titles[REFERENCE] = f"many steps ({reference_nfe})"
    watched = {
        key: plan.levels
        for key, plan in kept.items()
        if lipschitz_seeds and key[0] != REFERENCE and not isinstance(plan.correction, Relaxation)
    }
    probing = LIPSCHITZ_EFFORT * lipschitz_seeds * sum(levels.steps for levels in watched.values())
    begin(len(seeds) * sum(plan.effort for plan in kept.values()) + probing)

    warm = Plan(Levels(fine.levels[-2:], subject.schedule), Plain(), 0.0)
    # No row should pay for warming up; and the batch that fits here is the one to use.
    batch = len(next(sample_parts(subject, solver, warm, seeds, batch, note=note)).seeds)

    solvers = {key: REFERENCE_SOLVER if key[0] == REFERENCE else solver for key in kept}
    runs = {
        key: run(subject, solvers[key], plan, seeds, batch, advance=advance, note=note) for key, plan in kept.items()
    }
    constants = {
        key: lipschitz(subject, solver, levels, seeds[:lipschitz_seeds], advance) for key, levels in watched.items()
    }
    limit = runs[REFERENCE, reference_nfe].images
    moments = {key: Moments.stream(result.images.split(64), subject.features) for key, result in runs.items()}
    target = subject.reference or moments[REFERENCE, reference_nfe]
    full = high_frequency_power(spectrum(limit))
    rows = []
    for (name, nfe), result in runs.items():
        power, calibration = spectrum(result.images), result.calibration
        rows.append(
            Row(
                method=name,
                title=titles[name],
                nfe=nfe,
                frechet=frechet_distance(moments[name, nfe], target),
                distance=float((result.images - limit).square().mean().sqrt()),
                energy_ratio=high_frequency_power(power) / full,
                network_calls=result.network_calls,
                backward_passes=result.backward_passes,
                seconds=result.seconds,
                levels=tuple((level.sigma, level.alpha) for level in kept[name, nfe].levels),
                rho=() if calibration is None else calibration.rho,
                tau=() if calibration is None else tuple(terms[0] if terms else () for terms in calibration.tau),
                gamma=result.gamma,
                spectrum=tuple(power.tolist()),
                lipschitz=constants.get((name, nfe), ()),
            )
        )
    return Comparison(
        subject=subject.name,
        solver=next((name for name, known in SOLVERS.items() if known == solver), repr(solver)),
        seeds=tuple(seeds),
        settings={**(settings or {}), "seconds in all": round(time.perf_counter() - begun, 1)},
        features=subject.features.name,
        against="real images" if subject.reference else "the many-step samples",
        rows=tuple(rows),
        images=tuple(result.images for result in runs.values()),
    )
