"""The paper's experiments in kind, on an embedded network or on a checkpoint of one's own.

    python benchmarks/paper.py --estimate
    python benchmarks/paper.py core bare modes --device cuda --compile --seconds 300
    python benchmarks/paper.py vp --model fashion --out benchmarks/results/paper_fashion.json
    python benchmarks/paper.py core --edm edm-cifar10-32x32-cond-vp.pkl --source edm --trust-pickle --real images.npz
    python benchmarks/paper.py table1 --ldm FOLDER --real images.npz

Records go to `--out` one by one; cells already there are skipped, so an interrupted run goes on where it stopped.
Plans (all, if none is named). Cells are taken budget by budget, 5 NFE first, so that a short run has the most telling:

    images  Figs 5, 10, 11, 12: PNG grids beside `--out`
    cost    Table 3: network calls, backward passes and time
    core    Fig. 7, Table 2: 2M, 3M, UniPC-3, Heun on EDM and log-SNR grids; plain, γ <= 1 by batch and by sample
    bare    the same solvers without their safeguard: full order to the last step
    table1  Algorithm 2 with the paper's weight, per dimension, and with matched interpolation
    modes   analytical, adaptive, sparse (first 3 steps); γ <= 1.1, 1.5; Algorithm 1 to the letter, batch and sample
    fig9    m = 1, 2, 3, 5, 10 probes beside the plain solver
    vp      only by name, for models with α < 1: γ <= 1 and Algorithm 2, also in coordinates x/α
    zero    core with a last step to σ = 0, as k-diffusion and diffusers end a run
    fig4    local Lipschitz constants of 16 samples

Seeds are 0 to samples − 1, labels seed mod classes. The paper's "steps" are (NFE + 1)/2: NFE counts evaluations of the
network. `fid` is the Fréchet distance of Inception features to real images, or, where there are none, to as many
samples of the same model by Heun's method in 35 evaluations from other seeds (`against` says which). `error` is its
standard error; `difference` is taken from the plain solver of the same seeds, its error sample by sample
(`metrics/frechet.py`). `score` is the inception score by the logits of EfficientNet-Lite0, `second` the distance of its
features to the model's own samples: the second opinion for which the paper takes DINOv2. Where every γ of the first
batch is 1 by a margin the run is the plain one: such cells are marked `idle` and not sampled further.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import Tensor

from paper_only.verdicts import difference
from recording import Records, machine, options, real_images
from steindiff import datasets, noise, sample, zoo
from steindiff._files import write_bytes
from steindiff.corrections import (
    Clamped,
    Correction,
    FirstSteps,
    Plain,
    Relaxation,
    Unclamped,
)
from steindiff.corrections.consistency import Consistency, Matched, PerDimension
from steindiff.denoisers import Denoiser, EDMDenoiser, Epsilon
from steindiff.diagnostics import certificate, lipschitz
from steindiff.grids import Karras, LogSNR
from steindiff.grids.base import Grid
from steindiff.images import png, to_uint8
from steindiff.integrations import edm
from steindiff.levels import Level, Levels
from steindiff.metrics import EfficientNetFeatures, InceptionFeatures, Moments, inception_score, references
from steindiff.metrics.frechet import Distance, distance
from steindiff.probes import VJP, Adaptive, Analytic, check_gradient
from steindiff.sampler import levels_for
from steindiff.schedules import EDM, Discrete
from steindiff.schedules.base import Schedule
from steindiff.solvers import DPMSolverMultistep, Heun, Solver
from steindiff.solvers.unipc import UniPCBh1

NFES = (5, 10, 8, 6, 20, 15, 12, 25)
"""The budgets of Table 2, most telling first."""
GRIDS = {"edm": Karras, "logsnr": LogSNR}
MARGIN = 1.02
"""A run is the plain one where every γ before its limit is at least this, in the first batch."""
PREFIXES = {"fid": "", "second": "second_"}
"""Of the fields that compare a distance with the plain solver's."""
OTHER_SEEDS = 2 * 10**6
"""First seed of a model's own many-step samples."""


