r"""What is compared with what. Every section is a function from a workbench to records."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import steindiff
from bench.hosts import Missing, diffusers_loop
from bench.scope import Scope
from bench.timing import Cost, Spread, Stopwatch, Timing, Watched, interleaved
from paper_only.probes import OnPart
from steindiff._environment import installed
from steindiff.corrections.base import Correction, Plain
from steindiff.corrections.relaxation import Relaxation
from steindiff.denoisers import EDMDenoiser
from steindiff.denoisers.base import Denoiser
from steindiff.denoisers.wrappers import Autocast
from steindiff.grids import GRIDS
from steindiff.levels import Levels
from steindiff.loop import sample
from steindiff.model import Model
from steindiff.models import ByLabel, shipped_calibration
from steindiff.probes import VJP, Adaptive, Analytic
from steindiff.probes.hutchinson import fitting, pullback
from steindiff.sampler import levels_for
from steindiff.schedules import EDM
from steindiff.seeding import noise
from steindiff.solvers import SOLVERS
from steindiff.solvers.base import Solver
from steindiff.tableau import Step
from steindiff.zoo import EDMPrecond, UNet, UNetConfig

Record = dict[str, Any]
"""One line of a result, as JSON has it."""
Variants = Callable[[ByLabel, Sequence[int]], dict[str, Denoiser]]
"""Other ways to prepare a model's network, by name, for given seeds."""
GRID = "edm-to-zero"
"""The grid of runs that have no calibration of their own: it ends at σ = 0, where a relaxation does not act."""


@dataclass(frozen=True)
class Bench:
    """What is measured: a model, a solver, a number of evaluations, and how much of it."""

    subject: Model
    solver: Solver
    nfe: int
    scope: Scope
    seed: int = 0

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.subject.device

    @property
    def levels(self) -> Levels:
        """The levels of plain and relaxed runs."""
        return levels_for(self.solver, GRIDS[GRID], self.subject.schedule, self.nfe)

    def seeds(self, batch: int) -> range:
        """The seeds of a batch."""
        return range(self.seed, self.seed + batch)

    def noise(self, batch: int, levels: Levels, shape: Sequence[int] | None = None) -> Tensor:
        """Initial states, `(B, *)`, on the device."""
        return noise(self.seeds(batch), shape or self.subject.shape, levels[0]).to(self.device)

    def race(self, runs: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, Timing]:
        """Time implementations in turn."""
        return interleaved(runs, self.device, rounds, self.seed)

    def record(self, section: str, name: str, against: str, found: Mapping[str, Timing], **facts: Any) -> Record:
        """One line of the result; absolute times only where they are a GPU's."""
        timing = found[name]
        out: Record = {"section": section, "name": name, "against": against, **facts, **timing.cost._asdict()}
        out["ratio"] = timing.against(found[against])._asdict()
        if self.device.type == "cuda":
            out |= {"seconds": Spread.of(timing.seconds)._asdict(), "peak_bytes": timing.peak_bytes}
            out["synchronisations"] = timing.synchronisations
        return out


def sampling(
    denoiser: Denoiser, x: Tensor, levels: Levels, solver: Solver, correction: Correction | None = None
) -> Callable[[], Cost]:
    """A run of our loop."""

    def run() -> Cost:
        out = sample(denoiser, x, levels, solver, correction)
        return Cost(out.nfe, out.network_calls, out.backward_passes)

    return run


def bare(
    denoiser: Denoiser, x: Tensor, levels: Levels, solver: Solver, pulls: Sequence[Tensor] = ()
) -> Callable[[], Cost]:
    """The network alone, called as often as a run does it and at the same levels.

    With `pulls`, `(B, *)` each, every call of a step that ends above σ = 0 is linearised and they are pulled back
    through it: the least that probes can cost.
    """
    steps = [[stage.level for stage in solver.tableau(levels, i).stages] for i in range(levels.steps)]
    calls = [(level, levels[i + 1].sigma > 0) for i, stages in enumerate(steps) for level in stages]
    passes = len(pulls) * sum(probed for _, probed in calls)

    def run() -> Cost:
        with torch.no_grad():
            for level, probed in calls:
                if not (pulls and probed):
                    denoiser(x, level)
                    continue
                _, pull = pullback(partial(denoiser, level=level), x)
                for v in pulls:
                    pull(v)
        return Cost(len(calls), len(calls), passes)

    return run


