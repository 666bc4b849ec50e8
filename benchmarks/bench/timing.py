r"""Timing: several implementations in turn, so that a busy machine slows all of them; ratios within each round."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level


class Cost(NamedTuple):
    """What a run spent: evaluations of the denoiser, network calls, backward passes."""

    nfe: int
    network_calls: int
    backward_passes: int = 0


class Spread(NamedTuple):
    """Median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


class Timing(NamedTuple):
    """One implementation: its cost, the seconds of every round; peak memory and host–device waits of one run (GPU)."""

    cost: Cost
    seconds: list[float]
    peak_bytes: int | None = None
    synchronisations: int | None = None

    def against(self, base: Timing) -> Spread:
        """The ratio to another implementation, formed within each round."""
        return Spread.of([own / other for own, other in zip(self.seconds, base.seconds, strict=True)])


def clock(device: torch.device) -> float:
    """Seconds: on the CPU of processor time, so that other programs do not count; else by the clock on the wall."""
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def on_gpu(run: Callable[[], Cost], device: torch.device) -> Timing:
    """The cost of a run with its peak memory beyond what was held, and how often the host waited for the device."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            cost = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    wait(device)
    waits = sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)
    return Timing(cost, [], torch.cuda.max_memory_allocated(device) - before, waits)


def interleaved(
    runs: Mapping[str, Callable[[], Cost]], device: torch.device, repeats: int, seed: int = 0
) -> dict[str, Timing]:
    """Time every run `repeats` times, all of them once a round, in an order drawn anew for each.

    Before the first round each runs twice: once to warm up, once for what it costs.
    """
    order, shuffle = list(runs), random.Random(seed)
    timings = {}
    for name, run in runs.items():
        run()
        wait(device)
        timings[name] = on_gpu(run, device) if device.type == "cuda" else Timing(run(), [])
    for _ in range(repeats):
        shuffle.shuffle(order)
        for name in order:
            wait(device)
            begun = clock(device)
            runs[name]()
            wait(device)
            timings[name].seconds.append(clock(device) - begun)
    return timings


class Stopwatch:
    """Adds up the time of blocks: on a GPU by events in its stream, which make nothing wait, else by the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clocked = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time a block."""
        if self.device.type != "cuda":
            begun = clock(self.device)
            yield
            self._clocked += clock(self.device) - begun
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))

    @property
    def seconds(self) -> float:
        """The time of all blocks so far; waits for the device."""
        wait(self.device)
        return self._clocked + sum(first.elapsed_time(last) for first, last in self._events) / 1000


class Watched(Denoiser):
    """A denoiser whose calls a stopwatch times."""

    def __init__(self, denoiser: Denoiser, stopwatch: Stopwatch) -> None:
        self.denoiser = denoiser
        self.stopwatch = stopwatch

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        with self.stopwatch.running():
            return self.denoiser(x, level)

    @property
    def calls(self) -> int:
        return self.denoiser.calls
