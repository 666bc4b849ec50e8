"""What every probe must keep, for every variant found in the folder."""

from __future__ import annotations

import pytest
import torch

from paper_only.probes import VARIANTS as COMPARED
from problems import FLOAT, Nonlinear
from steindiff import GRIDS, SOLVERS, noise
from steindiff.denoisers import X0
from steindiff.probes import PROBES, FiniteDifference, Hutchinson, Probe
from steindiff.schedules import VP
from steindiff.solvers import Solver
from stepping import step_at

FOUND = {**PROBES, **COMPARED}
probes = pytest.mark.parametrize("probe", FOUND.values(), ids=FOUND.keys())
LEVELS = GRIDS["logsnr"](VP(), 6)


def middle(solver: Solver, i: int = 3):
    denoiser = X0(Nonlinear())
    x = noise(range(4), (6,), LEVELS[0], FLOAT)
    step, x = step_at(solver, denoiser, LEVELS, i, x)
    return step, x, LEVELS[i], denoiser


@probes
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS.keys())
@pytest.mark.parametrize("i", [0, 3, 5])
def test_takes_the_plain_step_and_counts_its_network_calls(probe: Probe, solver: Solver, i: int):
    step, x, level, denoiser = middle(solver, i)
    plain = step(x)
    before = denoiser.calls
    probed = probe(step, x, level, torch.Generator().manual_seed(0))
    assert denoiser.calls - before == len(plain.evaluations) + probed.extra_calls
    assert probed.extra_calls == 0 or isinstance(probe, FiniteDifference)
    assert torch.equal(probed.candidate, plain.candidate)
    for a, b in zip(probed.evaluations, plain.evaluations, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.d, b.d)
        assert a.level == b.level
    assert not any(t.requires_grad for t in (probed.candidate, probed.divergence, *(e.d for e in probed.evaluations)))
    assert probed.divergence.shape == probed.error.shape == (4,)


@probes
def test_is_pure_given_its_generator(probe: Probe):
    step, x, level, _ = middle(SOLVERS["heun"])
    first, second = (probe(step, x, level, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first.divergence, second.divergence)


@probes
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_runs_where_gradients_are_off(probe: Probe, context):
    step, x, level, _ = middle(SOLVERS["dpmpp-2m"])
    expected = probe(step, x, level, torch.Generator().manual_seed(0)).divergence
    with context():
        found = probe(step, x.clone(), level, torch.Generator().manual_seed(0)).divergence
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "probe", [p for p in PROBES.values() if isinstance(p, Hutchinson)], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("solver", ["dpmpp-3m", "unipc-bh2-3", "heun"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 9])
def test_chunks_give_the_same_result(probe: Hutchinson, solver: str, chunk: int):
    step, x, level, _ = middle(SOLVERS[solver])
    whole = probe(step, x, level, torch.Generator().manual_seed(0))
    parted = type(probe)(**{**vars(probe), "chunk": chunk})(step, x, level, torch.Generator().manual_seed(0))
    torch.testing.assert_close(parted.divergence, whole.divergence, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(parted.candidate, whole.candidate, atol=1e-14, rtol=1e-14)
    assert parted.backward_passes == whole.backward_passes
    assert parted.extra_calls == whole.extra_calls
    for a, b in zip(parted.evaluations, whole.evaluations, strict=True):
        torch.testing.assert_close(a.d, b.d, atol=1e-14, rtol=1e-14)
