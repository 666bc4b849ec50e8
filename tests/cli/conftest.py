"""The command line in this process, with the digits as one more model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

import toys
from steindiff.cli.app import run
from steindiff.comparison import Subject
from steindiff.models import MODELS


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def digits(guidance: float, device: str, *, compiled: bool = False) -> Subject:
    return dataclasses.replace(toys.subject(), compiled=compiled)


class Hungry(torch.nn.Module):
    """A denoiser's stand-in that has memory for `room` samples only."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.inner = toys.denoiser()
        self.calls = 0

    def __call__(self, x, level):
        if len(x) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.calls += 1
        return self.inner(x, level)


def hungry(room: int) -> Callable[..., Subject]:
    return lambda guidance, device, compiled=False: dataclasses.replace(
        toys.subject(lambda solver, nfe: None), denoisers=lambda seeds: Hungry(room)
    )


@pytest.fixture
def steindiff(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[[Sequence[str]], Outcome]:
    monkeypatch.setitem(MODELS, "digits", digits)
    monkeypatch.setitem(MODELS, "hungry", hungry(4))
    monkeypatch.setitem(MODELS, "starving", hungry(0))

    def call(line: str) -> Outcome:
        code = run(line.split())
        return Outcome(code, *capsys.readouterr())

    return call
