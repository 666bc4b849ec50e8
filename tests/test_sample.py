"""The sampling loop: seeds, batches, dtypes, callbacks, and what it refuses."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from problems import FLOAT, Nonlinear, gaussian, mixture
from steindiff import GRIDS, SOLVERS, Cancelled, noise, sample
from steindiff._discovery import named
from steindiff.denoisers import CountingDenoiser, EDMDenoiser, Epsilon, Gaussian, Preconditioned
from steindiff.sampler import levels_for
from steindiff.schedules import EDM, VP
from steindiff.solvers import DDIM, DPMSolverMultistep, Heun

LEVELS = GRIDS["edm"](EDM(), 5)


class Conv(torch.nn.Module):
    """A small convolutional network, where a batch could leak into a sample if the loop let it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 3, padding=1),
                torch.nn.GroupNorm(4, 16),
                torch.nn.SiLU(),
                torch.nn.Conv2d(16, 3, 3, padding=1),
            ).to(dtype)

    def forward(self, x, c_noise):
        return self.layers(x + c_noise.reshape(-1, 1, 1, 1))


def images(seeds, solver="dpmpp-2m", dtype=torch.float32, network_dtype=torch.float32):
    denoiser = EDMDenoiser(Preconditioned(Conv(network_dtype), dtype=network_dtype))
    return sample(denoiser, noise(seeds, (3, 8, 8), LEVELS[0], dtype), LEVELS, SOLVERS[solver])


@pytest.mark.parametrize("solver", ["ddim", "dpmpp-3m", "unipc-bh2-2", "heun", "ipndm-4"])
def test_an_image_depends_on_its_own_seed_alone(solver: str):
    seeds = [5, 11, 2, 7, 3, 19, 23]
    together = images(seeds, solver).x
    shuffled = images(seeds[::-1], solver).x.flip(0)
    torch.testing.assert_close(shuffled, together, rtol=1e-5, atol=1e-5)
    for k in (0, 3, 6):
        torch.testing.assert_close(images([seeds[k]], solver).x[0], together[k], rtol=1e-5, atol=1e-5)


def test_batch_invariance_is_bitwise_where_the_network_allows():
    """A pointwise denoiser computes each sample by itself; then so does the whole loop, to the bit."""
    denoiser = Gaussian(torch.tensor([0.3, -0.7, 0.0]), torch.tensor([0.25, 0.04, 1.5]))
    seeds = list(range(7))

    def run(chosen):
        return sample(denoiser, noise(chosen, (3,), LEVELS[0]), LEVELS, SOLVERS["dpmpp-3m"]).x

    together = run(seeds)
    assert torch.equal(run(seeds[::-1]).flip(0), together)
    for k in seeds:
        assert torch.equal(run([k])[0], together[k])


def test_noise_is_reproducible_and_scaled():
    a = noise([3, 4], (2, 5), EDM().level(80.0), FLOAT)
    assert torch.equal(a[1:], noise([4], (2, 5), EDM().level(80.0), FLOAT))
    assert not torch.equal(a[0], a[1])
    assert float(noise(range(200), (50,), EDM().level(3.0)).std()) == pytest.approx(3.0, rel=0.02)


def test_half_precision_network_under_a_wider_state():
    wide = images([1, 2], dtype=FLOAT, network_dtype=torch.bfloat16)
    full = images([1, 2], dtype=FLOAT, network_dtype=torch.float32)
    assert wide.x.dtype == FLOAT
    torch.testing.assert_close(wide.x, full.x, rtol=0.1, atol=0.1)
    assert not torch.equal(wide.x, full.x)


def test_the_prediction_adapter_casts_for_its_network():
    seen = []

    def network(x, t):
        seen.append((x.dtype, t.dtype))
        return 0.1 * x

    levels = GRIDS["logsnr"](VP(), 3)
    out = sample(Epsilon(network, dtype=torch.bfloat16), noise([1], (4,), levels[0], FLOAT), levels, DDIM())
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert out.x.dtype == FLOAT


def test_callback_sees_every_step_and_may_cancel():
    problem = mixture()
    moments = []
    x = noise([1, 2], (1,), LEVELS[0], FLOAT)
    out = sample(problem.denoiser, x, LEVELS, Heun(), callback=moments.append)
    assert [m.i for m in moments] == [0, 1, 2, 3, 4]
    assert [m.level for m in moments] == list(LEVELS[1:])
    assert torch.equal(moments[-1].x, out.x)
    assert all(m.denoised.shape == x.shape and m.steps == 5 for m in moments)
    with pytest.raises(Cancelled, match="after step 2 of 5"):
        sample(problem.denoiser, x, LEVELS, Heun(), callback=lambda m: m.i < 1)


