"""Networks for measurements: weights in pieces, Muon, the strong U-Net."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from networks import pieces
from networks.muon import Muon, orthogonalised
from networks.strong import StrongConfig, strong

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
