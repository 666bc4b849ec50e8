"""The scalar functions behind the tables, against arbitrary precision."""

from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steindiff.phi import decay_moment, lagrange, phi


@given(k=st.integers(0, 4), z=st.floats(-60.0, 0.0))
def test_phi(k: int, z: float):
    with mpmath.workdps(60):
        exact = (
            mpmath.exp(z)
            if k == 0
            else mpmath.quad(
                lambda s: mpmath.exp((1 - s) * mpmath.mpf(z)) * s ** (k - 1) / mpmath.factorial(k - 1), [0, 0.5, 0.9, 1]
            )
        )
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
