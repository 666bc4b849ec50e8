r"""The measured comparison: the same seeds by several methods, and what each of them costs and gives.

Every number is measured on the images of this very run, nothing is looked up:

- own distance: Fréchet distance of features to the model's own many-step samples *of other seeds*, beside its floor,
  the distance of two sets of many-step samples. Sharpening cannot lower it; this is the number to judge by;
- Fréchet distance to real images, where their statistics ship with the model;
- PSNR, LPIPS and root mean square distance to the same seed's many-step image. Mean-square error rewards blur: of all
  guesses the average of the plausible images has the smallest error, and an average is blurred;
- energy ratio: power in the upper half of the frequencies over that of the many-step images. Blur is below 1;
- spread: standard deviation of samples of the same condition over that of the many-step samples. Collapse is below 1;
- network calls, backward passes and seconds.

Beside them stand, step by step, the grid, γ, ρ and the local Lipschitz constant of the solver's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._progress import Listener
from steindiff.bases import DCT
from steindiff.calibration import Calibration
from steindiff.corrections import CORRECTIONS
from steindiff.corrections.base import WithHook
from steindiff.corrections.replay import Replay
from steindiff.diagnostics import candidate, operator_norm
from steindiff.levels import Levels
from steindiff.loop import StepInfo, sample
from steindiff.metrics import LPIPS, Moments, RandomFeatures, psnr, spread
from steindiff.metrics.frechet import distance
from steindiff.metrics.lpips import SMALLEST
from steindiff.model import Model
from steindiff.models import shipped_calibration
from steindiff.sampler import Sampler
from steindiff.solvers import SOLVERS, DPMSolverMultistep, Solver
from steindiff.tableau import Step

POWER_ITERATIONS = 4
"""At most this many for a Lipschitz constant, which they approach from below; `steindiff diagnose` takes more."""
LIPSCHITZ_EFFORT = 4 * POWER_ITERATIONS
"""Roughly how many evaluations' time one of them takes."""
OTHER_SEEDS = 2**31
"""Distance between the compared seeds and those of the model's other many-step samples."""
NEAR_SEEDS = 1_000
"""So many seeds from there on are looked at for one of the same condition."""


class Features(Protocol):
    """A map of images in [−1, 1], `(B, C, H, W)`, to features `(M, F)`, M a multiple of B; `name` is for the table."""

    name: str

    def __call__(self, images: Tensor) -> Tensor: ...