def by_diffusers(bench: Bench, denoiser: Denoiser, batch: int) -> tuple[Callable[[], Cost], Callable[[], float]]:
    """A run of diffusers' loop, and a measurement: the relative distance of its samples to ours at the same levels.

    Raises:
        Missing: if there is no diffusers, or it is not compared for this solver.
    """
    if bench.solver != SOLVERS["dpmpp-2m"]:
        raise Missing("diffusers: compared for dpmpp-2m only")
    theirs, levels = diffusers_loop(denoiser, bench.subject.schedule, bench.nfe, bench.device)
    x = bench.noise(batch, levels)
    unit = x / levels[0].sigma

    def run() -> Cost:
        before = denoiser.calls
        theirs(unit)
        return Cost(bench.nfe, denoiser.calls - before)

    return run, lambda: distance(theirs(unit), sample(denoiser, x, levels, bench.solver).x)


def distance(a: Tensor, b: Tensor) -> float:
    """Root mean square of a − b over that of b."""
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def loop_section(bench: Bench) -> Iterator[Record]:
    """The plain loop against the bare network, replay and diffusers' own loop against the plain one."""
    calibration = shipped_calibration(bench.subject, bench.solver, bench.nfe)
    levels = bench.levels if calibration is None else calibration.levels
    if calibration is None:
        yield {"section": "loop", "name": "replay", "missing": f"no calibration at {bench.nfe} evaluations ships"}
    for batch in bench.scope.batches:
        denoiser, x = bench.subject.denoiser_for(bench.seeds(batch)), bench.noise(batch, levels)
        inside = Stopwatch(bench.device)
        watched = Watched(denoiser, inside)
        runs = {"plain": sampling(watched, x, levels, bench.solver)}
        facts: dict[str, dict[str, Any]] = {"plain": {}, "replay": {}}
        if calibration is not None:
            runs["replay"] = sampling(watched, x, levels, calibration.solver, calibration.replay())
        try:
            runs["diffusers"], measure = by_diffusers(bench, watched, batch)
            facts["diffusers"] = {"difference": measure()}
        except Missing as error:
            yield {"section": "loop", "name": "diffusers", "batch": batch, "missing": str(error)}
        found = bench.race({"network alone": bare(denoiser, x, levels, bench.solver), **runs}, bench.scope.repeats)
        for name, run in runs.items():
            share = outside(run, inside, bench.scope.repeats)._asdict()
            against = "network alone" if name == "plain" else "plain"
            yield bench.record("loop", name, against, found, batch=batch, outside=share, **facts[name])


def outside(run: Callable[[], Cost], inside: Stopwatch, repeats: int) -> Spread:
    """The share of a run's time spent outside the denoiser's calls, which `inside` times; both within the same run."""
    shares = []
    for _ in range(repeats):
        before, whole = inside.seconds, Stopwatch(inside.device)
        with whole.running():
            run()
        shares.append(1 - (inside.seconds - before) / whole.seconds)
    return Spread.of(shares)


def correction_section(bench: Bench) -> Iterator[Record]:
    """The paper's relaxation against the plain loop, and the least that its probes can cost."""
    for batch in bench.scope.corrected:
        levels = bench.levels
        denoiser, x = bench.subject.denoiser_for(bench.seeds(batch)), bench.noise(batch, levels)
        generator = torch.Generator().manual_seed(bench.seed)
        v = [torch.randn(x.shape, generator=generator).to(x.device) for _ in range(5)]
        corrections: dict[str, Correction] = {
            "plain": Plain(),
            "relaxation, 1 probe": Relaxation(VJP(1)),
            "relaxation, 5 probes": Relaxation(VJP(5)),
            "relaxation, 5 probes together": Relaxation(VJP(5, together=5)),
            "relaxation, 1 probe on half of the batch": Relaxation(OnPart(0.5, VJP(1))),
            "relaxation, 5 probes on half of the batch": Relaxation(OnPart(0.5, VJP(5))),
            "relaxation, analytical": Relaxation(Analytic()),
            "relaxation, adaptive": Relaxation(Adaptive()),
        }
        runs = {name: sampling(denoiser, x, levels, bench.solver, own) for name, own in corrections.items()}
        runs["network alone, 1 backward pass"] = bare(denoiser, x, levels, bench.solver, v[:1])
        runs["network alone, 5 backward passes"] = bare(denoiser, x, levels, bench.solver, v)
        found = bench.race(runs, bench.scope.repeats)
        for name in runs:
            yield bench.record("corrections", name, "plain", found, batch=batch, grid=GRID)


