r"""One forward pass, any number of pull-backs v ↦ Jᵀv."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
        raise RuntimeError(
            f"network gives a wrong gradient: v'Jv is {found:.4g} by derivative and {expected:.4g} by difference; "
            "is a part of it detached?"
        )