class Yardstick(NamedTuple):
    """What distances are measured by: features, their moments on real images and the network of LPIPS, if known."""

    features: Features
    reference: Moments | None = None
    lpips: LPIPS | None = None

    def see(self, images: Tensor) -> Tensor:
        """The features of images `(N, C, H, W)`."""
        with torch.no_grad():
            return torch.cat([self.features(part).cpu() for part in images.split(64)])

    def perceived(self, images: Tensor, limit: Tensor) -> float | None:
        """Mean LPIPS of images to others in [−1, 1], `(N, C, H, W)`; None without weights, or for small images."""
        if self.lpips is None or min(images.shape[-2:]) < SMALLEST:
            return None
        device = next(self.lpips.parameters()).device
        pairs = zip(images.to(device).split(64), limit.to(device).split(64), strict=True)
        return float(torch.cat([self.lpips(a, b) for a, b in pairs]).mean())


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        title: as shown.
        sampler: how to spend a number of evaluations of a model by a solver; None where it has nothing to offer.
        effort: roughly what an evaluation costs in time, in evaluations of the plain solver; for progress.
    """

    title: str
    sampler: Callable[[Model, Solver, int], Sampler | None]
    effort: float = 1.0


def on_grid(title: str, grid: str, correction: str = "plain", own: Solver | None = None) -> Method:
    """The plain solver on a grid, or one of the corrections, whose probes are backward passes; all by name.

    `own` is the solver of this row; None: that of the comparison.
    """
    effort = 1.0 if correction == "plain" else 2.5
    return Method(title, lambda model, solver, nfe: Sampler(own or solver, grid, nfe, correction), effort)


def calibrated(find: Callable[[Model, Solver, int], Calibration | None] | None = None) -> Method:
    """Calibration, replayed: by default those that ship."""

    def sampler(model: Model, solver: Solver, nfe: int) -> Sampler | None:
        found = (find or shipped_calibration)(model, solver, nfe)
        return None if found is None else found.sampler()

    return Method("calibrated", sampler)


def default_methods(solver: Solver | None = None) -> dict[str, Method]:
    """The methods by the name they have in files and on the command line, in the order of the table.

    Beside the plain solver on two grids, the paper's relaxation and calibration: every correction somebody registered.

    Args:
        solver: the comparison's. On DPM-Solver++ the relaxation's γ is 1, a plain step: there the relaxation is shown
            on UniPC-3, beside UniPC-3 itself.
    """
    methods = {"edm": on_grid("EDM grid", "edm"), "logsnr": on_grid("log-SNR grid", "logsnr")}
    host = SOLVERS["unipc-bh1-3"] if isinstance(solver, DPMSolverMultistep) else None
    if host is not None:
        methods["unipc"] = on_grid("UniPC-3", "edm", own=host)
    title = "relaxation" if host is None else "relaxed UniPC-3"
    methods["relaxation"] = on_grid(title, "edm", "relaxation", host)
    own = {name for name in CORRECTIONS if type(CORRECTIONS[name]).__module__.startswith("steindiff.")}
    methods |= {name: on_grid(name, "logsnr", name) for name in CORRECTIONS if name not in own}
    return methods | {"calibrated": calibrated()}


REFERENCE = "reference"
"""The many-step reference's name in the same places."""
REFERENCE_SOLVER = SOLVERS["dpmpp-2m"]
"""Its solver, whichever is compared: with many steps all that converge make the same of a model."""


def many_steps(nfe: int) -> Sampler:
    """The sampler of the reference."""
    return Sampler(REFERENCE_SOLVER, "edm-to-zero", nfe)


@dataclass(frozen=True)
class CompareOptions:
    """How a comparison runs.

    Args:
        batch: samples evaluated together; halved where memory runs out.
        reference_nfe: evaluations of the many-step reference (DPM-Solver++(2M), EDM grid).
        lipschitz_seeds: on how many seeds Lipschitz constants are measured; 0 leaves them out.
        listener: told what happens.
        pictures: samples to images in [−1, 1], such as an autoencoder's decoder; None: samples are images.
    """

    batch: int = 16
    reference_nfe: int = 24
    lipschitz_seeds: int = 1
    listener: Listener = field(default_factory=Listener)
    pictures: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        at_least("batch", self.batch, 1)
        at_least("reference_nfe", self.reference_nfe, 2)
        at_least("lipschitz_seeds", self.lipschitz_seeds, 0)


class Run(NamedTuple):
    """What one method made of all seeds: images `(N, C, H, W)` on the CPU, its cost per image, and the time of all."""

    images: Tensor
    network_calls: int
    backward_passes: int
    seconds: float
    gamma: tuple[float, ...]


def run(model: Model, sampler: Sampler, seeds: Sequence[int], effort: float, options: CompareOptions) -> Run:
    """Sample all seeds by one sampler."""
    told = options.listener

    def on_step(info: StepInfo, size: int) -> None:
        if info.i < 0:
            told.note(f"out of memory: the batch of {size} is halved")
        else:
            told.advance(size * effort * (sampler.nfe or 0) / info.steps)

    parts = list(sampler.batches(model, seeds, options.batch, on_step=on_step))
    pictures = options.pictures or (lambda x: x)
    first = parts[0].result
    # The relaxation's γ for each step, 1 where it did not act; none if it never acted.
    gammas = [float(torch.as_tensor(step.get("gamma", 1.0)).mean()) for step in first.statistics]
    acted = any("gamma" in step for step in first.statistics)
    return Run(
        torch.cat([pictures(part.result.x).clamp(-1, 1).cpu() for part in parts]),
        first.network_calls,
        first.backward_passes,
        sum(part.seconds for part in parts),
        tuple(gammas) if acted else (),
    )


