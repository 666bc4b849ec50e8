"""The contract of calibration: on fresh seeds never more than 1 % worse than the best plain grid.

    python benchmarks/contract.py
    python benchmarks/contract.py --few --out benchmarks/results/contract_few.json

Ten toys × every solver × 3 to 10 evaluations, by the default recipe. The measures are the weighted mismatch to the fine
trajectory of the same seeds and the honest distance, Fréchet to many-step samples of other seeds; each is taken on
`BLOCKS` sets of seeds, so that chance can be told from loss. A distance below that of the many-step samples themselves
counts as theirs: it is chance, too. Cells are independent: what `--out` holds is not measured again. Cells that break
the contract are repeated with more seeds. `--few` measures the recipe for few calls, at 3 and 4. tests/test_search.py
checks a sample of the cells. Writes `benchmarks/results/contract.json`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import steindiff as sd
from networks.mixture import Mixture
from recording import machine
from steindiff._files import write_json
from steindiff.corrections.alignment import Groups
from steindiff.denoisers import Denoiser, Gaussian
from steindiff.denoisers.prediction import Preconditioned
from steindiff.metrics import Moments, frechet_distance
from steindiff.sampler import levels_for
from steindiff.search import Mismatch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import toys  # noqa: E402

BUDGETS = range(3, 11)
GRIDS = ("logsnr", "edm", "uniform")
MEASURES = ("mismatch", "own")
SEED, FRESH, OTHERS = 19, 40_000, 50_000
BLOCKS, BLOCK, FINE = 8, 256, 64
"""Sets of fresh seeds, samples of each, and steps of the fine trajectory they are judged by."""
ALLOWED, ERRORS = 1.01, 2.0
"""A cell breaks the contract where it is worse than this factor by more than so many standard errors."""
RECIPE = sd.Recipe()
FEW = (3, 4)
"""Budgets the recipe for few calls is measured at."""
TINY = 1e-4
"""Mismatches below a ten-thousandth of the energy, and distances below that of it, are not told apart."""


def told(exact: Denoiser) -> sd.EDMDenoiser:
    """A closed form as a network, which can be told another level than the state's."""
    return sd.EDMDenoiser(lambda x, sigma: exact(x, sd.Level(float(sigma[0]), 1.0, float(sigma[0]))))


def mixture(shape: tuple[int, ...], count: int, seed: int) -> Mixture:
    """A few modes with spectra that fall like those of images."""
    centres = torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))
    centres = centres / (1.0 + torch.arange(float(shape[-1]))) ** (len(shape) > 1)
    return Mixture(centres, torch.full((count,), 0.05), torch.ones(count))


def conditional(seeds: range) -> Denoiser:
    """Four conditions whose means are ten times as far apart as their samples."""
    means = torch.tensor([[10.0 * ((seed % 4) - 1.5)] * 6 for seed in seeds])
    centred = Gaussian(torch.zeros(6), torch.linspace(0.05, 1.0, 6))
    return sd.EDMDenoiser(lambda x, s: means + centred(x - means, sd.Level(float(s[0]), 1.0, float(s[0]))))


