"""Orthonormal bases and their bands."""

from __future__ import annotations

import pytest
import scipy.fft
import torch
from hypothesis import given
from hypothesis import strategies as st

from problems import FLOAT
from steindiff.bases import DCT, OPPONENT, Basis, Identity, natural_basis

BASES = [
    DCT((3, 8, 8), OPPONENT),
    DCT((4, 6, 9)),
    DCT((1, 28, 28), rings=5),
    DCT((2, 15)),
    DCT((4, 5, 6, 9)),
    DCT((3, 2, 4, 4), OPPONENT),
    DCT((2, 1, 7, 6)),
    DCT((2, 9, 16, 8), rings=12),
    Identity((7,)),
    Identity((2, 3, 4, 5)),
]
bases = pytest.mark.parametrize("basis", BASES, ids=repr)


def samples(shape: tuple[int, ...], num: int = 3) -> torch.Tensor:
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(0), dtype=FLOAT)


@bases
def test_is_orthonormal_and_inverts_exactly(basis: Basis):
    x, y = samples(basis.shape), samples(basis.shape).flip(0)
    torch.testing.assert_close(basis.inverse(basis.forward(x)), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(basis.forward(basis.inverse(x)), x, rtol=0, atol=1e-13)
    inner = (basis.forward(x) * basis.forward(y)).flatten(1).sum(1)
    torch.testing.assert_close(inner, (x * y).flatten(1).sum(1), rtol=1e-12, atol=1e-12)


@bases
def test_bands_cover_every_coefficient(basis: Basis):
    index = basis.index()
    assert tuple(index.shape) == basis.shape
    assert sorted(index.unique().tolist()) == list(range(basis.bands))
    ones = torch.ones(2, *basis.shape, dtype=FLOAT)
    torch.testing.assert_close(basis.average(ones), torch.ones(2, basis.bands, dtype=FLOAT))


@bases
def test_filtering_scales_band_energies(basis: Basis):
    x = samples(basis.shape)
    gain = torch.linspace(0.5, 2.0, basis.bands, dtype=FLOAT)
    before = basis.average(basis.forward(x).square())
    after = basis.average(basis.forward(basis.inverse(basis.forward(x) * basis.spread(gain))).square())
    torch.testing.assert_close(after, before * gain**2, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        basis.inverse(basis.forward(x) * basis.spread(torch.ones_like(gain))), x, rtol=0, atol=1e-12
    )


@given(height=st.integers(1, 12), width=st.integers(1, 12), channels=st.integers(1, 4))
def test_is_the_orthonormal_dct(height: int, width: int, channels: int):
    x = samples((channels, height, width), 2)
    expected = scipy.fft.dctn(x.numpy(), axes=(2, 3), norm="ortho")
    torch.testing.assert_close(
        DCT((channels, height, width)).forward(x), torch.from_numpy(expected), rtol=0, atol=1e-12
    )


def test_rings_are_the_larger_frequency():
    index = DCT((1, 4, 4)).index()[0]
    assert index.tolist() == [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]]


@given(frames=st.integers(1, 9), height=st.integers(1, 6), width=st.integers(1, 6))
def test_a_video_is_transformed_along_its_three_axes(frames: int, height: int, width: int):
    x = samples((2, frames, height, width), 2)
    expected = scipy.fft.dctn(x.numpy(), axes=(2, 3, 4), norm="ortho")
    torch.testing.assert_close(DCT(tuple(x.shape[1:])).forward(x), torch.from_numpy(expected), rtol=0, atol=1e-12)


def test_bands_of_a_video_are_octaves_in_time_times_rings_in_space():
    basis = DCT((1, 6, 4, 4))
    index = basis.index()[0]
    assert basis.bands == 4 * 4
    assert index[:, 0, 0].tolist() == [0, 4, 8, 8, 12, 12]
    assert index[1].tolist() == [[4, 5, 6, 7], [5, 5, 6, 7], [6, 6, 6, 7], [7, 7, 7, 7]]
    assert index.flatten().bincount().tolist() == [1, 3, 5, 7] * 2 + [2, 6, 10, 14] * 2
    assert DCT((16, 81, 60, 104)).bands == 16 * 64


def test_a_single_frame_is_an_image():
    video, image = DCT((4, 1, 6, 9)), DCT((4, 6, 9))
    x = samples((4, 6, 9))
    assert torch.equal(video.index()[:, 0], image.index())
    torch.testing.assert_close(video.forward(x[:, :, None])[:, :, 0], image.forward(x), rtol=0, atol=1e-13)


def test_a_grey_image_has_brightness_alone():
    basis = DCT((3, 8, 8), OPPONENT)
    grey = samples((1, 8, 8)).expand(-1, 3, -1, -1)
    energy = basis.average(basis.forward(grey).square()).reshape(3, 3, 8)
    assert float(energy[:, 1:].abs().max()) < 1e-25
    assert float(energy[:, 0].min()) > 0


def test_natural_choices():
    assert natural_basis((3, 32, 32)) == DCT((3, 32, 32), OPPONENT)
    assert natural_basis((4, 64, 64)) == DCT((4, 64, 64))
    assert natural_basis((2, 100)) == DCT((2, 100))
    assert natural_basis((16, 5, 8, 8)) == DCT((16, 5, 8, 8))
    assert natural_basis((64,)) == Identity((64,))
    with pytest.raises(ValueError, match=r"shape must be .* for a DCT, got \(2, 3, 4, 5, 6\)"):
        natural_basis((2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DCT((3,)), r"shape must be .* for a DCT, got \(3,\)"),
        (lambda: DCT((3, 0, 4)), r"shape must be .* for a DCT, got \(3, 0, 4\)"),
        (lambda: DCT((3, 4, 4), rings=0), "rings must be a whole number >= 1, got 0"),
        (lambda: DCT((3, 4, 4), ((1.0, 0.0), (0.0, 1.0))), "orthonormal 3×3"),
        (lambda: DCT((2, 4, 4), ((1.0, 1.0), (0.0, 1.0))), "orthonormal 2×2"),
    ],
)
def test_bad_settings_are_named(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