def solver_of(name: str, *, lowered: bool) -> Solver:
    """A host of the paper, with or without a lower order on its last steps."""
    hosts: dict[str, Callable[[], Solver]] = {
        "2m": lambda: DPMSolverMultistep(2, lower_order_final=lowered),
        "3m": lambda: DPMSolverMultistep(3, lower_order_final=lowered),
        "unipc-3": lambda: UniPCBh1(3, lower_order_final=lowered),
        "heun": Heun,
    }
    return hosts[name]()


def literal(**options: Any) -> Relaxation:
    """Algorithm 1 to the letter, without a guard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the warning says is what is measured here
        return Relaxation(bounds=Unclamped(growth=None), **options)


ONE = VJP(1)
MODES: dict[str, Correction] = {
    "plain": Plain(),
    "clamped": Relaxation(ONE),
    "per sample": Relaxation(ONE, per_sample=True),
    "analytical": Relaxation(Analytic()),
    "adaptive": Relaxation(Adaptive(low=ONE)),
    "first 3": Relaxation(ONE, FirstSteps(3)),
    "maximum 1.1": Relaxation(ONE, bounds=Clamped(maximum=1.1)),
    "maximum 1.5": Relaxation(ONE, bounds=Clamped(maximum=1.5)),
    "literal": literal(probe=ONE),
    "literal, per sample": literal(probe=ONE, per_sample=True),
    "consistency": Consistency(Relaxation(ONE)),
    "consistency, per dimension": Consistency(Relaxation(ONE), weight=PerDimension()),
    "consistency, matched": Consistency(Relaxation(ONE), interpolation=Matched(), weight=PerDimension()),
    "normalised": Relaxation(ONE, normalised=True),
    "consistency, normalised": Consistency(Relaxation(ONE, normalised=True)),
    **{f"m = {m}": Relaxation(VJP(m)) for m in (2, 3, 5, 10)},
    **{f"m = {m}, per sample": Relaxation(VJP(m), per_sample=True) for m in (2, 3, 5, 10)},
}
"""What a record's `mode` may be; m is 1 unless it is named."""


@dataclass(frozen=True)
class Cell:
    """One number: a host on a grid, how its runs end, a budget, and what is done to its steps.

    `ending` is "lowered" (to the smallest σ, lower order on the last steps: the solvers' own public code), "zero" (a
    last step to σ = 0 of first order: k-diffusion, diffusers) or "bare" (to the smallest σ at full order). Heun's last
    step goes to 0 at odd budgets and to the smallest σ at even ones, which is how it can spend them.
    """

    solver: str
    grid: str
    ending: str
    nfe: int
    mode: str = "plain"

    @property
    def host(self) -> Solver:
        return solver_of(self.solver, lowered=self.ending != "bare")

    def levels(self, schedule: Schedule) -> Levels:
        zero = self.nfe % 2 == 1 if self.solver == "heun" else self.ending == "zero"
        grid: Grid = GRIDS[self.grid](to_zero=zero)
        return levels_for(self.host, grid, schedule, self.nfe)

    @property
    def passes(self) -> int:
        """Backward passes of a run, at most."""
        correction = MODES[self.mode]
        relaxation = correction.proposal if isinstance(correction, Consistency) else correction
        if not isinstance(relaxation, Relaxation) or isinstance(relaxation.probe, Analytic):
            return 0
        probe = relaxation.probe.low if isinstance(relaxation.probe, Adaptive) else relaxation.probe
        steps = min(self.nfe, 3 if isinstance(relaxation.activation, FirstSteps) else self.nfe)
        return steps * getattr(probe, "probes", 1)


def hosts(ending: str, nfes: Sequence[int], modes: Sequence[str], names: Sequence[str] = ()) -> list[Cell]:
    """Cells of all hosts, budget by budget; of Heun, which has no safeguard, once only."""
    names = names or ("2m", "3m", "unipc-3", *(["heun"] if ending == "lowered" else []))
    return [Cell(name, grid, ending, nfe, mode) for nfe in nfes for name in names for grid in GRIDS for mode in modes]