class Layers(nn.Module):
    """A small raw EDM network F(x, c_noise)."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        size = math.prod(shape)
        self.inner = nn.Sequential(
            nn.Linear(size + 2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, size)
        )

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        told = torch.stack([torch.sin(2.0 * c), torch.cos(2.0 * c)], 1)
        return self.inner(torch.cat([x.flatten(1), told], 1)).reshape(x.shape)


@cache
def trained(name: str) -> Preconditioned:
    """A network trained for a second or two, with the loss of EDM."""
    data = toys.digits() if name == "digits" else mixture((2,), 5, 2).sample(4096, torch.Generator().manual_seed(1))
    scale = float(data.std())
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Layers(data.shape[1:], 128)
        adam = torch.optim.Adam(network.parameters(), lr=2e-3)
        around = (-1, *[1] * (data.ndim - 1))
        for _ in range(800):
            x = data[torch.randint(len(data), (256,))]
            sigma = scale * (2.0 * torch.randn(256) - 0.5).exp()
            weight = ((sigma**2 + scale**2) / (sigma * scale) ** 2).reshape(around)
            noisy = x + sigma.reshape(around) * torch.randn_like(x)
            loss = (weight * (Preconditioned(network, scale)(noisy, sigma) - x).square()).mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
    return Preconditioned(network.requires_grad_(False), scale)


def images() -> Mixture:
    return Mixture(toys.digits()[:100], torch.full((100,), 0.02), torch.ones(100))


TOYS: dict[str, Callable[[], sd.Model]] = {
    "line, EDM": lambda: sd.Model(told(mixture((1,), 4, 1)), sd.EDM(), (1,)),
    "line, VP": lambda: sd.Model(told(mixture((1,), 4, 1)), sd.VP(), (1,)),
    "line, flow": lambda: sd.Model(told(mixture((1,), 4, 1)), sd.Flow(), (1,)),
    "vectors, VP": lambda: sd.Model(told(mixture((8,), 11, 8)), sd.VP(), (8,)),
    "vectors, cosine": lambda: sd.Model(told(mixture((8,), 11, 8)), sd.Cosine(), (8,)),
    "signals, EDM": lambda: sd.Model(told(mixture((1, 12), 40, 3)), sd.EDM(), (1, 12)),
    "conditions, VP": lambda: sd.Model(conditional, sd.VP(), (6,), condition=lambda seed: seed % 4),
    "images, cosine": lambda: sd.Model(told(images()), sd.Cosine(), toys.SHAPE),
    "trained plane, flow": lambda: sd.Model(sd.EDMDenoiser(lambda x, s: trained("plane")(x, s)), sd.Flow(), (2,)),
    "trained images, EDM": lambda: sd.Model(sd.EDMDenoiser(lambda x, s: trained("digits")(x, s)), sd.EDM(), toys.SHAPE),
}


class Cell(NamedTuple):
    """One of the matrix."""

    toy: str
    solver: str
    nfe: int


@cache
def possible(solver: str, schedule: sd.Schedule, nfe: int) -> bool:
    """Whether a solver can spend exactly that many evaluations."""
    try:
        levels_for(sd.SOLVERS[solver], sd.GRIDS["logsnr"], schedule.finite_start(), nfe)
    except ValueError:
        return False
    return True


@cache
def cells() -> list[Cell]:
    """All there are, shuffled: what is measured so far is a fair sample."""
    schedules = {toy: make().schedule for toy, make in TOYS.items()}
    every = (Cell(*names) for names in product(TOYS, sd.SOLVERS, BUDGETS))
    found = [cell for cell in every if possible(cell.solver, schedules[cell.toy], cell.nfe)]
    random.Random(SEED).shuffle(found)
    return found


@cache
def sampled(count: int = 30) -> list[Cell]:
    """Some cells, in which toys, solvers and budgets are met equally often, as far as that can be."""
    chosen: list[Cell] = []
    met: Counter[str | int] = Counter()
    for toy, _ in zip(cycle(TOYS), range(count)):
        chosen.append(
            min((c for c in cells() if c.toy == toy and c not in chosen), key=lambda c: (met[c.solver], met[c.nfe]))
        )
        met.update(chosen[-1])
    return chosen


class Ground(NamedTuple):
    """What all cells of a toy share: its model, the calibration's reference, and what fresh seeds are judged by."""

    model: sd.Model
    seeds: range
    mismatches: list[Mismatch]
    targets: list[Moments]
    energy: float
    fine: Tensor


@cache
def reference(toy: str, recipe: sd.Recipe, steps: int) -> sd.ReferenceRun:
    """The fine trajectory that calibrations of a toy share."""
    return sd.reference_run(ground(toy).model, recipe.seeds, steps=steps, batch=len(recipe.seeds))


@cache
def ground(toy: str) -> Ground:
    model = TOYS[toy]()
    seeds, others = range(FRESH, FRESH + BLOCKS * BLOCK), range(OTHERS, OTHERS + BLOCKS * BLOCK)
    fine = sd.reference_run(model, seeds, steps=FINE, batch=len(seeds))
    apart = sd.reference_run(model, others, steps=FINE, batch=len(others)).samples.flatten(1)
    blocks = zip(fine.samples.split(BLOCK), [seeds[i : i + BLOCK] for i in range(0, len(seeds), BLOCK)], strict=True)
    mismatches = [Mismatch(fine.basis, goal, Groups.of([model.condition_of(s) for s in own])) for goal, own in blocks]
    targets = [Moments.of(block) for block in apart.split(BLOCK)]
    return Ground(model, seeds, mismatches, targets, float(apart.var(0).sum()), fine.samples)


def measured(known: Ground, x: Tensor) -> Tensor:
    """Mismatch and honest distance, as shares of the energy, of every block, `(2, BLOCKS)`."""
    rows = zip(known.mismatches, known.targets, x.split(BLOCK), strict=True)
    found = [(j(block), frechet_distance(t, Moments.of(block.flatten(1))) / known.energy) for j, t, block in rows]
    return torch.tensor(found, dtype=torch.float64).T


@cache
def floor(toy: str) -> Tensor:
    """What the many-step samples of the same seeds measure, `(2, BLOCKS)`."""
    known = ground(toy)
    return measured(known, known.fine)


def broken(made: Tensor, plain: Tensor) -> bool:
    """Whether the contract is: worse by more than is allowed, beyond chance; both of every block, `(BLOCKS,)`."""
    gap = made - ALLOWED * plain
    return float(gap.mean()) > ERRORS * float(gap.std()) / len(gap) ** 0.5 + TINY


