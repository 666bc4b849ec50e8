r"""Which probe does this host allow? Try, compare with differences, and say what was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from steindiff.levels import Level
from steindiff.probes._pullback import by_autograd, by_functional
from steindiff.probes.base import Hutchinson, restricted
from steindiff.probes.directions import Antithetic, Directions, Rademacher
from steindiff.probes.finite_difference import FiniteDifference
from steindiff.probes.jvp import JVP
from steindiff.probes.memory import fitting
from steindiff.probes.vjp import VJP, check_memory
from steindiff.tableau import Step

TOLERANCE = 0.1
"""Rank by which a derivative may differ from a difference, on top of the difference's own error."""


class Trial(NamedTuple):
    """One probe tried: its name, and why it was refused (None: it works)."""

    name: str
    refusal: str | None


@dataclass(frozen=True)
class Selection:
    """The probe that works, and what a step with it costs on top of the plain one.

    Attributes:
        probe: the probe chosen.
        trials: everything tried, in order; the last one is the choice.
        extra_calls: network calls per evaluation of the plain step.
        backward_passes: derivative passes per evaluation of the plain step.
    """

    probe: Hutchinson
    trials: tuple[Trial, ...]
    extra_calls: int
    backward_passes: int

    def __str__(self) -> str:
        refused = "".join(f"\n  {trial.name}: {trial.refusal}" for trial in self.trials[:-1])
        cost = f"{self.extra_calls} network calls and {self.backward_passes} derivative passes per evaluation"
        chunk = "" if self.probe.chunk is None else f", {self.probe.chunk} samples at a time"
        return f"{self.trials[-1].name}: {cost} on top of the plain step{chunk}{refused}"


def select(
    step: Step,
    x: Tensor,
    level: Level,
    *,
    probes: int = 5,
    directions: Directions | None = None,
    memory: int | None = None,
) -> Selection:
    r"""Find the cheapest probe the host allows.

    Tried in order on one sample: VJP by autograd, VJP by `torch.func`, JVP by `torch.func` under MATH attention, finite
    differences. A derivative must not be zero (a network run under `no_grad` gives that without an error) and must
    agree with a central difference along the same direction.

    Args:
        step: a step of the run to come; one with a stage, whose denoiser accepts a single sample.
        x: its states, `(B, *)`.
        level: their level.
        probes: number m of directions.
        directions: their distribution; default Rademacher (finite differences: in pairs, rounded up).
        memory: bytes the linearised pass may take; chooses `chunk`. Where the need cannot be measured (function
            transforms), one sample at a time is taken.

    Returns:
        The probe, what was refused and why, and the cost.

    Raises:
        ValueError: if the step evaluates nothing, or `memory` is not positive.
    """
    if not step.tableau.stages:
        raise ValueError("step: it evaluates nothing, so there is nothing to try; take an earlier one")
    check_memory(memory)
    directions = directions or Rademacher()
    paired = directions if isinstance(directions, Antithetic) else Antithetic(directions)
    differences = FiniteDifference(probes + probes % paired.group, paired)
    one, z = restricted(step, slice(0, 1), len(x)), x[:1]
    v = Rademacher().fill(z.shape, z.dtype, torch.Generator().manual_seed(0)).to(z.device)
    pair = torch.stack([v, -v])
    linear = step.slope * float(v.square().sum())  # the network's share is what has to be checked

    def share(probe: Hutchinson) -> float:
        return float(probe.along(one, z, level, pair).forms.mean()) - linear

    reference = share(differences)
    # Two widths differ by curvature and by the network's rounding: that much the reference itself may be wrong.
    doubt = abs(reference - share(replace(differences, relative=2 * differences.relative)))

    def check(probe: Hutchinson) -> str | None:
        try:
            found = share(probe)
        except RuntimeError as error:
            return str(error).splitlines()[0]
        if abs(found) < 1e-3 * abs(reference):
            return "the derivative of the network is zero (does it run under no_grad?)"
        if not abs(found - reference) <= TOLERANCE * max(abs(found), abs(reference)) + 3 * doubt:
            return f"gives {found:.4g} for the network's share where a central difference gives {reference:.4g}"
        return None

    trials: list[Trial] = []
    chunk: Callable[[], int | None]
    for name, probe, chunk in (
        ("vjp by autograd", VJP(probes, directions, route=by_autograd), partial(_chunk, step, x, memory)),
        ("vjp by torch.func", VJP(probes, directions, route=by_functional), lambda: memory and 1),
        ("jvp by torch.func, unfused attention", JVP(probes, directions), lambda: memory and 1),
    ):
        refusal = check(probe)
        trials.append(Trial(name, refusal))
        if refusal is None:
            return Selection(replace(probe, chunk=chunk()), tuple(trials), 0, probes)
    trials.append(Trial("finite differences", None))
    return Selection(differences, tuple(trials), differences.probes, 0)


def _chunk(step: Step, x: Tensor, memory: int | None) -> int | None:
    """How many samples a VJP may linearise at a time within `memory` bytes; None: all."""
    samples = len(x) if memory is None else fitting(step, x, memory)
    return None if samples == len(x) else samples
