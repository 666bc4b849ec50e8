r"""Rows for methods that combine noise predictions ε_k = (x_k − α_k D_k)/σ_k instead of denoised images."""

from __future__ import annotations

from collections.abc import Sequence

from steindiff.levels import Level
from steindiff.tableau import Row


def adams_row(used: Sequence[Level], t: Level, weights: Sequence[float]) -> Row:
    r"""The row of x_t = α_t (x/α_s + Σ_k w_k ε_k), ε_0 at the current state, ε_k at the k-th past evaluation."""
    s = used[0]
    x = t.alpha * (1.0 / s.alpha + weights[0] / s.sigma)
    d = -t.alpha * weights[0] * s.alpha / s.sigma
    past = tuple(
        (t.alpha * w / level.sigma, -t.alpha * w * level.alpha / level.sigma)
        for w, level in zip(weights[1:], used[1:], strict=True)
    )
    return Row(x=x, d=(d,), past=past)
