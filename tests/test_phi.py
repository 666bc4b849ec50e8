"""The scalar functions behind the tables, against arbitrary precision."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steindiff.solvers.base import decay_moment, lagrange, phi


@settings(max_examples=40)
@given(k=st.integers(0, 4), z=st.floats(-60.0, 0.0))
def test_phi(k: int, z: float):
    with mpmath.workdps(60):  # φ_k(z) = ∫₀¹ e^{(1−s)z} s^{k−1} ds/(k−1)! = 1F1(1; k + 1; z)/k!
        exact = mpmath.hyp1f1(1, k + 1, mpmath.mpf(z)) / mpmath.factorial(k)
    assert phi(k, z) == pytest.approx(float(exact), rel=1e-12)


@given(k=st.integers(0, 3), h=st.floats(1e-9, 200.0))
def test_decay_moment(k: int, h: float):
    with mpmath.workdps(60):
        exact = mpmath.gammainc(k + 1, 0, mpmath.mpf(h), regularized=True)
    assert decay_moment(k, h) == pytest.approx(float(exact), rel=1e-12)


def test_limits():
    assert phi(3, 0.0) == pytest.approx(1 / 6)
    assert decay_moment(2, math.inf) == 1.0


@given(nodes=st.lists(st.integers(-8, 8), min_size=1, max_size=4, unique=True))
def test_lagrange(nodes: list[int]):
    points = [float(n) for n in nodes]
    for j in range(len(points)):
        coefficients = lagrange(points, j)
        for m, node in enumerate(points):
            value = sum(c * node**p for p, c in enumerate(coefficients))
            assert value == pytest.approx(float(m == j), abs=1e-8)