CORE = ("plain", "clamped", "per sample")
OTHERS = ("analytical", "adaptive", "first 3", "maximum 1.1", "maximum 1.5", "literal", "literal, per sample")
SELF = ("plain", "consistency", "consistency, per dimension", "consistency, matched")
PROBES = ("plain", "clamped", *(f"m = {m}" for m in (2, 3, 5, 10)))
PER_SAMPLE = ("per sample", *(f"m = {m}, per sample" for m in (2, 3, 5, 10)))
PLANS: dict[str, list[Cell]] = {
    "core": hosts("lowered", NFES, CORE),
    "bare": hosts("bare", NFES, CORE),
    "table1": hosts("lowered", NFES[:-1], SELF, ("2m", "3m")),
    "modes": [
        *hosts("lowered", (5, 8), OTHERS, ("2m", "unipc-3", "heun")),
        *hosts("bare", (5, 8), OTHERS, ("3m",)),
    ],
    "fig9": [
        Cell("2m", "logsnr", ending, 5, mode) for ending in ("lowered", "bare") for mode in (*PROBES, *PER_SAMPLE)
    ],
    "zero": hosts("zero", NFES[:4], CORE),
    "vp": hosts("lowered", NFES[:3], (*CORE, "normalised", "consistency", "consistency, normalised"), ("2m", "3m")),
}
FIG4 = [(nfe, grid) for nfe in (6, 100) for grid in GRIDS]
OTHER_PLANS = ("images", "cost", "fig4")
"""Those that are not made of cells."""
FIGURES: dict[str, tuple[int, list[Cell]]] = {
    "fig5": (32, [Cell(name, "edm", "lowered", 5, mode) for name in ("2m", "unipc-3") for mode in CORE[:2]]),
    "fig10": (32, [Cell("2m", "logsnr", "lowered", 20, "clamped")]),
    "fig11": (
        16,
        [
            Cell("unipc-3", "logsnr", "lowered", 5),
            *(Cell("2m", "logsnr", ending, 5, mode) for ending in ("lowered", "bare") for mode in CORE),
            *(Cell("2m", "logsnr", "lowered", 5, mode) for mode in ("literal", "consistency")),
        ],
    ),
    "fig12": (16, [Cell("2m", "logsnr", "lowered", 10, mode) for mode in CORE]),
}
"""Image grids: how many seeds a row, and the rows."""


@dataclass
class Subject:
    """A model to measure on.

    Attributes:
        name: for the records.
        shape: of one state.
        schedule: the forward process.
        denoisers: the denoiser of samples with given seeds.
        wide: the same in float32.
        decode: states to images in [−1, 1], `(B, C, H, W)`.
        real: moments of real images under Inception; None: its own many-step samples are compared with.
    """

    name: str
    shape: tuple[int, ...]
    schedule: Schedule
    denoisers: Callable[[Sequence[int]], Denoiser]
    wide: Callable[[Sequence[int]], Denoiser]
    decode: Callable[[Tensor], Tensor] = lambda x: x
    real: Moments | None = None


def embedded(name: str, device: str, compiled: int) -> Subject:
    """A network of the zoo, in float32: γ rests on small differences.

    `compiled` is the batch that is compiled for, 0 for none: batches of other sizes run as they are.
    """
    wide = zoo.load(name, device).to(memory_format=torch.channels_last)
    is_edm = isinstance(wide, zoo.EDMPrecond)
    quick = torch.compile(wide) if compiled else wide

    def denoisers(call: Callable[..., Tensor], seeds: Sequence[int]) -> Denoiser:
        labels = torch.tensor([seed % wide.num_classes for seed in seeds], device=device)
        return (EDMDenoiser if is_edm else Epsilon)(partial(call, labels=labels))

    schedule = EDM() if is_edm else Discrete.linear(*wide.betas, wide.steps)
    real = references.load(f"{name}-train") if (references.FOLDER / f"{name}-train.npz").exists() else None
    return Subject(
        name,
        wide.shape,
        schedule,
        lambda seeds: denoisers(quick if len(seeds) == compiled else wide, seeds),
        partial(denoisers, wide),
        real=real,
    )


