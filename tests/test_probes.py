"""Probes: derivatives that are right, counted, and available on every kind of host."""

from __future__ import annotations

import pytest
import torch

from problems import FLOAT, Nonlinear
from steindiff.probes import by_autograd, by_functional, pullback

routes = pytest.mark.parametrize("route", [by_autograd, by_functional])


@routes
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_pullback_gives_the_output_and_transposed_jacobian_products_from_one_call(route, context):
    network, calls = Nonlinear(), []

    def function(z: torch.Tensor) -> torch.Tensor:
        calls.append(len(z))
        return network(z, torch.zeros(len(z), dtype=FLOAT))

    x = torch.linspace(-1, 1, 18, dtype=FLOAT).reshape(3, 6)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: network(z[None], torch.zeros(1, dtype=FLOAT))[0]))(x)
    with context():
        output, pull = pullback(function, x.clone(), route)
        pulled = [pull(v.clone()) for v in (torch.ones_like(x), x)]
    assert calls == [3]
    assert torch.equal(output, network(x, torch.zeros(3, dtype=FLOAT)))
    assert not output.requires_grad
    for v, row in zip((torch.ones_like(x), x), pulled, strict=True):
        torch.testing.assert_close(row, torch.einsum("bij,bi->bj", jacobian, v), atol=1e-13, rtol=0)
        assert not row.requires_grad


@routes
def test_pullback_of_a_function_that_ignores_its_argument_is_zero(route):
    x = torch.ones(2, 3, dtype=FLOAT)
    output, pull = pullback(lambda z: torch.full_like(z, 2.0).detach(), x, route)
    assert torch.equal(output, torch.full_like(x, 2.0))
    assert torch.equal(pull(x), torch.zeros_like(x))
