"""Networks for measurements: weights in pieces, Muon, the strong U-Net."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from networks import cosmology, electricity, pieces, signals, superresolution, variants
from networks.autoguided import Autoguided
from networks.labelled import labelled
from networks.muon import Muon, orthogonalised
from networks.strong import FOLDER, StrongConfig, strong
from networks.strong import load as load_strong
from steindiff import Sampler, load, zoo

TINY = StrongConfig(shape=(3, 8, 8), channels=(16, 32), blocks=(1, 2), attention=(False, True), head=16, embedding=32)


def test_pieces_are_small_and_whole(tmp_path):
    tensors = {f"layer.{i}": torch.randn(100, generator=torch.Generator().manual_seed(i)) for i in range(7)}
    paths = pieces.write(tmp_path, "net", tensors, limit=500)
    assert [path.name for path in paths] == [f"net-{i}of4.safetensors" for i in range(1, 5)]
    assert pieces.found(tmp_path, "net") == paths
    read = pieces.read(paths)
    assert list(read) == list(tensors)
    assert all(torch.equal(read[name], tensors[name].half()) for name in tensors)
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match="3 pieces, not a whole set"):
        pieces.found(tmp_path, "net")
    with pytest.raises(ValueError, match=r"limit must hold the largest tensor, layer\.0 with 200 bytes, got 199"):
        pieces.write(tmp_path, "net", tensors, limit=199)


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8)])
def test_newton_schulz_keeps_singular_vectors_and_levels_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    values = torch.diagonal(u.mT @ orthogonalised(x) @ vh.mT, dim1=1, dim2=2)
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_finds_a_linear_map():
    generator = torch.Generator().manual_seed(0)
    target, weight = torch.randn(6, 4, generator=generator), torch.nn.Parameter(torch.zeros(6, 4))
    muon = Muon([weight], lr=0.05)
    for step in range(200):
        muon.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        muon.zero_grad()
        (weight - target).square().sum().backward()
        muon.step()
    assert float((weight.detach() - target).norm() / target.norm()) < 0.05


def test_a_fresh_strong_network_is_the_denoiser_of_a_gaussian():
    """F = 0: D = σ_d² x / (σ² + σ_d²)."""
    net = strong(TINY)
    x, sigma = torch.randn(2, 3, 8, 8), torch.tensor([0.5, 2.0])
    expected = x * (0.25 / (sigma**2 + 0.25))[:, None, None, None]
    torch.testing.assert_close(net(x, sigma, torch.tensor([1, 2])), expected)


def test_the_strong_network_reads_noise_level_label_and_image():
    torch.manual_seed(0)
    net = strong(TINY)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)
    x, sigma, labels = torch.randn(2, 3, 8, 8), torch.tensor([0.5, 2.0]), torch.tensor([1, 2])
    base = net(x, sigma, labels)
    assert base.shape == x.shape
    for other in (net(x, 2 * sigma, labels), net(x, sigma, labels + 1), net(x, sigma), net(x.flip(-1), sigma, labels)):
        assert float((other - base).detach().abs().mean()) > 1e-4
    torch.testing.assert_close(net(x[:1], sigma[:1], labels[:1]), base[:1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(net(x, sigma), net(x, sigma, torch.tensor([10, 10])))


def test_the_full_network_stays_within_thirty_million_parameters():
    with torch.device("meta"):
        assert sum(p.numel() for p in strong().parameters()) < 30e6


def test_the_strong_network_is_loaded_from_its_pieces(tmp_path):
    torch.manual_seed(0)
    network = strong()
    torch.nn.init.normal_(network.network.leave.weight, std=0.01)
    pieces.write(tmp_path, "strong", dict(network.named_parameters()))
    model = load_strong(folder=tmp_path)
    level = model.schedule.level(1.0)
    x = model.noise([3, 14], level)
    with torch.no_grad():
        expected = network(x, torch.ones(2), torch.tensor([3, 4]))
        torch.testing.assert_close(model.denoiser_for([3, 14])(x, level), expected, atol=1e-3, rtol=1e-2)
    assert model.condition_of(14) == 4
    (tmp_path / "strong-1of3.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="2 pieces, not a whole set"):
        load_strong(folder=tmp_path)


@pytest.mark.skipif(not list(FOLDER.glob("strong-*")), reason="the weights are in the repository, not in its archives")
def test_the_trained_network_denoises_as_the_embedded_one_does():
    """Two networks of the same images: they differ by far less than either takes away."""
    strong_model, small = load_strong(), load("cifar10")
    level = small.schedule.level(0.5)
    clean = Sampler("dpmpp-2m", nfe=5)(small, range(2)).x
    noised = clean + small.noise([100, 101], level)
    with torch.no_grad():
        one, other = (model.denoiser_for([0, 1])(noised, level) for model in (strong_model, small))
    assert float((one - other).square().mean().sqrt()) < 0.05
    assert float((one - noised).square().mean().sqrt()) > 0.4


@pytest.mark.parametrize("make", [variants.int8, variants.bf16, variants.inference_only, variants.guided_2])
def test_variants_denoise_like_the_embedded_network(make):
    """Eight or sixteen bits cost a little; inference mode costs nothing and gives no gradient."""
    plain = load("cifar10", 2.0 if make is variants.guided_2 else 1.0, forward_only=True)  # laid out like the variants
    variant = make()
    level = plain.schedule.level(1.0)
    x = (plain.noise([0], level) + 0.2).requires_grad_()
    expected, found = plain.denoiser_for([0])(x, level), variant.denoiser_for([0])(x, level)
    error = float((found - expected).detach().norm() / expected.detach().norm())
    assert error < (0.05 if make in (variants.int8, variants.bf16) else 1e-6)
    assert (error > 0) == (make in (variants.int8, variants.bf16))
    assert variant.condition_of(13) == 3
    assert dict(variant.conditions) == dict(plain.conditions)
    if make is variants.inference_only:
        assert not variant.denoiser_for([0]).network(x, torch.ones(1)).requires_grad


def test_a_guided_network_lies_beyond_its_guide():
    """D_g + w (D_m − D_g) at the same labels: w = 1 is the network, w = 0 its guide."""
    x, sigma, labels = torch.randn(2, 3, 8, 8), torch.tensor([0.5, 2.0]), torch.tensor([1, 2])
    network, guide = (lambda x, sigma, labels, k=k: k * x + labels[:, None, None, None] for k in (3.0, 1.0))
    for scale, expected in ((0.0, 1.0), (1.0, 3.0), (1.5, 4.0)):
        guided = Autoguided(network, guide, scale)(x, sigma, labels)
        torch.testing.assert_close(guided, expected * x + labels[:, None, None, None])


def test_half_precision_is_bfloat16_on_a_cpu():
    """Which multiplies it fast; states stay in float32."""
    half, full = (labelled(zoo.load("fashion"), "fashion", "cpu", half=half, compiled=False) for half in (True, False))
    level = full.schedule.level(300.0)
    x = full.noise([0], level)
    network = half.denoiser_for([0]).network.func
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    expected, found = full.denoiser_for([0])(x, level), half.denoiser_for([0])(x, level)
    assert found.dtype == torch.float32
    assert 0.0 < float((found - expected).norm() / expected.norm()) < 0.05


def test_eight_bits_round_to_half_a_step():
    weight = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    stored = variants.EightBit(weight)
    assert stored.quantised.dtype == torch.int8
    assert bool(((stored() - weight).abs() <= 0.5 * stored.scale + 1e-7).all())


def test_heartbeats_come_from_their_generator_and_have_the_network_s_scale():
    x = signals.heartbeats(512, torch.Generator().manual_seed(0))
    assert torch.equal(x, signals.heartbeats(512, torch.Generator().manual_seed(0)))
    assert x.shape == (512, 1, signals.LENGTH)
    assert 0.5 * signals.SIGMA_DATA < float(x.std()) < 2 * signals.SIGMA_DATA


def test_low_resolution_pictures_are_averages():
    images = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    x = superresolution.prepared(images)
    assert x.shape == (1, *superresolution.SHAPE)
    assert float(x[0, 0, 8, 8]) == 1.0
    assert float(x[0, 0, 0, 0]) == -1.0
    torch.testing.assert_close(superresolution.lowered(x).mean(), x.mean())


@pytest.mark.parametrize("toy", [superresolution, signals])
def test_toys_sample(toy):
    """Their weights are there, and eight seeds of one condition differ less than seeds of several."""
    model = toy.load()
    x = Sampler("dpmpp-2m", "logsnr", 8)(model, range(64)).x
    assert x.shape == (64, *model.shape)
    assert 0.1 < float(x.std()) < 1.5
    if model.condition is not None:
        groups = x.reshape(8, 8, -1)
        assert float(groups.std(1).mean()) < 0.6 * float(x.std())


def constants():
    """In the layout of the package."""
    return {
        "kperp": np.geomspace(0.05, 1.5, 32),
        "kpar": np.geomspace(0.05, 1.5, 16),
        "Nmodes": np.outer(np.geomspace(4, 4000, 32), np.ones(16)),
        "noisy_mean": np.array([-6.0], np.float32),
        "noisy_std": np.array([11.0], np.float32),
    }


def test_noisy_spectra_belong_to_their_number():
    fields = cosmology.spectra([0, 1, 0], constants())
    assert fields.shape == (3, *cosmology.SHAPE)
    assert torch.equal(fields[0], fields[2])
    assert not torch.equal(fields[0], fields[1])
    assert float(fields.abs().max()) < 1.5
    rough = (fields[:, 0, 1:] - fields[:, 0, :-1]).abs()
    assert float(rough[:, :4].mean()) > 5 * float(rough[:, -4:].mean()), "few modes are noisier than many"


@pytest.mark.skipif(
    not (find_spec("psdenoiser") and find_spec("einops")), reason="21cmpsdenoiser or einops is not installed"
)
def test_the_cosmology_network_samples():
    state = torch.get_rng_state()
    model = cosmology.load()
    assert torch.equal(torch.get_rng_state(), state)
    x = Sampler("dpmpp-2m", "uniform", 4)(model, range(8)).x
    assert x.shape == (8, *cosmology.SHAPE)
    assert float(x.abs().max()) < 3


def test_days_belong_to_their_number():
    days = np.array([electricity.day(number) for number in range(400)])
    assert days.shape == (400, 23)
    assert electricity.day(7) == electricity.day(7)
    assert (days[:, :12].sum(1) == 1).all()
    assert (days[:, 12:19].sum(1) == 1).all()
    assert (days[:, 20] * 18.384 + 64.647 > days[:, 21] * 17.088 + 49.430).all(), "high above low"
    july, january = (days[days[:, month] == 1, 20].mean() for month in (6, 0))
    assert july > january + 1


@pytest.mark.skipif(find_spec("enerdatasynth") is None, reason="enerdatasynth is not installed")
def test_the_electricity_network_samples_days():
    state = torch.get_rng_state()
    model = electricity.load()
    assert torch.equal(torch.get_rng_state(), state)
    x = Sampler("dpmpp-3m", "logsnr", 20)(model, range(64)).x
    assert x.shape == (64, *electricity.SHAPE)
    assert -0.2 < float(x.min()) < float(x.max()) < 1.2
    night, evening = x[:, 0, 2:5].mean(), x[:, 0, 17:20].mean()
    assert float(evening) > float(night) + 0.05, "more is used in the evening"