def checkpoint(path: Path, source: Path | None, device: str, compiled: int, *, trust_pickle: bool) -> Subject:
    """An EDM or EDM2 network in pixels, in the precision it chooses; `compiled` as in `embedded`."""
    network: Any = edm.load(path, source=source, trust_pickle=trust_pickle, device=device)
    shape = (network.img_channels, network.img_resolution, network.img_resolution)
    classes = int(getattr(network, "label_dim", 0))
    quick = torch.compile(network) if compiled else network

    def denoisers(seeds: Sequence[int]) -> Denoiser:
        labels = [seed % classes for seed in seeds] if classes else None
        return edm.denoiser(quick if len(seeds) == compiled else network, labels)

    return Subject(path.stem, shape, edm.schedule_of(network), denoisers, denoisers)


def latent(folder: Path, device: str) -> Subject:
    """A latent diffusion pipeline of diffusers without conditions: its U-Net, autoencoder and schedule."""
    from diffusers import DiffusionPipeline

    from steindiff.integrations.diffusers import denoiser, family_of

    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True).to(device)
    coder = next(module for name in ("vqvae", "vae") if (module := getattr(pipe, name, None)) is not None)
    shape = (pipe.unet.config.in_channels, pipe.unet.config.sample_size, pipe.unet.config.sample_size)
    for module in (pipe.unet, coder):
        module.requires_grad_(False)

    def denoisers(seeds: Sequence[int]) -> Denoiser:
        return denoiser(pipe.unet, pipe.scheduler)

    def decode(x: Tensor) -> Tensor:
        return torch.cat([coder.decode(part / coder.config.scaling_factor).sample for part in x.split(16)])

    return Subject(folder.name, shape, family_of(pipe.scheduler).schedule, denoisers, denoisers, decode)


class Made(NamedTuple):
    """The samples of a cell, as their features say: distances by name of the field, the score, what was spent."""

    distances: dict[str, Distance]
    score: dict[str, float]
    spent: dict[str, Any]

    def fields(self) -> dict[str, Any]:
        """As a record has them."""
        found = {}
        for name, made in self.distances.items():
            found |= {name: round(made.value, 4), f"{name}_error": round(made.error, 4)}
        return found | {name: round(value, 4) for name, value in self.score.items()}

    def beside(self, plain: Made) -> dict[str, Any]:
        """The differences from the plain solver's samples, and the verdicts."""
        found = {}
        for name, prefix in PREFIXES.items():
            if name in self.distances:
                base = plain.distances[name]
                gap = difference(self.distances[name], base)
                found |= {f"{prefix}difference": round(gap.value, 4), f"{prefix}difference_error": round(gap.error, 4)}
                found[f"{prefix}verdict"] = gap.verdict(base.value)
        return found