def plain(known: Ground, cell: Cell, grid: str) -> Tensor:
    """Samples of the plain solver."""
    schedule = known.model.schedule
    levels = levels_for(sd.SOLVERS[cell.solver], sd.GRIDS[grid], schedule.finite_start(), cell.nfe).levels
    return sd.Sampler(cell.solver, sd.Levels(levels, schedule))(known.model, known.seeds, batch=len(known.seeds)).x


def measure(cell: Cell, recipe: sd.Recipe = RECIPE) -> dict[str, Any]:
    """The record of a cell: what was kept, and by each measure the calibrated and the best plain value."""
    known = ground(cell.toy)
    fine = reference(cell.toy, recipe, recipe.reference_steps([cell.nfe]))
    calibration = sd.calibrate(known.model, cell.nfe, cell.solver, recipe=recipe, reference=fine)
    made = measured(known, calibration.sampler()(known.model, known.seeds, batch=len(known.seeds)).x)
    rivals = [measured(known, plain(known, cell, grid)) for grid in GRIDS]
    record: dict[str, Any] = {"kept": calibration.provenance["kept"]}
    for k, name in enumerate(MEASURES):
        best = min((rival[k] for rival in rivals), key=lambda blocks: float(blocks.mean()))
        record[name] = [float(f"{float(blocks.mean()):.4g}") for blocks in (made[k], best)]
        if broken(made[k], best.maximum(floor(cell.toy)[k])):
            record["broken"] = [*record.get("broken", ()), name]
    return record | {"network_calls": calibration.provenance["network_calls"]}


def name_of(cell: Cell) -> str:
    """A cell's key in the records."""
    return f"{cell.toy} | {cell.solver} | {cell.nfe}"


def named(cell: Cell, recipe: sd.Recipe = RECIPE) -> tuple[str, dict[str, Any]]:
    """A cell's key and record."""
    return name_of(cell), measure(cell, recipe)


def ratio(record: dict[str, Any], name: str) -> float:
    """Calibrated over plain."""
    made, best = record[name]
    return made / max(best, 1e-12)


def summary(records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many cells there are, how many are worse, and the worst one, by each measure."""
    found: dict[str, Any] = {"cells": len(records)}
    for name in MEASURES:
        ratios = {cell: ratio(record, name) for cell, record in records.items()}
        worst = max(ratios, key=lambda cell: ratios[cell])
        found[name] = {
            "broken": sum(name in record.get("broken", ()) for record in records.values()),
            "more than 1 % worse, chance included": sum(value > ALLOWED for value in ratios.values()),
            "better": sum(value < 1.0 for value in ratios.values()),
            "plain kept": sum(record["kept"].startswith("plain") for record in records.values()),
            "median ratio": round(statistics.median(ratios.values()), 4),
            "worst": {"cell": worst, "ratio": round(ratios[worst], 4), **records[worst]},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "contract.json")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--few", action="store_true", help="measure FEW_CALLS, at 3 and 4 evaluations")
    arguments = parser.parse_args()
    usual = sd.FEW_CALLS if arguments.few else RECIPE
    # More seeds and a finer trajectory: 64 may not see what happens to one sample in a hundred.
    more = replace(usual, seeds=range(10**6, 10**6 + 256), steps=48)
    planned = [cell for cell in cells() if not arguments.few or cell.nfe in FEW]
    until = time.monotonic() + arguments.seconds
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    records, again = known.get("records", {}), known.get("broken, repeated", {})
    facts = {
        "seed": SEED,
        "calibration seeds": [usual.seeds[0], len(usual.seeds)],
        "calibration seeds of what is repeated": [more.seeds[0], len(more.seeds)],
        "fresh seeds": [FRESH, BLOCKS * BLOCK],
        "seeds of the own distance": [OTHERS, BLOCKS * BLOCK],
        "nfe": [*(FEW if arguments.few else BUDGETS)],
        "backward_passes": 0,
        "matrix": len(planned),
        **machine("cpu"),
    }

    def save() -> None:
        parts = {"summary": summary(records), "broken, repeated": again, "records": dict(sorted(records.items()))}
        write_json(arguments.out, {**facts, **parts})

    with multiprocessing.get_context("spawn").Pool(arguments.jobs, torch.set_num_threads, (1,)) as pool:
        for found, recipe in ((records, usual), (again, more)):
            wanted = [cell for cell in planned if recipe is usual or "broken" in records.get(name_of(cell), ())]
            wanted.sort(key=lambda cell: -cell.nfe)  # where plain solvers are best first
            missing = [cell for cell in wanted if name_of(cell) not in found]
            for name, record in pool.imap_unordered(partial(named, recipe=recipe), missing):
                found[name] = record
                print(name, json.dumps(record), flush=True)
                save()
                if time.monotonic() > until:
                    return  # leaving the pool ends it


if __name__ == "__main__":
    main()