def test_a_trajectory_is_kept_on_request():
    problem = gaussian()
    x = noise([1], (3,), LEVELS[0], FLOAT)
    out = sample(problem.denoiser, x, LEVELS, DDIM(), capture=True)
    assert len(out.trajectory) == 6
    assert torch.equal(out.trajectory[0], x)
    assert torch.equal(out.trajectory[-1], out.x)
    assert sample(problem.denoiser, x, LEVELS, DDIM()).trajectory == ()


class Broken(CountingDenoiser):
    """Denoises until it does not."""

    def __init__(self, at: int, value: float) -> None:
        self.at, self.value = at, value

    def denoise(self, x, level):
        return torch.full_like(x, self.value) if self.calls == self.at else 0.5 * x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_nan_from_the_network_is_said_with_its_step(value: float, at: int):
    with pytest.raises(
        RuntimeError, match=rf"step {at} of 5, sigma .*: the network's output \(evaluation 1\) became NaN"
    ):
        sample(Broken(at, value), noise([1], (3,), LEVELS[0]), LEVELS, DDIM())


def test_an_overflowing_state_is_said_with_its_step():
    class Huge(CountingDenoiser):
        def denoise(self, x, level):
            return torch.full_like(x, 3e38)

    with pytest.raises(RuntimeError, match=r"step \d of 5, .* the state became NaN or infinite"):
        sample(Huge(), noise([1], (3,), LEVELS[0]), LEVELS, SOLVERS["ipndm-4"])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), r"x must be a batch of samples .*, got shape \(4,\)"),
        (torch.zeros(0, 3), r"got shape \(0, 3\)"),
        (
            torch.zeros(2, 3, dtype=torch.float16),
            "x must be torch.float32 or torch.float64 .*, got torch.float16",
        ),
        (torch.zeros(2, 3, dtype=torch.int64), "got torch.int64"),
    ],
)
def test_bad_states_are_refused(x, message: str):
    with pytest.raises(ValueError, match=message):
        sample(gaussian().denoiser, x, LEVELS, DDIM())


def test_a_network_of_the_wrong_shape_is_refused():
    class Cropped(CountingDenoiser):
        def denoise(self, x, level):
            return x[:, :1]

    with pytest.raises(ValueError, match=r"denoiser must return the shape of its input \(1, 3\), got \(1, 1\)"):
        sample(Cropped(), noise([1], (3,), LEVELS[0]), LEVELS, DDIM())


@pytest.mark.parametrize(
    ("seeds", "shape", "message"),
    [
        ([], (3,), "seeds must hold at least one"),
        ([-1], (3,), "seeds must be whole numbers from 0 to .*, got -1"),
        ([1], (3, 0), r"shape must hold whole numbers >= 1, got \(3, 0\)"),
    ],
)
def test_bad_seeds_and_shapes_are_refused(seeds, shape, message: str):
    with pytest.raises(ValueError, match=message):
        noise(seeds, shape, LEVELS[0])


def test_unknown_names_list_what_is_allowed():
    with pytest.raises(ValueError, match=r"solver = 'eulr' is not known"):
        named("solver", "eulr", SOLVERS)


@pytest.mark.parametrize("nfe", [0, -1, 2.0, True])
def test_a_bad_budget_is_refused(nfe):
    with pytest.raises(ValueError, match="nfe must be a whole number >= 1"):
        levels_for(DDIM(), GRIDS["edm"], EDM(), nfe)


def test_a_budget_a_solver_cannot_spend_is_refused():
    with pytest.raises(ValueError, match=r"nfe must be one Heun\(\) can spend exactly, got 5; choose 4 or 6"):
        levels_for(Heun(), GRIDS["edm"], EDM(), 5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DPMSolverMultistep(4), "order must be one of 1, 2, 3, got 4"),
        (lambda: SOLVERS["unipc-bh1-1"].__class__(0), "order must be one of 1, 2, 3, got 0"),
        (lambda: SOLVERS["ipndm-4"].__class__(5), "order must be one of 1, 2, 3, 4, got 5"),
        (lambda: SOLVERS["deis-2"].__class__(5), "order must be one of 1, 2, 3, 4, got 5"),
        (lambda: SOLVERS["dpmpp-2s"].__class__(1), "order must be one of 2, 3, got 1"),
    ],
)
def test_bad_orders_are_refused(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_runs_under_inference_mode_and_leaves_no_graph():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = noise([1], (6,), LEVELS[0], FLOAT).requires_grad_()
        out = sample(Epsilon(Nonlinear()), x, LEVELS, DDIM())
        assert not out.x.requires_grad
        with torch.inference_mode():
            sample(Epsilon(Nonlinear()), x, LEVELS, DDIM())