@dataclass
class Bench:
    """A subject, the feature networks and the reference, made when first needed."""

    subject: Subject
    inception: Path
    efficientnet: Path | None
    device: str
    samples: int
    batch: int
    tf32: bool = False

    def __post_init__(self) -> None:
        self.bases: dict[Cell, Made] = {}

    @cached_property
    def features(self) -> InceptionFeatures:
        return InceptionFeatures.load(self.inception, self.device, tf32=self.tf32)

    @cached_property
    def classifier(self) -> EfficientNetFeatures | None:
        return self.efficientnet and EfficientNetFeatures.load(self.efficientnet, self.device)

    @cached_property
    def unit_noise(self) -> Tensor:
        return noise(range(self.samples), self.subject.shape, Level(0.0, 1.0, 1.0)).to(self.device)

    @cached_property
    def reference(self) -> Moments:
        if self.subject.real is not None:
            return self.subject.real.to(self.device)
        return self.own(self.features)

    @cached_property
    def second_reference(self) -> Moments:
        assert self.classifier is not None
        return self.own(self.classifier)

    @cached_property
    def many_step(self) -> list[Tensor]:
        """The model's own many-step samples of other seeds, bytes in parts; sampled once, for all features."""
        limit = Cell("heun", "edm", "zero", 35)
        runs = (self.run(limit, range(a, b), None) for a, b in self.parts(OTHER_SEEDS))
        return [part.cpu() for x, _ in runs for part in self.pixels(x)]

    def own(self, features: Callable[[Tensor], Tensor]) -> Moments:
        """Of the model's own many-step samples."""
        return Moments.stream((part.to(self.device) for part in self.many_step), features)

    @property
    def against(self) -> str:
        return "real images" if self.subject.real is not None else "own samples, Heun, 35 evaluations"

    def parts(self, first: int = 0) -> Iterator[tuple[int, int]]:
        for start in range(first, first + self.samples, self.batch):
            yield start, min(start + self.batch, first + self.samples)

    def run(self, cell: Cell, seeds: range, unit: Tensor | None) -> tuple[Tensor, Any]:
        """The states of some seeds, and the run's own account."""
        levels = cell.levels(self.subject.schedule)
        if unit is None:
            unit = noise(seeds, self.subject.shape, Level(0.0, 1.0, 1.0)).to(self.device)
        out = sample(self.subject.denoisers(seeds), unit * levels[0].sigma, levels, cell.host, MODES[cell.mode])
        return out.x, out

    def pixels(self, x: Tensor) -> tuple[Tensor, ...]:
        """Bytes in parts, grey images as three equal channels."""
        with torch.no_grad():
            return to_uint8(self.subject.decode(x)).expand(-1, 3, -1, -1).split(500)

    @torch.no_grad()
    def make(self, cell: Cell) -> Made | dict[str, Any]:
        """Sample a cell and take its features; only what was spent, where the first batch shows it to be idle."""
        features, second, spent = [], [], {}
        for start, stop in self.parts():
            x, out = self.run(cell, range(start, stop), self.unit_noise[start:stop])
            if start == 0:
                spent = account(out)
                if spent.get("idle") and not cell.mode.startswith("consistency"):
                    return spent
            for part in self.pixels(x):
                features.append(self.features(part))
                if self.classifier is not None:
                    second.append(self.classifier(part))
        distances = {"fid": distance(torch.cat(features), self.reference)}
        if self.classifier is None:
            return Made(distances, {}, spent)
        seen = torch.cat(second)
        distances["second"] = distance(seen, self.second_reference)
        score = inception_score(self.classifier.classify(seen).cpu(), splits=min(10, self.samples))
        return Made(distances, {"score": score.mean, "score_deviation": score.deviation}, spent)

    def base(self, cell: Cell) -> Made:
        """The plain solver's samples beside a cell, made once a session."""
        plain = replace(cell, mode="plain")
        if plain not in self.bases:
            made = self.make(plain)
            assert isinstance(made, Made)
            self.bases[plain] = made
        return self.bases[plain]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The record of a cell."""
        begun = time.monotonic()
        base = self.base(cell)
        record: dict[str, Any] = {**self.identity(cell), "seed": 0, "against": self.against, "tf32": self.tf32}
        try:
            made = base if cell.mode == "plain" else self.make(cell)
        except RuntimeError as error:
            made, record["error"] = {}, str(error).splitlines()[0]
        if isinstance(made, Made):
            record |= {**made.spent, **made.fields(), **(made.beside(base) if cell.mode != "plain" else {})}
        elif made:  # the plain samples
            record |= {**made, **base.fields(), **base.beside(base)}
        record["seconds"] = round(time.monotonic() - begun, 2)
        return record | machine(self.device)

    def identity(self, cell: Cell) -> dict[str, Any]:
        """The fields that tell cells apart."""
        return {"model": self.subject.name, **asdict(cell), "samples": self.samples}

    def fig4(self, asked: tuple[int, str]) -> dict[str, Any]:
        """Local Lipschitz constants of 2M's steps, of 16 samples, in float32; in 100 evaluations of each tenth step."""
        nfe, grid = asked
        cell = Cell("2m", grid, "zero", nfe)
        levels = cell.levels(self.subject.schedule)
        seeds = range(min(16, self.samples))
        begun = time.monotonic()
        found = lipschitz(
            self.subject.wide(seeds),
            noise(seeds, self.subject.shape, levels[0]).to(self.device),
            levels,
            cell.host,
            torch.Generator().manual_seed(0),
            every=max(1, nfe // 10),
            iterations=100,
            tolerance=2e-3,
        )
        worst = found.transition.amax(1)
        record = {
            **self.constants(asked),
            "samples": len(seeds),
            "tolerance": 2e-3,
            "sigma": rounded(found.sigma),
            "transition_median": rounded(found.transition.median(1).values),
            "transition_max": rounded(worst),
            "denoiser_median": rounded(found.denoiser.median(1).values),
            "denoiser_max": rounded(found.denoiser.amax(1)),
            "peak": float(worst.max()),
            "expanding": int((worst > 1.0).sum()),
            "measured": len(worst),
        }
        if len(worst) == len(levels) - 1:
            rows = certificate(levels, found.denoiser.amax(1).tolist(), found.noise.amax(1).tolist())
            record["certified"] = sum(rows.holds)
        return record | {"seconds": round(time.monotonic() - begun, 1)} | machine(self.device)

    def constants(self, asked: tuple[int, str]) -> dict[str, Any]:
        """The fields that tell one part of Fig. 4 from another: its evaluations and its grid."""
        nfe, grid = asked
        return {"figure": "fig4", "model": self.subject.name, "grid": grid, "nfe": nfe}

    def cost(self, repeats: int = 2) -> Iterator[dict[str, Any]]:
        """Table 3, counted: one batch of 2M in 5 evaluations, the least time of several in turn."""
        cells = [Cell("2m", "logsnr", "lowered", 5, mode) for mode in (*MODES, "plain")]
        seconds = {cell: math.inf for cell in cells}
        spent = {}
        seeds = range(min(self.batch, self.samples))
        for _ in range(repeats + 1):  # the first also sets up the kernels
            for cell in cells:
                begun = time.monotonic()
                x, out = self.run(cell, seeds, self.unit_noise[: len(seeds)])
                x.sum().item()  # waits for the device
                seconds[cell], spent[cell] = min(seconds[cell], time.monotonic() - begun), account(out)
        plain = seconds[cells[0]]
        for cell in dict.fromkeys(cells):
            yield {
                "table": "table3",
                "model": self.subject.name,
                **asdict(cell),
                "batch": len(seeds),
                **{name: spent[cell][name] for name in ("nfe", "network_calls", "backward_passes")},
                "seconds": seconds[cell],
                "ratio": seconds[cell] / plain,
                **machine(self.device),
            }

    def images(self, out: Path) -> Iterator[dict[str, Any]]:
        """The figures that are images: one row a cell, one column a seed."""
        for figure, (count, cells) in FIGURES.items():
            rows = []
            for cell in cells:
                try:
                    x, _ = self.run(cell, range(count), None)
                except RuntimeError:  # not even finite
                    x = torch.zeros(count, *self.subject.shape, device=self.device)
                rows.append(torch.cat(self.pixels(x)).cpu())
            tiles = torch.stack(rows)  # (rows, count, 3, H, W)
            sheet = tiles.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)
            path = out.with_name(f"{out.stem}_{figure}.png")
            write_bytes(path, png(sheet))
            titles = [asdict(cell) for cell in cells]
            yield {"figure": figure, "model": self.subject.name, "rows": titles, "seeds": count, "file": path.name}


