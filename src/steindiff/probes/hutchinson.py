r"""Averages of vᵀJv over random directions, by reverse mode or differences; and the paper's other modes.

Reverse mode makes one forward pass and any number of pull-backs v ↦ Jᵀv.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from steindiff._checks import at_least, number
from steindiff.denoisers.base import Denoiser
from steindiff.levels import Level
from steindiff.probes.base import Antithetic, Directions, Hutchinson, Probe, Probed, dot, linear, restricted
from steindiff.tableau import Evaluation, Proposal, Step

Function = Callable[[Tensor], Tensor]
"""A map of states `(B, *)` to `(B, *)` that treats the samples of a batch independently."""

Pull = Callable[[Tensor], Tensor]
"""v ↦ Jᵀv, both `(B, *)`."""


def attached(*tensors: Tensor) -> None:
    """Refuse results that are cut off from the state they should be differentiated by."""
    if not all(tensor.requires_grad for tensor in tensors):
        raise RuntimeError("network gives no gradient (no_grad or detached output): mend it, or use FiniteDifference()")


def proposed(step: Step, x: Tensor) -> Proposal:
    """Take a step; where gradients are wanted, with a check that they are there.

    A step r x + b D(x) has a gradient even where D has none: every evaluation is looked at, too.
    """
    candidate, evaluations = step(x)
    if not evaluations:  # a table may leave x out, too; its derivative is then 0 and not missing
        candidate = candidate + 0.0 * x
    if x.requires_grad:
        attached(candidate, *(tensor for e in evaluations for tensor in (e.x, e.d)))
    return Proposal(candidate, evaluations)


def pullback(function: Function, x: Tensor) -> tuple[Tensor, Pull]:
    r"""Evaluate a function `(B, *)` to `(B, *)` once: its output, and v ↦ Jᵀv, J = ∂function/∂x, as often as needed.

    May be called under `torch.no_grad()` and `torch.inference_mode()`. The graph lives as long as the pull-back does.
    """
    # Grad mode alone is not enough: tensors made in inference mode can never be differentiated, so leave it.
    with torch.inference_mode(False), torch.enable_grad():
        z = x.detach().clone().requires_grad_()
        output = function(z)
        attached(output)

    def pull(v: Tensor) -> Tensor:
        with torch.inference_mode(False):
            (gradient,) = torch.autograd.grad(output, z, v.clone(), retain_graph=True, materialize_grads=True)
        return gradient

    return output.detach(), pull


def linearised(step: Step, x: Tensor) -> tuple[Proposal, Pull]:
    """Take a step exactly once, and linearise it at x by autograd: the proposal, without a graph, and v ↦ Jᵀv."""
    made: list[Proposal] = []

    def candidate(z: Tensor) -> Tensor:
        made.append(proposed(step, z))
        return made[0].candidate

    output, pull = pullback(candidate, x)
    return Proposal(output, tuple(Evaluation(e.x.detach(), e.d.detach(), e.level) for e in made[0].evaluations)), pull


def check_gradient(function: Function, x: Tensor, h: float) -> None:
    r"""Compare one derivative with differences: vᵀJv by autograd, and ⟨v, f(x + hv) − f(x − hv)⟩/(2h).

    Part of a network cut from the graph gives no error, only a wrong number. Costs one backward pass and five calls on
    `x`, of which one sample is enough; h is some hundredths of its noise level.
    """
    v = torch.ones_like(x).cumsum(-1).mul_(2.0).cos_().sign_()  # a fixed pattern of ±1

    def form(width: float) -> float:
        return float((v * (function(x + width * v) - function(x - width * v))).sum() / (2.0 * width))

    found = float((v * pullback(function, x)[1](v)).sum())
    expected = form(h)
    doubt = abs(expected - form(2.0 * h))
    if not abs(found - expected) <= 0.1 * max(abs(found), abs(expected)) + 3.0 * doubt:
        forms = f"v'Jv is {found:.4g} by derivative and {expected:.4g} by difference"
        raise RuntimeError(f"network gives a wrong gradient: {forms}; is a part of it detached?")


GRADIENTS = 0.25
"""What pulling one direction back holds beside the graph, as a share of it. Measured on U-Nets: 0.16 to 0.18."""

_MEASURED: WeakKeyDictionary[Denoiser, dict[tuple[object, ...], int]] = WeakKeyDictionary()


def memory_per_sample(step: Step, x: Tensor, together: int = 1) -> int:
    """Bytes one more sample costs in a VJP: what autograd keeps for it, and the gradients on their way back.

    What is kept is counted, on any device, as the difference between the first two samples of `x`, `(B, *)`, and the
    first alone; so weights, which all samples share, are left out. Makes one evaluation of the step for each.
    """
    graph = _saved(step, x, 2) - _saved(step, x, 1) if len(x) > 1 else _saved(step, x, 1)
    return round(graph * (1 + GRADIENTS * together))


def fitting(step: Step, x: Tensor, memory: int, together: int = 1) -> int:
    """How many samples of `x`, `(B, *)`, a VJP may linearise at a time within `memory` bytes: at least one.

    Measured once for a denoiser and a kind of step. Where it cannot be measured, one.
    """
    if len(x) == 1:
        return 1
    known = _MEASURED.setdefault(step.denoiser, {})
    key = (len(step.tableau.stages), x.shape[1:], x.dtype, x.device, together)
    if key not in known:
        try:
            known[key] = memory_per_sample(step, x, together)
        except RuntimeError:
            known[key] = memory
    return min(len(x), max(1, memory // max(1, known[key])))


def _saved(step: Step, x: Tensor, samples: int) -> int:
    """Bytes autograd keeps for the backward pass of `step` at the first `samples` of `x`."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    part = slice(0, samples)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        pulled = linearised(restricted(step, part, len(x)), x[part])
    del pulled
    return sum(storages.values())


