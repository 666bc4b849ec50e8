r"""One forward pass, any number of pull-backs v ↦ Jᵀv."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
"""A map of states `(B, *)` to `(B, *)` that treats the samples of a batch independently."""

Auxiliary = Callable[[Tensor], tuple[Tensor, tuple[Tensor, ...]]]
"""Such a map that also hands out tensors it computed on the way, which are not differentiated."""


class Pulled(NamedTuple):
    """What one linearised pass gives: the output, the tensors handed out, and v ↦ Jᵀv. Nothing carries a graph."""

    output: Tensor
    auxiliary: tuple[Tensor, ...]
    pull: Callable[[Tensor], Tensor]


def traced(function: Auxiliary, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call the function where gradients are on; refuse results that are cut off from `z`.

    A step r x + b D(x) has a gradient even where D has none: what is handed out on the way is looked at, too.
    """
    output, auxiliary = function(z)
    if not all(tensor.requires_grad for tensor in (output, *auxiliary)):
        raise RuntimeError(
            "network gives no gradient (no_grad or detached output): let it run with gradients, or use "
            "FiniteDifference(), which needs none"
        )
    return output, auxiliary


def linearised(function: Auxiliary, x: Tensor) -> Pulled:
    """Call a function exactly once and linearise it at x by autograd. The graph lives as long as `pull` does."""
    # Grad mode alone is not enough: tensors made in inference mode can never be differentiated, so leave it.
    with torch.inference_mode(False), torch.enable_grad():
        z = x.detach().clone().requires_grad_()
        output, auxiliary = traced(function, z)

    def pull(v: Tensor) -> Tensor:
        with torch.inference_mode(False):
            (gradient,) = torch.autograd.grad(output, z, v.clone(), retain_graph=True, materialize_grads=True)
        return gradient

    return Pulled(output.detach(), tuple(tensor.detach() for tensor in auxiliary), pull)


def pullback(function: Function, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    r"""Evaluate a function `(B, *)` to `(B, *)` once: its output, and v ↦ Jᵀv, J = ∂function/∂x, as often as needed.

    May be called under `torch.no_grad()` and `torch.inference_mode()`.
    """
    output, _, pull = linearised(lambda z: (function(z), ()), x)
    return output, pull


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
        raise RuntimeError(
            f"network gives a wrong gradient: v'Jv is {found:.4g} by derivative and {expected:.4g} by difference; "
            "is a part of it detached?"
        )