def rounded(values: Any) -> list[float]:
    return [round(float(value), 4) for value in values]


def account(out: Any) -> dict[str, Any]:
    """What a run cost, its γ step by step (mean over the batch), and whether it was idle."""
    spent = {"nfe": out.nfe, "network_calls": out.network_calls, "backward_passes": out.backward_passes}
    active = [row for row in out.statistics if row.get("active")]
    if active:
        spent |= {
            "gamma": rounded(row["gamma"].mean() for row in active),
            "optimum": rounded(row["optimum"].mean() for row in active),
            "below_one": rounded((row["gamma"] < 1.0).double().mean() for row in active),
            "idle": all(float(row["optimum"].min()) >= MARGIN and float(row["gamma"].max()) == 1.0 for row in active),
        }
    rho = [row["rho"].median() for row in out.statistics if "rho" in row]
    return spent | ({"rho": rounded(rho)} if rho else {})


FORWARD = {True: 25_000.0, False: 13_000.0}
"""Evaluations a second of the CIFAR-10 network on an H200, compiled or not."""
BACKWARD = 2.4
"""What a derivative costs there, in evaluations."""
FEATURES = 6_000.0
"""Images a second through Inception there, in TF32."""


def estimate(cells: Sequence[Cell], samples: int, *, compiled: bool) -> float:
    """Seconds on an H200, if no cell is idle."""
    passes = sum(cell.nfe + BACKWARD * cell.passes for cell in cells)
    return samples * (passes / FORWARD[compiled] + len(cells) / FEATURES) + 0.7 * len(cells)