@dataclass(frozen=True)
class VJP(Hutchinson):
    r"""vᵀJv = ⟨Jᵀv, v⟩ by pulling v back through the one forward pass the step makes anyway.

    Costs no network call; m backward passes through every evaluation of the step. The graph of one pass is held while
    the directions are pulled back, `together` at a time.

    Args:
        memory: bytes the linearised pass may take beyond what is held anyway; None: no limit. It sets how many samples
            are linearised at a time (never fewer than one), from the bytes one sample keeps, which are measured on
            the first two samples of the first step (two network calls). See `steindiff.probes.hutchinson`.
        together: directions pulled back in one pass (`vmap`), m at most: the same numbers up to rounding. It pays where
            a batch is too small to fill the device, and costs the memory of that many gradients.
    """

    memory: int | None = None
    together: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("together", self.together, 1)
        if self.memory is not None:
            at_least("memory", self.memory, 1)

    def samples(self, step: Step, x: Tensor) -> int:
        most = super().samples(step, x)
        return most if self.memory is None else min(most, fitting(step, x, self.memory, self._group))

    @property
    def _group(self) -> int:
        return min(self.together, self.probes)

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> tuple[Proposal, Tensor]:
        proposal, pull = linearised(step, x)
        if self._group == 1:
            return proposal, torch.stack([dot(pull(row), row) for row in v])
        with warnings.catch_warnings():  # fused attention is looped over inside the pass, and torch says so
            warnings.filterwarnings("ignore", message=".*batching rule")
            pulled = torch.cat([torch.func.vmap(pull)(group) for group in v.split(self._group)])
        return proposal, (pulled * v).flatten(2).sum(2)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Where forward mode works: fused attention kernels do not have it, the plain one does."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # torch itself calls its deprecated scripting when forward mode is first used.
        warnings.filterwarnings("ignore", message=".*torch.jit.script")
        yield


def pushforward(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """Jv, `(B, *)`, of a function `(B, *)` to `(B, *)` at `x`."""
    try:
        with forward_mode():
            tangent: Tensor = torch.func.jvp(function, (x.detach().contiguous(),), (v.contiguous(),))[1]
    except RuntimeError as error:
        if "view size" not in str(error):
            raise
        raise ValueError(  # torch's own group norm, for one
            "network: torch takes no forward derivative through channels last; lay it out with "
            "`network.to(memory_format=torch.contiguous_format)`, or leave Lipschitz constants out"
        ) from error
    return tangent.detach()


@dataclass(frozen=True)
class FiniteDifference(Hutchinson):
    r"""vᵀJv ≈ ⟨v, T(x + hv) − T(x)⟩/h; along a pair ±v the differences average to the central one.

    Costs one more step per direction. The denoiser varies on the scale of the noise, so h is a fraction of σ.

    Args:
        probes: number of directions, counting both of a pair.
        directions: pairs by default, for an error of order h² rather than h.
        relative: h/σ. The default suits networks that compute in float32 or less, whatever the dtype of the state;
            with a float64 network 1e-4 is more accurate.
    """

    derivatives: ClassVar[bool] = False

    probes: int = 6
    directions: Directions = field(default_factory=Antithetic)
    relative: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        number("relative", self.relative, 0.0, open_end=True)

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> tuple[Proposal, Tensor]:
        h = level.sigma * self.relative
        proposal = step(x)
        return proposal, torch.stack([dot(row, step(x + h * row).candidate - proposal.candidate) / h for row in v])


@dataclass(frozen=True)
class Analytic(Probe):
    r"""div T ≈ slope·d, the paper's analytical mode. Free, and biased by the network's share of the divergence.

    For first-order steps the bias is (α_t − (σ_t/σ_s) α_s) div D: small at high noise, where D hardly depends on x.
    """

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        return linear(step, x, error=math.nan if step.tableau.stages else 0.0)


@dataclass(frozen=True)
class Adaptive(Probe):
    r"""The paper's adaptive mode: `high` while σ >= threshold, for which the paper gives no number, `low` below it."""

    threshold: float = 1.0
    high: Probe = field(default_factory=Analytic)
    low: Probe = field(default_factory=VJP)

    def __post_init__(self) -> None:
        number("threshold", self.threshold, 0.0)

    def __call__(self, step: Step, x: Tensor, level: Level, generator: torch.Generator) -> Probed:
        probe = self.high if level.sigma >= self.threshold else self.low
        return probe(step, x, level, generator)


VARIANTS = {
    "vjp": VJP(),
    "vjp-together": VJP(together=5),
    "finite-difference": FiniteDifference(),
    "analytic": Analytic(),
    "adaptive": Adaptive(),
}
