r"""A sampler: solver, levels and correction, bound together so that they cannot disagree; and the only batched loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._progress import bar
from steindiff.corrections import CORRECTIONS, Correction, Plain
from steindiff.grids import GRIDS, Explicit, Grid
from steindiff.levels import Levels
from steindiff.loop import SampleResult, StepInfo, sample
from steindiff.model import Model
from steindiff.schedules.base import Schedule
from steindiff.seeding import check_seeds, in_batches, noise
from steindiff.solvers import SOLVERS, Solver

Check = Callable[[Model], None]
"""Raises where a model is not the one a sampler was made for."""


class Batch(NamedTuple):
    """Some seeds, what was made of them, and the seconds it took."""

    seeds: Sequence[int]
    result: SampleResult
    seconds: float


def levels_for(solver: Solver, grid: Grid, schedule: Schedule, nfe: int) -> Levels:
    """The levels of a run that spends exactly `nfe` evaluations."""
    at_least("nfe", nfe, 1)
    spent: dict[int, Levels] = {}
    for steps in (grid.steps,) if isinstance(grid, Explicit) else range(1, nfe + 1):
        levels = grid(schedule, steps)
        spent[solver.calls(levels)] = levels
        if max(spent) >= nfe:
            break
    if nfe not in spent:
        near = " or ".join(map(str, sorted(spent)[-2:]))
        raise ValueError(f"nfe must be one {solver!r} can spend exactly, got {nfe}; choose {near}")
    return spent[nfe]


@dataclass(frozen=True, init=False)
class Sampler:
    r"""How to sample: `Sampler("dpmpp-2m", grid="logsnr", nfe=5)`, or `calibration.sampler()`.

    Args:
        solver: a solver or its name.
        grid: a grid or its name, for any model; or the `Levels` of one.
        nfe: evaluations of the denoiser; with `Levels` it follows from them.
        correction: what is done to each step, or its name; default nothing.
        check: called with the model before the first batch; raises where the sampler was made for another.

    Example:
        >>> import torch
        >>> from steindiff.denoisers import Gaussian
        >>> from steindiff.schedules import EDM
        >>> model = Model(Gaussian(torch.zeros(3), torch.ones(3)), EDM(), shape=(3,))
        >>> result = Sampler("ddim", nfe=4)(model, seeds=range(8))
        >>> result.x.shape, result.nfe
        (torch.Size([8, 3]), 4)
    """

    solver: Solver
    grid: Grid | Levels
    nfe: int
    correction: Correction
    check: Check | None = field(repr=False, compare=False)

    def __init__(
        self,
        solver: Solver | str = "dpmpp-2m",
        grid: Grid | Levels | str = "logsnr",
        nfe: int | None = None,
        correction: Correction | str | None = None,
        check: Check | None = None,
    ) -> None:
        chosen = SOLVERS.resolve("solver", solver)
        if isinstance(grid, Levels):
            spent = chosen.calls(grid)
            if nfe not in (None, spent):
                raise ValueError(f"nfe must be {spent}, what these levels cost, got {nfe}")
            place: Grid | Levels = grid
        else:
            place = GRIDS.resolve("grid", grid)
            if nfe is None:
                raise ValueError("nfe must be given with a grid; write for example nfe=5")
            at_least("nfe", nfe, 1)
            spent = nfe
        if hasattr(correction, "sampler") or (
            isinstance(correction, str | PathLike) and str(correction).endswith(".json")
        ):
            raise TypeError("correction must not be a calibration; write Calibration.load(path).sampler()")
        done = Plain() if correction is None else CORRECTIONS.resolve("correction", correction)
        vars(self).update(solver=chosen, grid=place, nfe=spent, correction=done, check=check)

    def levels_for(self, schedule: Schedule) -> Levels:
        """Where a run on `schedule` steps."""
        if isinstance(self.grid, Levels):
            return self.grid
        return levels_for(self.solver, self.grid, schedule, self.nfe)

    def __call__(
        self, model: Model, seeds: Sequence[int], *, batch: int = 64, capture: bool = False, progress: bool = False
    ) -> SampleResult:
        """Sample one image for each seed.

        Args:
            model: what to sample from.
            seeds: one for each sample; it decides its noise and its condition.
            batch: samples evaluated together; halved where memory runs out.
            capture: keep all states.
            progress: show a progress bar with the time left.

        Returns:
            The samples in the order of the seeds, on the model's device, with the cost of one of them.

        Raises:
            ValueError: if an argument is out of range, or the sampler was calibrated for another model.
            RuntimeError: if the network or the state became NaN or infinite, naming the step.
        """
        check_seeds(seeds)
        with bar("sampling", len(seeds), shown=progress) as advance:
            parts = []
            for part in self.batches(model, seeds, batch, capture=capture):
                parts.append(part.result)
                advance(len(part.seeds))
        states = zip(*(part.trajectory for part in parts), strict=True)
        # Costs and statistics are those of the first batch.
        return replace(parts[0], x=torch.cat([p.x for p in parts]), trajectory=tuple(map(torch.cat, states)))

    def batches(
        self,
        model: Model,
        seeds: Sequence[int],
        batch: int,
        *,
        capture: bool = False,
        shrink: bool = True,
        on_step: Callable[[StepInfo, int], None] | None = None,
    ) -> Iterator[Batch]:
        """Sample seeds a batch at a time, the next batch's noise drawn meanwhile by a second thread.

        Args as in a call of the sampler, and:
            shrink: halve the batch, for good, where memory runs out; samples then differ by rounding.
            on_step: told every step with the size of its batch; a batch that runs out of memory is told as step −1.
        """
        if not isinstance(model, Model):
            raise TypeError(f"model must be a steindiff.Model, got {type(model).__name__}; wrap the denoiser in one")
        check_seeds(seeds)
        if self.check is not None:
            self.check(model)
        levels = self.levels_for(model.schedule)
        todo = in_batches(seeds, batch)
        run = partial(sample, levels=levels, solver=self.solver, correction=self.correction, capture=capture)

        def told(size: int, info: StepInfo) -> None:
            if on_step is not None:
                on_step(info, size)

        def initial(part: Sequence[int]) -> Tensor:
            x = noise(part, model.shape, levels[0], model.dtype)
            return x.pin_memory() if torch.device(model.device).type == "cuda" else x

        with ThreadPoolExecutor(1) as thread:
            coming: Future[Tensor] | None = None
            while todo:
                part, size = todo[0], len(todo[0])
                state = initial(part) if coming is None else coming.result()
                coming = thread.submit(initial, todo[1]) if len(todo) > 1 else None
                try:
                    model.check_once(part)
                    begun = time.perf_counter()
                    denoiser, x = model.denoiser_for(part), state.to(model.device, non_blocking=True)
                    result = run(denoiser, x, callback=partial(told, size))
                    seconds = time.perf_counter() - begun
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    if not shrink or size == 1:
                        raise MemoryError(f"batch = {size} does not fit in memory; choose a smaller one") from error
                    rest = [seed for later in todo for seed in later]
                    todo, coming = in_batches(rest, max(1, size // 2)), None
                    told(size, StepInfo(-1, levels.steps, state, levels[0], None))
                    continue
                yield Batch(part, result, seconds)
                todo = todo[1:]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a batch did not fit."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