def random_unet(resolution: int, device: torch.device, seed: int) -> EDMPrecond:
    """A U-Net of the zoo with random weights, for images of any size: four levels, attention at the coarsest."""
    config = UNetConfig(
        shape=(3, resolution, resolution),
        num_classes=1,
        channels=(32, 64, 64, 64),
        blocks=1,
        attention=(False, False, False, True),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = EDMPrecond(UNet(config))
        for module in network.modules():
            if isinstance(module, nn.Conv2d):  # those that start as zero would hide the derivative
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    return network.to(device).eval().requires_grad_(False)


def scaling_section(bench: Bench) -> Iterator[Record]:
    """Time and memory against batch, evaluations, resolution and probes, on random U-Nets and the EDM schedule."""
    scope, rounds = bench.scope, max(2, bench.scope.repeats // 2)

    def setting(resolution: int, batch: int, nfe: int) -> tuple[Denoiser, Tensor, Levels]:
        levels = levels_for(bench.solver, GRIDS[GRID], EDM(), nfe)
        denoiser = EDMDenoiser(random_unet(resolution, bench.device, bench.seed))
        return denoiser, bench.noise(batch, levels, (3, resolution, resolution)), levels

    def sweep(axis: str, runs: Mapping[int, Callable[[], Cost]]) -> Iterator[Record]:
        found = bench.race({f"{axis} {value}": run for value, run in runs.items()}, rounds)
        for name, value in zip(found, runs, strict=True):
            yield bench.record("scaling", name, next(iter(found)), found, axis=axis, value=value)

    small = scope.resolutions[0]
    axes = {
        "batch": {n: (small, n, bench.nfe) for n in scope.sweep_batches},
        "nfe": {n: (small, scope.sweep_batch, n) for n in scope.sweep_nfes},
        "resolution": {n: (n, scope.sweep_batch, bench.nfe) for n in scope.resolutions},
    }
    for axis, settings in axes.items():
        yield from sweep(axis, {n: sampling(*setting(*own), bench.solver) for n, own in settings.items()})
    here = setting(small, scope.sweep_batch, bench.nfe)
    plain = {0: sampling(*here, bench.solver)}
    yield from sweep("probes", plain | {m: sampling(*here, bench.solver, Relaxation(VJP(m))) for m in scope.probes})
    for resolution in scope.resolutions:
        denoiser, x, levels = setting(resolution, scope.sweep_batch, bench.nfe)
        step = Step(bench.solver.tableau(levels, 0), denoiser)
        bounded = Relaxation(VJP(1, memory=scope.memory))
        runs = {"plain": sampling(denoiser, x, levels, bench.solver)}
        runs["bounded"] = sampling(denoiser, x, levels, bench.solver, bounded)
        found = bench.race(runs, rounds)
        facts = {"batch": len(x), "resolution": resolution, "limit_bytes": scope.memory}
        facts["samples_at_a_time"] = fitting(step, x, scope.memory)
        yield bench.record("memory", "bounded", "plain", found, **facts)


def channels_last(module: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of the network in channels-last layout."""
    last: Any = copy.deepcopy(module)
    network: Callable[..., Tensor] = last.to(memory_format=torch.channels_last)  # torch's own types know nothing of it
    return network


def compiled(module: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The network compiled; on a GPU its kernels become one CUDA graph, which writes its next output over its last."""
    fast: Callable[..., Tensor] = torch.compile(module, mode="reduce-overhead")
    return lambda *inputs, **conditions: fast(*inputs, **conditions).clone()


def network_section(bench: Bench, section: str, variants: Variants) -> Iterator[Record]:
    """The plain loop with the network prepared in other ways, against the network as it is."""
    levels, labelled = bench.levels, bench.subject.denoiser
    if not isinstance(labelled, ByLabel):
        yield {"section": section, "name": section, "missing": "the model has no network with labels"}
        return
    for batch in bench.scope.batches:
        seeds, x = bench.seeds(batch), bench.noise(batch, levels)
        ways = {"plain": labelled(seeds), **variants(labelled, seeds)}
        found = bench.race({n: sampling(way, x, levels, bench.solver) for n, way in ways.items()}, bench.scope.repeats)
        expected = sample(ways.pop("plain"), x, levels, bench.solver).x
        for name, way in ways.items():
            difference = distance(sample(way, x, levels, bench.solver).x, expected)
            yield bench.record(section, name, "plain", found, batch=batch, difference=difference)


def precision_section(bench: Bench) -> Iterator[Record]:
    """Channels-last layout, bfloat16 by autocast, and both."""

    def variants(labelled: ByLabel, seeds: Sequence[int]) -> dict[str, Denoiser]:
        last = replace(labelled, network=channels_last(labelled.network))(seeds)
        return {
            "channels-last": last,
            "bfloat16": Autocast(labelled(seeds), torch.bfloat16),
            "bfloat16, channels-last": Autocast(last, torch.bfloat16),
        }

    return network_section(bench, "precision", variants)


def compile_section(bench: Bench) -> Iterator[Record]:
    """`torch.compile`, with CUDA graphs where there are any."""

    def variants(labelled: ByLabel, seeds: Sequence[int]) -> dict[str, Denoiser]:
        return {"compiled": replace(labelled, network=compiled(labelled.network))(seeds)}

    return network_section(bench, "compile", variants)


SECTIONS: dict[str, Callable[[Bench], Iterator[Record]]] = {
    "loop": loop_section,
    "corrections": correction_section,
    "scaling": scaling_section,
    "precision": precision_section,
    "compile": compile_section,
}
"""What can be measured, by name."""

DEFAULT = {"cpu": ("loop", "corrections", "scaling"), "cuda": ("loop", "corrections", "scaling", "precision")}
"""What is measured unless told otherwise. Compiling takes minutes and a compiler, so it is asked for."""


def bench(
    subject: Model,
    solver: Solver,
    nfe: int,
    scope: Scope,
    *,
    sections: Sequence[str] | None = None,
    seed: int = 0,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measure, and return the record that belongs in a file. Where a section fails, the record says why.

    Args:
        subject: the model.
        solver: the solver of all runs.
        nfe: evaluations of a run.
        scope: how much is measured.
        sections: names from `SECTIONS`; default what suits the device.
        seed: first seed of a batch, and seed of the order of the rounds.
        advance: told the name of every section before it begins.

    Returns:
        Seed, device, versions, settings and `records`; ratios are median and quartiles over the rounds.
    """
    here = Bench(subject, solver, nfe, scope, seed)
    kind = subject.device.type
    records: list[Record] = []
    for name in DEFAULT.get(kind, DEFAULT["cpu"]) if sections is None else sections:
        advance(name)
        try:
            records.extend(SECTIONS[name](here))
        except RuntimeError as error:  # no memory, no compiler: the other sections are worth having all the same
            records.append({"section": name, "name": f"rest of {name}", "missing": str(error).strip().splitlines()[0]})
        if kind == "cuda":
            torch.cuda.empty_cache()
    return {
        "seed": seed,
        "model": subject.name,
        "solver": repr(solver),
        "nfe": nfe,
        "rounds": scope.repeats,
        "device": torch.cuda.get_device_name(subject.device) if kind == "cuda" else platform.machine(),
        "kind": kind,
        "threads": torch.get_num_threads(),
        "versions": {
            "steindiff": steindiff.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "diffusers": installed("diffusers"),
        },
        "records": records,
    }
