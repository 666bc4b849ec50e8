r"""Forward mode."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from steindiff.levels import Level
from steindiff.probes.base import Forms, Hutchinson, dot, flat_step, rebuilt
from steindiff.tableau import Step


@contextmanager
def forward_mode() -> Iterator[None]:
    """Where forward mode works: fused attention kernels do not have it, the plain one does."""
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        # torch itself calls its deprecated scripting when forward mode is first used.
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        yield


def pushforward(function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """Jv, `(B, *)`, of a function `(B, *)` to `(B, *)` at `x`."""
    with forward_mode():
        tangent: Tensor = torch.func.jvp(function, (x.detach().contiguous(),), (v.contiguous(),))[1]
    return tangent.detach()


@dataclass(frozen=True)
class JVP(Hutchinson):
    r"""vᵀJv = ⟨v, Jv⟩ with all m tangents carried through one forward pass (`vmap` of `torch.func.jvp`).

    Costs no network call and keeps no graph, but holds m tangents at a time and runs attention in its unfused form,
    so the candidate equals the plain step's only up to rounding where the network attends.
    """

    def along(self, step: Step, x: Tensor, level: Level, v: Tensor) -> Forms:
        at = x.detach().contiguous()  # forward mode refuses expanded tensors

        def push(tangent: Tensor) -> Any:
            return torch.func.jvp(partial(flat_step, step), (at,), (tangent,), has_aux=True)

        with forward_mode():
            # Candidate and evaluations do not depend on the tangent: left unbatched, they are computed once.
            unbatched: Any = (None, 0, None)
            candidate, tangents, tensors = torch.func.vmap(push, out_dims=unbatched)(v)
        forms = torch.stack([dot(row, tangent.detach()) for row, tangent in zip(v, tangents, strict=True)])
        evaluations = rebuilt(step, [tensor.detach() for tensor in tensors])
        return Forms(candidate.detach(), evaluations, forms, 0, len(v) * len(step.tableau.stages))


VARIANTS = {"jvp": JVP()}
