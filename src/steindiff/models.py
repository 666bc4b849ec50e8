"""Models ready to sample from: those that ship with the package, and their calibrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from steindiff import zoo
from steindiff._checks import number
from steindiff.calibration import Calibration
from steindiff.denoisers import Denoiser, EDMDenoiser, Epsilon, Guided
from steindiff.model import Model
from steindiff.schedules import EDM, Discrete, Schedule
from steindiff.solvers import SOLVERS, Solver
from steindiff.zoo import EDMPrecond, VPNoise, ZooNetwork

PARAMETERISATIONS: dict[type[ZooNetwork], tuple[Callable[..., Denoiser], Callable[..., Schedule]]] = {
    EDMPrecond: (EDMDenoiser, lambda network: EDM()),
    VPNoise: (Epsilon, lambda network: Discrete.linear(network.betas[0], network.betas[1], network.steps)),
}
"""How a network of the zoo becomes a denoiser on a schedule."""

CALIBRATIONS = Path(__file__).parent / "zoo" / "calibrations"
"""Shipped calibrations: MODEL-SOLVER-NFE.json."""


@dataclass(frozen=True)
class ByLabel:
    """The denoiser of given seeds, whose label is their remainder modulo the number of classes.

    Labels lie on `device` from the start: a copy at every evaluation would make the host wait for a GPU each time.
    """

    network: Callable[..., Tensor]
    wrap: Callable[..., Denoiser]
    classes: int
    guidance: float = 1.0
    device: torch.device | str = "cpu"

    def label(self, seed: int) -> int:
        """The label of a seed."""
        return seed % self.classes

    def __call__(self, seeds: Sequence[int]) -> Denoiser:
        labels = torch.tensor([self.label(seed) for seed in seeds], device=self.device)
        conditional = self.wrap(partial(self.network, labels=labels))
        return conditional if self.guidance == 1.0 else Guided(conditional, self.wrap(self.network), self.guidance)


def load(
    name: str,
    guidance: float = 1.0,
    device: torch.device | str = "cpu",
    *,
    compiled: bool = False,
    forward_only: bool = False,
) -> Model:
    """A model that ships with the package; the label of a seed is its remainder modulo the number of classes.

    Args:
        name: `cifar10` (EDM, 32×32 RGB) or `fashion` (variance preserving, 28×28 grey).
        guidance: scale w of classifier-free guidance; 1 is the conditional model, 0 the unconditional one.
        device: where to run it.
        compiled: call it through `torch.compile`, which compiles at the first call of a batch size.
        forward_only: lay it out with channels last: faster on a CPU, but torch takes no forward derivative through it.
    """
    number("guidance", guidance, 0.0)
    network = zoo.load(name, device)
    if forward_only:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    wrap, schedule = PARAMETERISATIONS[type(network)]
    denoiser = ByLabel(torch.compile(network) if compiled else network, wrap, network.num_classes, guidance, device)
    return Model(denoiser, schedule(network), network.shape, device=device, name=name, condition=denoiser.label)


def shipped_path(name: str, solver: Solver, nfe: int) -> Path | None:
    """Where a model's calibration lies or would lie; None for a solver that has no name."""
    solver_name = SOLVERS.name_of(solver)
    return CALIBRATIONS / f"{name}-{solver_name}-{nfe}.json" if solver_name else None


def shipped_calibration(model: Model, solver: Solver, nfe: int) -> Calibration | None:
    """The calibration that ships for a model, solver and budget, or None; a guided model is another model."""
    path = shipped_path(model.name, solver, nfe)
    if path is None or not path.exists() or model.conditions.get("guidance", 1.0) != 1.0:
        return None
    return Calibration.load(path)
