r"""The engine: every solver step is a small table of scalars, and this file runs all tables.

A step is a *general linear method*. It evaluates the denoiser at affine combinations of known tensors and returns
another one; a `Tableau` holds the weights. With x the state, D_j the denoised images of this step's stages and
(x_k, D_k) the evaluations of earlier steps (most recent first),

    row = w_x x + Σ_j w_j D_j + Σ_k (u_k x_k + v_k D_k).

On Dirac data (x* = 1 exactly) every row of a consistent table satisfies two identities, which the contract tests
check: Σ w σ = σ_target over all states in it, and Σ w α + Σ w_D = α_target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from steindiff.levels import Level

if TYPE_CHECKING:
    from steindiff.denoisers.base import Denoiser


class Row(NamedTuple):
    """Weights of one affine combination: the state, this step's denoised images, past (state, denoised) pairs."""

    x: float = 0.0
    d: tuple[float, ...] = ()
    past: tuple[tuple[float, float], ...] = ()


class Stage(NamedTuple):
    """One evaluation of the denoiser: where (`row`) and at which level."""

    row: Row
    level: Level


class Tableau(NamedTuple):
    """A step: its stages, each of which may use the ones before it, and the row of its result."""

    stages: tuple[Stage, ...]
    output: Row


class Evaluation(NamedTuple):
    """The denoised image `d` = D(x, level), kept with the state it was computed at. Both `(B, *)`."""

    x: Tensor
    d: Tensor
    level: Level


class Proposal(NamedTuple):
    """What a step proposes: the candidate T(x), `(B, *)`, and the evaluations it made, in order."""

    candidate: Tensor
    evaluations: tuple[Evaluation, ...]


Denoise = Callable[[Tensor, Level], Tensor]
"""What evaluates a stage: a denoiser, or a function that knows some of the answers."""

HERE = Row(x=1.0)
"""The row of a stage at the current state."""


def latest(evaluations: Sequence[Evaluation], history: Sequence[Evaluation]) -> list[Tensor]:
    """The denoised images a correction may use, newest first: this step's, then those of earlier steps."""
    return [e.d for e in (*reversed(evaluations), *history)]


def combine(row: Row, x: Tensor, evaluations: Sequence[Evaluation], history: Sequence[Evaluation]) -> Tensor:
    """Form the affine combination `row`; a lone weight of 1 returns that very tensor."""
    assert len(row.d) <= len(evaluations), "a row refers to a stage that has not run"
    assert len(row.past) <= len(history), "a row refers to an evaluation that is not in the history"
    terms = [(row.x, x)]
    terms += [(w, e.d) for w, e in zip(row.d, evaluations, strict=False)]
    for (u, v), e in zip(row.past, history, strict=False):
        terms += [(u, e.x), (v, e.d)]
    terms = [(w, tensor) for w, tensor in terms if w != 0.0]
    if not terms:
        return x.new_zeros(x.shape)
    (w, total), *rest = terms
    total = total if w == 1.0 else total * w
    for w, tensor in rest:
        total = total.add(tensor, alpha=w)
    return total


def run(tableau: Tableau, x: Tensor, history: Sequence[Evaluation], denoise: Denoise) -> Proposal:
    """Run a table on the states `x`, `(B, *)`."""
    evaluations: list[Evaluation] = []
    for stage in tableau.stages:
        z = combine(stage.row, x, evaluations, history)
        d = denoise(z, stage.level)
        if d.shape != z.shape:
            raise ValueError(f"denoiser must return shape {tuple(z.shape)}, that of its state, got {tuple(d.shape)}")
        evaluations.append(Evaluation(z, d.to(x.dtype), stage.level))
    return Proposal(combine(tableau.output, x, evaluations, history), tuple(evaluations))


@dataclass(frozen=True)
class Step:
    """A solver step with everything but the state frozen: a pure function x ↦ (T(x), evaluations)."""

    tableau: Tableau
    denoiser: Denoiser
    history: tuple[Evaluation, ...] = ()

    def __call__(self, x: Tensor) -> Proposal:
        """Propose T(x) for states `x`, `(B, *)`."""
        return run(self.tableau, x, self.history, self.denoiser)

    @property
    def slope(self) -> float:
        """The weight of x in the output row: the linear part of T."""
        return self.tableau.output.x
