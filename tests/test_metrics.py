"""Inception input, KID, precision and recall, Inception score, and networks that may be unavailable."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from steindiff.metrics import (
    InceptionFeatures,
    WeightsUnavailable,
    dinov2_features,
    inception_classifier,
    inception_score,
    kernel_distance,
    precision_recall,
)
from steindiff.metrics.features import resize_matrix
from steindiff.metrics.scores import radii, squared_mmd


def test_resize_reads_unshifted_positions():
    """Doubling two pixels (a, b) gives a, (a + b)/2, b, b: positions 0, ½, 1, 1½ with the last one held."""
    expected = torch.tensor([[1, 0], [0.5, 0.5], [0, 1], [0, 1]], dtype=torch.float64)
    torch.testing.assert_close(resize_matrix(2, 4), expected)
    torch.testing.assert_close(resize_matrix(299, 299), torch.eye(299, dtype=torch.float64))
    torch.testing.assert_close(resize_matrix(32, 299).sum(dim=1), torch.ones(299, dtype=torch.float64))


def test_inception_input_convention():
    """Bytes reach the network as (x − 128)/128 at 299×299; a linear ramp stays linear."""
    features = InceptionFeatures(nn.Identity())
    images = (8 * torch.arange(32, dtype=torch.uint8)).expand(2, 3, 32, 32)
    x = features(images)
    assert x.shape == (2, 3, 299, 299)
    assert x.dtype == torch.float32
    assert float(x[0, 0, 0, 0]) == -1.0
    ramp = 8 * torch.arange(299, dtype=torch.float64) * 32 / 299
    expected = (ramp.clamp(max=248) - 128) / 128
    torch.testing.assert_close(x[1, 2, 100].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_inception_loads_torchscript(tmp_path):
    class Pool(nn.Module):
        def forward(self, x):
            return x.mean(dim=(2, 3))

    torch.jit.trace(Pool(), torch.zeros(1, 3, 299, 299)).save(tmp_path / "net.pt")
    features = InceptionFeatures.load(tmp_path / "net.pt")
    images = torch.full((2, 3, 16, 16), 64, dtype=torch.uint8)
    torch.testing.assert_close(features(images), torch.full((2, 3), -0.5))
    with pytest.raises(ValueError, match=r"\(2, 1, 16, 16\)"):
        features(images[:, :1])
    (tmp_path / "net.pt").write_bytes((tmp_path / "net.pt").read_bytes()[:200])
    with pytest.raises(RuntimeError, match=r"net\.pt: not a whole TorchScript file") as caught:
        InceptionFeatures.load(tmp_path / "net.pt")
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"none\.pt: no such file"):
        InceptionFeatures.load(tmp_path / "none.pt")


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_what_torch_says_of_torchscript_is_not_passed_on(tmp_path, monkeypatch, category):
    """torch 2.15 warns in another category than 2.13; in this suite a warning is an error."""

    def load(path, map_location):
        warnings.warn("`torch.jit.load` is deprecated. Please switch to `torch.export`.", category, stacklevel=2)
        return nn.Identity()

    monkeypatch.setattr(torch.jit, "load", load)
    (tmp_path / "net.pt").touch()
    InceptionFeatures.load(tmp_path / "net.pt")


def test_squared_mmd_by_hand():
    """One feature, x = (0, 1), y = (1, 2): k(x, x') = 1, k(y, y') = 27, mean k(x, y) = (1 + 1 + 8 + 27)/4."""
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    assert float(squared_mmd(x, y)) == pytest.approx(1 + 27 - 2 * 37 / 4)


def test_kid_is_unbiased_for_equal_distributions_and_positive_for_others():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2000, 16, generator=generator)
    same = kernel_distance(x, y, subsets=50, size=200, generator=generator)
    other = kernel_distance(x, y + 0.5, subsets=50, size=200, generator=generator)
    assert abs(same.mean) < 0.01
    assert other.mean > 10 * other.error


@pytest.mark.filterwarnings("ignore:Metric `Kernel Inception Distance`:UserWarning")
def test_kid_agrees_with_torchmetrics():
    kid = pytest.importorskip("torchmetrics.image.kid")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 60, 8, generator=generator)

    class ScheduleCoordinates(nn.Module):
        num_features = 8

        def forward(self, index):
            return torch.cat([x, y])[index[:, 0, 0, 0].long()]

    index = torch.arange(120, dtype=torch.uint8)[:, None, None, None].expand(120, 3, 2, 2)
    metric = kid.KernelInceptionDistance(feature=ScheduleCoordinates(), subsets=1, subset_size=60)
    metric.update(index[:60], real=True)
    metric.update(index[60:], real=False)
    expected = float(metric.compute()[0])
    assert kernel_distance(x, y, subsets=1, size=60).mean == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 11}, "size must be from 2 to 10, the smaller set, got 11"),
        ({"size": 1}, "got 1$"),
        ({"size": 5, "subsets": 0}, "subsets must be a whole number >= 1, got 0"),
    ],
)
def test_bad_kid_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernel_distance(torch.zeros(10, 3), torch.zeros(20, 3), **arguments)
    with pytest.raises(ValueError, match=r"got \(10, 3\) and \(20, 4\)"):
        kernel_distance(torch.zeros(10, 3), torch.zeros(20, 4))


def test_radii_on_a_line():
    points = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert radii(points, 1).tolist() == [1.0, 1.0, 2.0, 4.0]
    assert radii(points, 2, chunk=3).tolist() == [3.0, 2.0, 3.0, 6.0]


def test_precision_and_recall_by_hand():
    """Real 0, 1, 2, 3 with unit balls; samples 0.5, 0.6, 9, 9.1: half are inside; only 0 … 1 are near the samples."""
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    sampled = torch.tensor([[0.5], [0.6], [9.0], [9.1]])
    assert precision_recall(real, sampled, k=1) == (0.5, 0.0)
    assert precision_recall(sampled, real, k=1) == (0.0, 0.5)
    assert precision_recall(real, real, k=1) == (1.0, 1.0)


def test_bad_precision_recall_arguments_are_named():
    with pytest.raises(ValueError, match=r"k must be from 1 to 3, .* got 4"):
        precision_recall(torch.zeros(4, 2), torch.zeros(9, 2), k=4)
    with pytest.raises(ValueError, match=r"got \(4, 2\) and \(9, 3\)"):
        precision_recall(torch.zeros(4, 2), torch.zeros(9, 3))


def test_inception_score_closed_forms():
    """K classes, sure and balanced: K. The same answer for all: 1. A mixture a·sure + (1 − a)·uniform: in between."""
    sure = 1e3 * torch.eye(7).repeat(20, 1)
    assert inception_score(sure, splits=2).mean == pytest.approx(7, rel=1e-9)
    assert inception_score(torch.randn(1, 7).expand(50, 7)).mean == pytest.approx(1, rel=1e-9)
    p = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    expected = math.exp(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5))
    score = inception_score(p.log().repeat(10, 1), splits=5)
    assert score.mean == pytest.approx(expected, rel=1e-6)
    assert score.deviation == pytest.approx(0, abs=1e-9)


def test_bad_inception_score_arguments_are_named():
    with pytest.raises(ValueError, match=r"splits must be from 1 to 10, .* got 11"):
        inception_score(torch.zeros(10, 3), splits=11)
    with pytest.raises(ValueError, match=r"\(10,\)"):
        inception_score(torch.zeros(10))


class Tiny(nn.Module):
    """A random network with the interface of the real ones."""

    def __init__(self, outputs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 7, stride=7), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, outputs)
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("loader", "size", "outputs"), [(inception_classifier, 299, 1000), (dinov2_features, 224, 1024)]
)
def test_real_loaders_on_tiny_random_networks(loader, size, outputs):
    torch.manual_seed(0)
    network = loader(build=lambda: Tiny(outputs))
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    out = network(images)
    assert out.shape == (3, outputs)
    assert network.size == size
    assert not network.network.training
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    expected = ((1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])).expand(size, size, 3)
    torch.testing.assert_close(network(white), network.network(expected.permute(2, 0, 1)[None]))
    with pytest.raises(ValueError, match=r"\(1, 1, 8, 8\)"):
        network(torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("error", [ImportError("No module named 'torchvision'"), OSError("offline\nmore"), OSError()])
@pytest.mark.parametrize("loader", [inception_classifier, dinov2_features])
def test_missing_weights_are_said_in_one_line(loader, error):
    def build():
        raise error

    with pytest.raises(WeightsUnavailable, match="weights not available") as caught:
        loader(build=build)
    assert "\n" not in str(caught.value)


def test_without_torchvision_the_score_is_unavailable(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision.models", None)
    with pytest.raises(WeightsUnavailable, match="torchvision InceptionV3: weights not available"):
        inception_classifier()


def test_without_a_network_dinov2_is_unavailable(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("name resolution failed")

    monkeypatch.setattr(torch.hub, "load", offline)
    with pytest.raises(WeightsUnavailable, match="DINOv2 ViT-L/14: weights not available"):
        dinov2_features()