def other(model: Model, seeds: Sequence[int]) -> list[int]:
    """As many other seeds of the same conditions, none of which is compared.

    Where no near one has a seed's condition, because each has its own, any serves.
    """
    found: dict[int, None] = {}
    for seed in seeds:
        first = seed + OTHER_SEEDS
        wanted = model.condition_of(seed)
        free = (k for k in range(first, first + NEAR_SEEDS) if k not in found)
        same = (k for k in free if model.condition_of(k) == wanted)
        found[next(same, None) or next(k for k in count(first) if k not in found)] = None
    return list(found)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method at one number of evaluations; the columns of the table are its numbers.

    `honest` is the Fréchet distance to the model's own many-step samples of other seeds, its interval two standard
    errors either side; `frechet` that to real images. `distance` (root mean square), `psnr` and `lpips` are to the
    many-step image of the same seed; `energy_ratio` and `spread` over those of the many-step images. `network_calls`
    and `backward_passes` are per image, `seconds` for all. Then what charts show: (σ, α) and told factor of every
    level, the calibration's ρ and τ_1 (steps × bands), the relaxation's γ, mean power per frequency ring, the plain
    step's Lipschitz constants.
    """

    method: str
    title: str
    nfe: int
    honest: float
    honest_interval: tuple[float, float]
    frechet: float | None
    distance: float
    psnr: float
    lpips: float | None
    energy_ratio: float
    spread: float
    network_calls: int
    backward_passes: int
    seconds: float
    levels: tuple[tuple[float, float], ...]
    told: tuple[float, ...]
    rho: tuple[tuple[float, ...], ...]
    tau: tuple[tuple[float, ...], ...]
    gamma: tuple[float, ...]
    spectrum: tuple[float, ...]
    lipschitz: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A finished comparison.

    Attributes:
        model: name of the model.
        solver: name of the solver.
        seeds: one for each image.
        settings: what was asked for, what it ran on and how long it took in all, by name.
        features: name of the features of the Fréchet distances.
        floor: own distance of the many-step samples of these seeds: what no sampler can be expected to beat.
        rows: by method and number of evaluations; the many-step reference is last.
        images: `(N, C, H, W)` in [−1, 1] for each row, in the same order.
    """

    model: str
    solver: str
    seeds: tuple[int, ...]
    settings: Mapping[str, Any]
    features: str
    floor: float
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


