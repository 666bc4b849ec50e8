"""The embedded models, ready to be compared, sampled from and calibrated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from steindiff import datasets, zoo
from steindiff.comparison import RandomFeatures, Subject
from steindiff.denoisers import EDMDenoiser, Epsilon, Guided
from steindiff.denoisers.base import Denoiser
from steindiff.metrics import InceptionFeatures, references
from steindiff.pixels import to_uint8
from steindiff.reference_run import Conditioned
from steindiff.schedules import EDM, Discrete
from steindiff.schedules.base import Schedule
from steindiff.solvers.base import Solver
from steindiff.zoo.preconditioning import EDMPrecond, VPNoise, ZooNetwork
from steindiff.zoo.shipped import calibration

PARAMETERISATIONS: dict[type[ZooNetwork], tuple[Callable[..., Denoiser], Callable[..., Schedule]]] = {
    EDMPrecond: (EDMDenoiser, lambda network: EDM()),
    VPNoise: (Epsilon, lambda network: Discrete.linear(network.betas[0], network.betas[1], network.steps)),
}
"""How a network of the zoo becomes a denoiser on a schedule."""

MOMENTS = Path(__file__).parent / "moments"
"""Moments of each model's real training images under `RandomFeatures`; benchmarks/demo_reference.py makes them."""


def by_seed(network: ZooNetwork, guidance: float = 1.0, *, compiled: bool = False) -> Conditioned:
    """The denoiser of samples with given seeds; the label of a seed is its remainder modulo the number of classes.

    Args:
        network: of the zoo, in any precision.
        guidance: scale w of classifier-free guidance; 1 is the conditional model, 0 the unconditional one.
        compiled: call it through `torch.compile`, which compiles at the first call of a batch size.

    Raises:
        ValueError: if the scale is negative.
    """
    if not guidance >= 0:
        raise ValueError(f"guidance = {guidance}: allowed are numbers >= 0")
    denoiser, _ = PARAMETERISATIONS[type(network)]
    device = next(network.parameters()).device
    call = torch.compile(network) if compiled else network

    def denoisers(seeds: Sequence[int]) -> Denoiser:
        labels = torch.tensor([seed % network.num_classes for seed in seeds], device=device)
        conditional = denoiser(partial(call, labels=labels))
        return conditional if guidance == 1.0 else Guided(conditional, denoiser(call), guidance)

    return denoisers


def embedded(name: str, guidance: float = 1.0, device: str = "cpu", *, compiled: bool = False) -> Subject:
    """A model of the zoo as a subject, conditioned as in `by_seed`.

    Args:
        name: one of `zoo.names()`.
        guidance: scale w of classifier-free guidance.
        device: where to run it.
        compiled: as in `by_seed`.

    Raises:
        ValueError: if the name is unknown or the scale negative.
    """
    network = zoo.load(name, device)
    _, schedule = PARAMETERISATIONS[type(network)]
    return Subject(
        name=name,
        denoisers=by_seed(network, guidance, compiled=compiled),
        schedule=schedule(network),
        shape=network.shape,
        features=RandomFeatures(network.shape[0]),
        reference=references.read(MOMENTS / f"{name}.npz"),
        device=torch.device(device),
        # A guided denoiser is another model: nothing is shipped for it.
        calibrations=partial(calibration, name) if guidance == 1.0 else no_calibration,
        compiled=compiled,
    )


def no_calibration(solver: Solver, nfe: int) -> None:
    """Nothing is shipped."""


MODELS: dict[str, Callable[..., Subject]] = {name: partial(embedded, name) for name in zoo.names()}
"""What the command line's `--model` takes: name → function of `guidance`, `device` and `compiled`."""


class InceptionPool:
    """The features of FID proper, for images in [−1, 1]; grey ones count as three equal channels.

    Args:
        device: where the network runs.

    Raises:
        steindiff.datasets.Unavailable: if the network is neither cached nor to be downloaded.
    """

    name = "Inception features (FID)"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.network = InceptionFeatures.load(datasets.inception(), device)

    def __call__(self, images: Tensor) -> Tensor:
        pixels = to_uint8(images).expand(-1, 3, -1, -1)
        features: Tensor = self.network(pixels.to(self.device)).cpu()
        return features


def on_random_features(subject: Subject) -> Subject:
    """As it is: embedded models bring these features."""
    return subject


def on_inception(subject: Subject) -> Subject:
    """Compared by FID, with statistics of real images where they ship."""
    name = f"{subject.name}-train"
    shipped = (references.FOLDER / f"{name}.npz").exists()
    reference = references.load(name) if shipped else None
    return dataclasses.replace(subject, features=InceptionPool(subject.device), reference=reference)


FEATURES: dict[str, Callable[[Subject], Subject]] = {"random": on_random_features, "inception": on_inception}
"""What the command line's `--features` takes: on what the Fréchet distance is measured."""