def main() -> None:
    parser = options(__doc__, "paper")
    parser.add_argument("plans", nargs="*", metavar="plan", help=", ".join((*PLANS, *OTHER_PLANS)))
    parser.add_argument("--plans", nargs="+", dest="more_plans", default=[], help="the same, by name")
    parser.add_argument("--model", default="cifar10", choices=zoo.names())
    parser.add_argument("--edm", type=Path, help="an EDM or EDM2 checkpoint in the place of the embedded model")
    parser.add_argument("--source", type=Path, help="folder of a clone of NVlabs/edm or edm2, for --edm")
    parser.add_argument("--trust-pickle", action="store_true", help="run the code a pickle brings along")
    parser.add_argument("--ldm", type=Path, help="folder of an unconditional latent pipeline of diffusers")
    parser.add_argument("--real", type=Path, help=".npz with bytes `images` (N, C, H, W) to compare with")
    parser.add_argument("--features", type=Path, help="EfficientNet-Lite0 weights, for the inception score")
    parser.add_argument("--compile", action="store_true", help="compile the network: twice as fast, a minute to wait")
    parser.add_argument("--estimate", action="store_true", help="say how long each plan takes on an H200, and stop")
    parser.set_defaults(samples=5_000)
    args = parser.parse_args()
    plans = [*args.plans, *args.more_plans] or [plan for plan in (*PLANS, *OTHER_PLANS) if plan != "vp"]
    if unknown := [plan for plan in plans if plan not in (*PLANS, *OTHER_PLANS)]:
        parser.error(f"plans must be of {', '.join((*PLANS, *OTHER_PLANS))}, got {unknown[0]}")
    if args.estimate:
        for plan in (plan for plan in plans if plan in PLANS):
            seconds = estimate(PLANS[plan], args.samples, compiled=args.compile)
            print(f"{plan}: {len(PLANS[plan])} cells, {seconds:.0f} s")
        return

    begun = time.monotonic()
    torch.backends.cudnn.benchmark = True  # batches of one size: the fastest kernels pay
    if args.tf32:
        torch.set_float32_matmul_precision("high")
    if args.compile:  # probes pull several directions through one graph
        functorch_config.donated_buffer = False
    compiled = args.batch if args.compile else 0
    if args.edm:
        subject = checkpoint(args.edm, args.source, args.device, compiled, trust_pickle=args.trust_pickle)
    elif args.ldm:
        subject = latent(args.ldm, args.device)
    else:
        subject = embedded(args.model, args.device, compiled)
    inception = args.inception or datasets.inception()
    bench = Bench(subject, inception, args.features, args.device, args.samples, args.batch, args.tf32)
    if args.real:
        images = real_images(subject.name, args.real, 50_000 if args.samples >= 5_000 else args.samples)
        subject.real = Moments.stream((part.to(args.device) for part in images.split(500)), bench.features)
    level = Cell("2m", "edm", "lowered", 5).levels(subject.schedule)[2]
    one, x = subject.wide([0]), noise([0], subject.shape, level).to(args.device)
    check_gradient(lambda z: one(z, level), x, 0.05 * level.sigma)

    records = Records(args.out)
    until = begun + args.seconds
    cells = sorted((cell for plan in plans for cell in PLANS.get(plan, [])), key=lambda cell: NFES.index(cell.nfe))
    others: dict[str, tuple[dict[str, str], Callable[[], Iterator[dict[str, Any]]]]] = {
        "images": ({"figure": "fig5"}, partial(bench.images, args.out)),
        "cost": ({"table": "table3"}, bench.cost),
    }
    for plan, (mark, make) in others.items():
        if plan in plans and {"model": subject.name, **mark} not in records and time.monotonic() < until:
            for record in make():
                records.add(record)
    records.measure(cells, bench.identity, bench.measure, until)
    if "fig4" in plans:  # it takes minutes
        records.measure(FIG4, bench.constants, bench.fig4, until)


if __name__ == "__main__":
    main()
