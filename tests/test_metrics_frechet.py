"""Fréchet distance: closed forms, float64 reference, torchmetrics, streaming and stored statistics."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn

from reference import save
from steindiff.metrics import Moments, frechet_distance, references


def features(count: int, size: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
    return torch.randn(count, size, generator=generator, dtype=torch.float64) @ mix + shift


def moments_of(mean, covariance, count=1000):
    mean, covariance = torch.as_tensor(mean).double(), torch.as_tensor(covariance).double()
    return Moments(count, mean, covariance * (count - 1))


def test_diagonal_gaussians_have_a_closed_form():
    """W² = Σ (m − n)² + (s − t)² for independent coordinates with deviations s, t."""
    a = moments_of([0.0, 1.0, 2.0], torch.diag(torch.tensor([1.0, 4.0, 9.0])))
    b = moments_of([1.0, 1.0, 0.0], torch.diag(torch.tensor([4.0, 4.0, 0.0])))
    assert frechet_distance(a, b) == pytest.approx(1 + 0 + 4 + 1 + 0 + 9, abs=1e-6)


def test_scaling_and_shifting_data_has_a_closed_form():
    """Of x and c x + m the distance is (1 − c)² tr Σ + ‖μ − cμ − m‖²."""
    x = features(500, 6, 0)
    a, b = Moments.of(x), Moments.of(2 * x + 3)
    expected = a.covariance.trace() + (a.mean + 3).square().sum()
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-10)


def test_agrees_with_a_float64_matrix_root():
    a, b = Moments.of(features(800, 64, 1)), Moments.of(features(900, 64, 2, shift=0.1))
    root = scipy.linalg.sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    expected = float(
        (a.mean - b.mean).square().sum() + a.covariance.trace() + b.covariance.trace() - 2 * np.trace(root)
    )
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-6)
    assert frechet_distance(b, a) == pytest.approx(expected, abs=1e-6)


def test_rank_deficient_covariances_are_exact():
    """Twenty samples in 64 dimensions: a set against itself is at distance 0, against its shift at ‖shift‖²."""
    x = features(20, 64, 3)
    a, b = Moments.of(x), Moments.of(x + 0.5)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-5)
    assert frechet_distance(a, b) == pytest.approx(64 * 0.25, abs=1e-5)


class Flat(nn.Module):
    """A small feature network on bytes."""

    num_features = 12

    def forward(self, images):
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(images[0].numel(), 12, generator=generator, dtype=torch.float64)
        return (images.flatten(1).double() / 255 @ weight).float()


def test_agrees_with_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid")
    generator = torch.Generator().manual_seed(0)
    real = torch.randint(0, 256, (300, 3, 8, 8), generator=generator, dtype=torch.uint8)
    fake = torch.randint(0, 180, (250, 3, 8, 8), generator=generator, dtype=torch.uint8)
    metric = fid.FrechetInceptionDistance(feature=Flat())
    metric.update(real, real=True)
    metric.update(fake, real=False)
    ours = frechet_distance(Moments.stream(real.split(64), Flat()), Moments.stream(fake.split(50), Flat()))
    assert ours == pytest.approx(float(metric.compute()), abs=1e-3)


def test_streaming_and_merging_are_exact():
    x = features(1000, 16, 4) * 3 + 100
    whole = Moments.of(x)
    streamed = Moments.stream(x.split(37), lambda batch: batch)
    merged = Moments.of(x[:1]) + Moments.of(x[1:400]) + Moments.of(x[400:])
    reference = np.cov(x.numpy(), rowvar=False)
    for moments in (whole, streamed, merged):
        assert moments.count == 1000
        np.testing.assert_allclose(moments.mean, x.mean(dim=0), rtol=1e-12)
        np.testing.assert_allclose(moments.covariance, reference, rtol=1e-9, atol=1e-10)


def test_streaming_holds_one_batch_at_a_time():
    alive = 0

    def batches():
        nonlocal alive
        for seed in range(50):
            alive += 1
            yield features(10, 4, seed)

    seen = []
    Moments.stream(batches(), lambda batch: (seen.append(alive), batch)[1])
    assert seen == list(range(1, 51))


def test_bad_features_are_named():
    with pytest.raises(ValueError, match=r"got \(3,\)"):
        Moments.of(torch.zeros(3))
    with pytest.raises(ValueError, match="NaN or infinity"):
        Moments.of(torch.tensor([[1.0], [float("nan")]]))
    with pytest.raises(ValueError, match="no batch"):
        Moments.stream([], lambda batch: batch)
    with pytest.raises(ValueError, match="4 and 5"):
        frechet_distance(Moments.of(features(9, 4, 0)), Moments.of(features(9, 5, 0)))
    with pytest.raises(ValueError, match="4 and 5"):
        Moments.of(features(9, 4, 0)) + Moments.of(features(9, 5, 0))
    with pytest.raises(ValueError, match="count = 1"):
        _ = Moments.of(features(1, 4, 0)).covariance
    with pytest.raises(ValueError, match=r"got \(2,\), \(3, 3\)"):
        Moments(2, torch.zeros(2), torch.zeros(3, 3))


def test_stored_statistics_round_trip(tmp_path):
    a, b = Moments.of(features(800, 64, 1)), Moments.of(features(900, 64, 2))
    save(tmp_path / "a.npz", a)
    stored = references.read(tmp_path / "a.npz")
    assert stored.count == 800
    assert frechet_distance(stored, b) == pytest.approx(frechet_distance(a, b), abs=1e-4)
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_bad_statistics_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a\.npz: no such file"):
        references.read(tmp_path / "a.npz")
    save(tmp_path / "a.npz", Moments.of(features(20, 4, 1)))
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:-60])
    with pytest.raises(RuntimeError, match=r"a\.npz: truncated or altered"):
        references.read(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", count=3, mean=np.zeros(4), covariance=np.zeros(4))
    with pytest.raises(RuntimeError, match=r"b\.npz: covariance \(4,\) does not fit"):
        references.read(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", other=np.zeros(4))
    with pytest.raises(RuntimeError, match=r"c\.npz: truncated or altered"):
        references.read(tmp_path / "c.npz")
    with pytest.raises(ValueError, match=r"name = 'lsun'.*cifar10-train"):
        references.load("lsun")


def test_shipped_reference_is_cifar10_train():
    moments = references.load("cifar10-train")
    assert moments.count == 50_000
    assert moments.mean.shape == (2048,)
    assert bool((torch.diagonal(moments.covariance) > 0).all())
