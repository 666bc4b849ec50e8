"""The command line in this process, with the digits as one more model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

import toys
from steindiff.calibration import Calibration
from steindiff.cli.app import run
from steindiff.cli.options import MODELS
from steindiff.cli.output import console
from steindiff.denoisers import Guided
from steindiff.denoisers.base import CountingDenoiser
from steindiff.model import Model
from steindiff.schedules import SCHEDULES
from steindiff.solvers.base import Solver


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def digits(guidance: float, device: str, *, compiled: bool = False, forward_only: bool = False) -> Model:
    one = toys.denoiser()
    return toys.model(denoiser=one if guidance == 1.0 else Guided(one, one, guidance))


class Hungry(CountingDenoiser):
    """A denoiser that has memory for `room` samples only."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.inner = toys.denoiser()

    def denoise(self, x, level):
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.inner(x, level)


def hungry(room: int) -> Callable[..., Model]:
    return lambda guidance, device, **options: Model(Hungry(room), SCHEDULES["edm"], toys.SHAPE, name="hungry")


def shipped(model: Model, solver: Solver, nfe: int) -> Calibration | None:
    return toys.calibrated(solver, nfe) if model.name == "digits" else None


@pytest.fixture
def steindiff(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[[Sequence[str]], Outcome]:
    monkeypatch.setitem(MODELS, "digits", digits)
    monkeypatch.setitem(MODELS, "hungry", hungry(4))
    monkeypatch.setitem(MODELS, "starving", hungry(0))
    monkeypatch.setattr("steindiff.cli.commands.compare.shipped_calibration", shipped)

    def call(line: str) -> Outcome:
        console.cache_clear()  # it keeps the width of the terminal it was made in
        code = run(line.split())
        return Outcome(code, *capsys.readouterr())

    return call
