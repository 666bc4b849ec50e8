"""A network by others: `enerdatasynth==0.8.4` (PyPI, MIT), the electric load of one day, hour by hour.

Facts about it: a transformer ε(x, t, z) of 111,489 parameters over 24 hours, each scaled to [0, 1]; DDPM with 1,000
linear β; z holds month, weekday, holiday, highest and lowest temperature, and the difference of the day's highest and
lowest load, which fix most of the day. Its package comes without data, so conditions are made here: temperatures by
season, and a difference that grows with heat. They are plausible inputs, not the authors' test set. The
authors' sampler clips its states, and here images are clipped: without, a few samples leave the range by far, however
fine the steps.

Reference: EnerDataSynth (Sharma, Tikkawar & Mieth, 2026), the package itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi

import numpy as np
import torch

from networks import packaged
from steindiff import Discrete, Epsilon, Model
from steindiff.denoisers.base import Denoiser
from steindiff.denoisers.wrappers import StaticThreshold

NAME, UNCLIPPED = "electricity", "electricity-unclipped"
SHAPE = (1, 24)
SEEDS_PER_CONDITION = 8
CONDITIONS = 4096
BOUND = 1.5
"""Where images are clipped; loads of training days are in [0, 1]."""
SCALES = ((64.647, 18.384), (49.430, 17.088), (1766.35, 809.56))
"""Mean and deviation of highest and lowest temperature, in °F, and of the day's difference of loads, in MW."""


def condition(seed: int) -> int:
    """The number of a seed's day."""
    return seed // SEEDS_PER_CONDITION % CONDITIONS


def day(number: int) -> list[float]:
    """What the network is told of a day, 23 numbers, a function of its number alone."""
    generator = np.random.default_rng(number)
    month, weekday = int(generator.integers(12)), int(generator.integers(7))
    high = 64.0 - 22.0 * cos(2 * pi * (month - 0.5) / 12) + generator.normal(0.0, 6.0)
    low = high - generator.uniform(10.0, 20.0)
    difference = 1400.0 + 60.0 * max(high - 65.0, 0.0) + generator.normal(0.0, 150.0)
    scaled = [(v - mean) / deviation for v, (mean, deviation) in zip((high, low, difference), SCALES, strict=True)]
    calendar = [float(i == month) for i in range(12)] + [float(i == weekday) for i in range(7)]
    return [*calendar, 0.0, *scaled]  # 0: no holiday


def load(device: torch.device | str = "cpu", bound: float | None = BOUND) -> Model:
    """The network as a model, its images clipped at `bound` if any; eight consecutive seeds share a condition.

    Raises:
        ModuleNotFoundError: if the package is not installed.
    """
    folder = packaged.folder("enerdatasynth", "enerdatasynth==0.8.4")
    models = folder / "resources" / "pjm_load" / "models"
    known = "enerdatasynth.resources.pjm_load.models"
    packaged.module(f"{known}.denoiser", models / "denoiser.py")  # which the next one imports
    architecture = packaged.module(f"{known}.transformer", models / "transformer.py")
    with torch.random.fork_rng():  # its first weights are drawn, and not used
        network = architecture.TransformerDenoiser(SHAPE[1], 23)
    file = folder / "_bundled" / "checkpoints" / "pjm_load" / "transformer_T1000_H64_L2" / "best.pt"
    network.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    network.to(device).eval().requires_grad_(False)

    def denoiser(seeds: Sequence[int]) -> Denoiser:
        z = torch.tensor([day(condition(seed)) for seed in seeds], device=device)
        image = Epsilon(lambda x, t: network(x[:, 0], t, z)[:, None])
        return image if bound is None else StaticThreshold(image, bound)

    name = NAME if bound is not None else UNCLIPPED
    return Model(denoiser, Discrete.linear(), SHAPE, device=device, name=name, condition=condition)
