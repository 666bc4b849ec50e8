r"""A model: everything about a network that sampling needs to know, in one place."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from steindiff.denoisers.base import Denoiser
from steindiff.denoisers.wrappers import Batched
from steindiff.levels import Level
from steindiff.schedules.base import Schedule
from steindiff.seeding import in_batches, noise

DenoiserFor = Callable[[Sequence[int]], Denoiser]
"""Seeds to the denoiser of a batch with those seeds: a sample's condition belongs to its seed."""

SAME_MODEL = 0.02
"""Relative difference up to which two fingerprints are one model's: half precision passes, another model does not."""

STILL_NOISE = 0.4
"""D of pure noise is wrong if it is this large against the noise: 0.02 is usual; a DDPM network under VP(): 0.66."""


@dataclass(frozen=True, eq=False)
class Model:
    r"""A denoiser with its forward process, the shape of its samples, and where it runs.

    Args:
        denoiser: D(x, level), or a function from seeds to the denoiser of a batch with those seeds, where labels or
            prompts belong to seeds.
        schedule: the forward process the network was trained on.
        shape: of one sample, without the batch axis.
        device: where to sample.
        dtype: of the state, float32 or float64; the network may use less.
        name: for messages, files and reports.
        condition: the condition of a seed (label, prompt), any hashable value; None if samples share one. Calibration
            keeps the spread of samples within a condition, so give several of its seeds the same one.

    Example:
        >>> import torch
        >>> from steindiff.denoisers import Gaussian
        >>> from steindiff.schedules import EDM
        >>> model = Model(Gaussian(torch.zeros(3), torch.ones(3)), EDM(), shape=(3,))
        >>> model.noise([0, 1], model.schedule.level(80.0)).shape
        torch.Size([2, 3])
    """

    denoiser: Denoiser | DenoiserFor
    schedule: Schedule
    shape: tuple[int, ...]
    _: KW_ONLY
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    name: str = "model"
    condition: Callable[[int], Hashable] | None = None
    _trusted: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_denoiser(self.denoiser)
        if isinstance(self.schedule, type) and issubclass(self.schedule, Schedule):
            raise TypeError(f"schedule must be an instance, got the class; write {self.schedule.__name__}()")
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule such as VP(), EDM() or Flow(), got {self.schedule!r}")
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(self.shape)
        if not shape or not all(isinstance(n, int) and n >= 1 for n in shape):
            raise ValueError(f"shape must hold whole numbers >= 1, without the batch axis, got {self.shape!r}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64 (the state's), got {self.dtype}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "device", torch.device(self.device))

    def denoiser_for(self, seeds: Sequence[int], batch: int | None = None) -> Denoiser:
        """The denoiser of a batch with these seeds; with `batch`, evaluated in parts of at most that many samples."""
        if batch is not None:
            parts = in_batches(seeds, batch)
            return Batched([self.denoiser_for(part) for part in parts], [len(part) for part in parts])
        if isinstance(self.denoiser, Denoiser):
            return self.denoiser
        made = self.denoiser(seeds)
        if not isinstance(made, Denoiser):
            raise TypeError(f"denoiser must return a Denoiser for given seeds, got {type(made).__name__}")
        return made

    def trust(self) -> Model:
        """Return this model, its network no longer to be checked: for random weights, or data of an unusual scale."""
        object.__setattr__(self, "_trusted", True)
        return self

    def check_once(self, seeds: Sequence[int]) -> None:
        """Warn if the network cannot be right on its schedule; two evaluations of a batch, the first time only."""
        doubt = "" if self._trusted else mismatch(self, seeds)
        self.trust()
        if doubt:
            warnings.warn(
                f"{self.name}: the network does not fit its wrapper and schedule: {doubt}; see docs/your-network.md, "
                "or call model.trust() if the weights are random",
                stacklevel=3,
            )

    def noise(self, seeds: Sequence[int], level: Level) -> Tensor:
        """Initial states σ ε at a level, `(len(seeds), *shape)`, each from its own seed, on the model's device."""
        return noise(seeds, self.shape, level, self.dtype).to(self.device)

    def condition_of(self, seed: int) -> Hashable:
        """The condition of a seed; None where samples share one."""
        return None if self.condition is None else self.condition(seed)

    @cached_property
    def conditions(self) -> Mapping[str, Any]:
        """What a calibration must agree on by name, as the denoiser says: its guidance, thresholds."""
        return dict(self.denoiser_for([0]).conditions)

    @cached_property
    def fingerprint(self) -> tuple[float, ...]:
        r"""Eight numbers that tell models apart: projections of D(x, level) for one fixed x, under seed 0's condition.

        One evaluation, made once. They survive another device, dtype or a compiled network up to rounding; another
        model differs in the first digit.
        """
        middle = self.schedule.level(0.5 * (self.schedule.t_min + self.schedule.t_max))
        # Where the schedule's middle is almost pure noise, D says little: take σ/α = 1/2 instead, typical of detail.
        level = self.schedule.at(math.log(2.0)) if middle.ratio > 0.5 else middle
        x = noise([0], self.shape, Level(0.0, 1.0, math.hypot(0.5 * level.alpha, level.sigma)), self.dtype)
        with torch.no_grad():
            d = self.denoiser_for([0])(x.to(self.device), level).double().cpu().flatten()
        directions = torch.randn(8, len(d), generator=torch.Generator().manual_seed(8), dtype=torch.float64)
        return tuple(round(v, 6) for v in (directions @ d / len(d) ** 0.5).tolist())


@torch.no_grad()
def mismatch(model: Model, seeds: Sequence[int]) -> str:
    r"""What is wrong with D(σ ε, level) at the strongest noise, in words; empty where it may be right.

    There x says next to nothing of x*, so a right D has the size of data, ‖D‖ ≪ ‖x/α‖; a network that was told
    another time, or predicts something else, leaves noise in D. Where D is ε itself, as strong at half the noise, the
    network's output was taken for an image. (A Gaussian's D is a multiple of ε, too, but doubles.)
    """
    schedule, denoiser = model.schedule.finite_start(), model.denoiser_for(seeds)
    high = schedule.level(schedule.t_max)
    answers = []
    for level in (high, schedule.at(high.lam + math.log(2.0))):
        x = model.noise(seeds, level)
        eps, d = (v.cpu().double().flatten() for v in (x / level.sigma, denoiser(x, level)))
        answers.append((float(d.norm() / eps.norm()), float(d @ eps / eps.square().sum())))
    (size, share), (_, half) = answers
    if size > STILL_NOISE * high.ratio:
        return (
            f"at σ/α = {high.ratio:.3g} its denoised image is as large as {size / high.ratio:.0%} of the noise; a DDPM "
            "network takes Discrete.linear(), not VP(), and one that predicts v or the image takes Velocity or X0"
        )
    if all(abs(k) > 0.9 * s for s, k in answers) and 0.5 <= abs(share) <= 2.0 and 0.8 <= half / share <= 1.25:
        return "its denoised image of pure noise is that noise; a network that predicts noise takes Epsilon"
    return ""


def fingerprint_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Relative difference of two fingerprints; infinite where they cannot be compared."""
    if len(one) != len(other):
        return math.inf
    a, b = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    gap = float((a - b).norm() / b.norm().clamp(min=1e-12))
    return math.inf if math.isnan(gap) else gap


def check_denoiser(denoiser: object) -> None:
    """Refuse what is neither a denoiser nor a function of seeds, saying how to wrap it."""
    if isinstance(denoiser, Denoiser):
        return
    hint = "wrap the network in what it predicts: Epsilon(network), Velocity, FlowVelocity, X0, Score or EDMDenoiser"
    if isinstance(denoiser, type) and issubclass(denoiser, Denoiser):
        name = denoiser.__name__
        raise TypeError(f"denoiser must be an instance, got the class {name}; write {name}(network)")
    if isinstance(denoiser, nn.Module) or not callable(denoiser):
        raise TypeError(f"denoiser must be a Denoiser, got {type(denoiser).__name__}; {hint}")
    try:
        inspect.signature(denoiser).bind([0])
    except TypeError:
        raise TypeError(f"denoiser must be a Denoiser or a function of seeds, got {denoiser!r}; {hint}") from None
    except ValueError:  # a builtin without a signature
        return