def lipschitz(model: Model, solver: Solver, levels: Levels, seeds: Sequence[int], told: Listener) -> tuple[float, ...]:
    """The largest local Lipschitz constant of each of the solver's plain steps on a run of some seeds."""
    found = []

    def look(step: Step, x: Tensor, levels: Levels, i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        norm = operator_norm(partial(candidate, step), x, generator, iterations=POWER_ITERATIONS, tolerance=0.05)
        found.append(float(norm.max()))
        told.advance(len(seeds) * LIPSCHITZ_EFFORT)

    sample(model.denoiser_for(seeds), model.noise(seeds, levels[0]), levels, solver, WithHook(look))
    return tuple(found)


def compare(
    model: Model,
    nfes: Sequence[int],
    seeds: Sequence[int],
    *,
    solver: Solver | str = "dpmpp-2m",
    methods: Mapping[str, Method] | None = None,
    yardstick: Yardstick | None = None,
    options: CompareOptions | None = None,
) -> Comparison:
    """Sample the same seeds by every method and measure.

    Args:
        model: what to sample from; images `(C, H, W)`.
        nfes: numbers of evaluations.
        seeds: one image each, below 2**31.
        solver: the solver of all rows that bring none of their own, or its name.
        methods: the rows; default `default_methods()`.
        yardstick: what distances are measured by; default: features of a fixed random network, no real images.
        options: how to run.

    Raises:
        ValueError: if an argument is out of range; the message names it.
    """
    begun = time.perf_counter()
    options = options or CompareOptions()
    told = options.listener
    solver = SOLVERS.resolve("solver", solver)
    yardstick = yardstick or Yardstick(RandomFeatures(model.shape[0]))
    if not nfes:
        raise ValueError("nfes must hold at least one number of evaluations, got none")
    if len(seeds) < 2:
        raise ValueError(f"seeds must hold at least 2 (a Fréchet distance needs a covariance), got {len(seeds)}")
    table = default_methods(solver) if methods is None else methods
    planned = {(name, nfe): method.sampler(model, solver, nfe) for nfe in nfes for name, method in table.items()}
    for name, nfe in (key for key, sampler in planned.items() if sampler is None):
        told.note(f"{table[name].title}: no calibration of {model.name} for this solver at {nfe} evaluations, left out")
    fine_nfe = options.reference_nfe
    fine = many_steps(fine_nfe)
    kept = {key: sampler for key, sampler in planned.items() if sampler is not None} | {(REFERENCE, fine_nfe): fine}
    titles = {name: method.title for name, method in table.items()} | {REFERENCE: f"many steps ({fine_nfe})"}
    efforts = {name: method.effort for name, method in table.items()} | {REFERENCE: 1.0}
    levels = {key: sampler.levels_for(model.schedule) for key, sampler in kept.items()}
    watched = [key for key in kept if options.lipschitz_seeds and efforts[key[0]] == 1.0 and key[0] != REFERENCE]
    probing = LIPSCHITZ_EFFORT * options.lipschitz_seeds * sum(levels[key].steps for key in watched)
    told.begin(len(seeds) * (sum(nfe * efforts[name] for name, nfe in kept) + fine_nfe) + probing)

    # No row should pay for warming up.
    warm = Levels(levels[REFERENCE, fine_nfe][-2:], model.schedule)
    next(Sampler(REFERENCE_SOLVER, warm).batches(model, seeds, options.batch))

    runs = {(name, nfe): run(model, sampler, seeds, efforts[name], options) for (name, nfe), sampler in kept.items()}
    others = run(model, fine, other(model, seeds), 1.0, options).images
    probed = seeds[: options.lipschitz_seeds]
    constants = {key: lipschitz(model, kept[key].solver, levels[key], probed, told) for key in watched}
    limit = runs[REFERENCE, fine_nfe].images
    real = yardstick.reference
    target = Moments.of(yardstick.see(others))
    full = high_frequency_power(spectrum(limit))
    conditions = [model.condition_of(seed) for seed in seeds]
    rows = []
    for key, result in runs.items():
        name, nfe = key
        seen, power = yardstick.see(result.images), spectrum(result.images)
        own = distance(seen, target, len(seeds))
        correction = kept[key].correction
        steps = correction.steps if isinstance(correction, Replay) else ()
        rows.append(
            Row(
                method=name,
                title=titles[name],
                nfe=nfe,
                honest=own.value,
                honest_interval=own.interval,
                frechet=None if real is None else distance(seen, real).value,
                distance=float((result.images - limit).square().mean().sqrt()),
                psnr=psnr(result.images, limit),
                lpips=None if name == REFERENCE else yardstick.perceived(result.images, limit),
                energy_ratio=high_frequency_power(power) / full,
                spread=spread(result.images, limit, conditions),
                network_calls=result.network_calls,
                backward_passes=result.backward_passes,
                seconds=result.seconds,
                levels=tuple((level.sigma, level.alpha) for level in levels[key]),
                told=tuple(level.told for level in levels[key]),
                rho=tuple(weights.rho for weights in steps),
                tau=tuple(weights.tau[0] if weights.tau else () for weights in steps),
                gamma=result.gamma,
                spectrum=tuple(power.tolist()),
                lipschitz=constants.get(key, ()),
            )
        )
    return Comparison(
        model=model.name,
        solver=SOLVERS.name_of(solver) or repr(solver),
        seeds=tuple(seeds),
        settings={"seconds in all": round(time.perf_counter() - begun, 1)},
        features=yardstick.features.name,
        floor=rows[-1].honest,
        rows=tuple(rows),
        images=tuple(result.images for result in runs.values()),
    )
