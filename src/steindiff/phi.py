r"""Scalar functions of exponential integrators, exact to rounding for every step size, ∞ included."""

from __future__ import annotations

import math


def phi(k: int, z: float) -> float:
    r"""φ_k(z) for z <= 0: φ_0 = e^z, φ_{k+1}(z) = (φ_k(z) − 1/k!)/z, φ_k(0) = 1/k!.

    The recurrence cancels near 0, so there the series Σ_j z^j/(j + k)! takes over.

    Reference: Hochbruck & Ostermann (2010), Acta Numerica 19.
    """
    if z < -1.0:
        value = math.exp(z)
        for j in range(k):
            value = (value - 1.0 / math.factorial(j)) / z
        return value
    term = total = 1.0 / math.factorial(k)
    for j in range(1, 24):
        term *= z / (j + k)
        total += term
    return total


def decay_moment(k: int, h: float) -> float:
    r"""∫₀^h e^{−τ} τ^k/k! dτ = 1 − e^{−h} Σ_{j ≤ k} h^j/j!; equals 1 at h = ∞."""
    if math.isinf(h):
        return 1.0
    # e^{−h} h^{k+1} Σ_j h^j/(j + k + 1)!: all terms positive, nothing cancels; converges fast for h of a step.
    if h > 30.0:
        return 1.0 - math.exp(-h) * sum(h**j / math.factorial(j) for j in range(k + 1))
    term = total = h ** (k + 1) / math.factorial(k + 1)
    j = k + 2
    while term > total * 1e-18:
        term *= h / j
        total += term
        j += 1
    return math.exp(-h) * total


def lagrange(nodes: list[float], j: int) -> list[float]:
    r"""Coefficients (lowest power first) of the Lagrange polynomial that is 1 at nodes[j] and 0 at the others."""
    poly = [1.0]
    for m, node in enumerate(nodes):
        if m == j:
            continue
        scale = 1.0 / (nodes[j] - node)
        shifted = [0.0, *poly]
        poly = [scale * (a - node * b) for a, b in zip(shifted, [*poly, 0.0], strict=True)]
    return poly
