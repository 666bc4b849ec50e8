r"""Orthonormal bases, cut into bands, in which the energy of a denoised image is compared and corrected.

Averages over a band are per coefficient: E|x_f|² is the mean square of the coefficients in band f.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from steindiff._checks import at_least
from steindiff._discovery import Registry

OPPONENT = (
    (3**-0.5, 3**-0.5, 3**-0.5),
    (2**-0.5, -(2**-0.5), 0.0),
    (6**-0.5, 6**-0.5, -2 * 6**-0.5),
)
"""Orthonormal rotation of RGB: brightness, red–green, yellow–blue."""


class Basis(ABC):
    """An orthonormal basis of samples of one shape, its coefficients cut into bands. Children are frozen dataclasses.

    Attributes:
        shape: of one sample, `(*)`.
    """

    shape: tuple[int, ...]

    @property
    @abstractmethod
    def bands(self) -> int:
        """Number K of bands."""

    @abstractmethod
    def index(self) -> Tensor:
        """The band of every coefficient, int64, of the shape of a sample's coefficients."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Coefficients of the samples `x`, `(B, *)`."""

    @abstractmethod
    def inverse(self, coefficients: Tensor) -> Tensor:
        """The samples with the given coefficients; undoes `forward` exactly up to rounding."""

    def average(self, coefficients: Tensor) -> Tensor:
        """Mean over the coefficients of each band: `(B, *)` to `(B, K)`, in float64."""
        order, sizes = band_order(self, coefficients.device), band_sizes(self, coefficients.device)
        flat = coefficients.flatten(1)[:, order].double()
        # In one order on every device: sums by index are not, on a GPU.
        lengths = sizes.expand(len(flat), -1).contiguous()
        return torch.segment_reduce(flat, "sum", lengths=lengths, axis=1, unsafe=True) / sizes

    def spread(self, gain: Tensor) -> Tensor:
        """Every coefficient's own factor, `(*)`, from one per band, `(K,)`."""
        return gain[band_index(self, gain.device)]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must also serve where gradients are taken
def band_index(basis: Basis, device: torch.device) -> Tensor:
    """A basis's band index, made once per device."""
    return basis.index().to(device)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def band_sizes(basis: Basis, device: torch.device) -> Tensor:
    """How many coefficients each band has, `(K,)`, made once per device."""
    return band_index(basis, device).flatten().bincount(minlength=basis.bands)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def band_order(basis: Basis, device: torch.device) -> Tensor:
    """The coefficients' places, flat, sorted by band, made once per device."""
    return band_index(basis, device).flatten().argsort(stable=True)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Orthonormal DCT-II, `(n, n)`: row k is √(2/n) cos(π k (2j + 1)/(2n)), row 0 scaled by 1/√2."""
    k = torch.arange(n, dtype=torch.float64)
    matrix: Tensor = torch.cos(math.pi * k[:, None] * (2 * k + 1) / (2 * n)) * (2 / n) ** 0.5
    matrix[0] *= 2**-0.5
    return matrix.to(device, dtype)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def mixing_matrix(rows: tuple[tuple[float, ...], ...], n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A rotation of C channels and a DCT of length n as one matrix, their Kronecker product `(C n, C n)`."""
    cosines = dct_matrix(n, torch.float64, torch.device("cpu"))
    return torch.kron(torch.tensor(rows, dtype=torch.float64), cosines).to(device, dtype)


OCTAVES = 4
"""Temporal bands of a video: frequency 0, 1, 2 to 3, and all above."""


@dataclass(frozen=True)
class DCT(Basis):
    r"""Cosine transform of each rotated channel; bands are rings of equal max(k) per channel.

    Videos have a ring for each of up to four octaves of temporal frequency: `OCTAVES` times fewer rings, as many bands.

    One matrix product an axis, one of which mixes the channels as well: at the sizes of images and latents they beat an
    FFT, they are few, which counts on a GPU, and there and back are exact transposes of each other.

    Args:
        shape: `(C, L)`, `(C, H, W)` or `(C, F, H, W)`.
        rotation: orthonormal C×C matrix mixing the channels; empty: leave them as they are (latents).
        rings: how many bands a channel has at most; neighbouring rings are merged.
    """

    shape: tuple[int, ...]
    rotation: tuple[tuple[float, ...], ...] = ()
    rings: int = 64

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3, 4) or any(n < 1 for n in self.shape):
            raise ValueError(f"shape must be (C, length), (C, H, W) or (C, frames, H, W) for a DCT, got {self.shape}")
        at_least("rings", self.rings, 1)
        if self.rotation:
            matrix, channels = torch.tensor(self.rotation, dtype=torch.float64), self.shape[0]
            unit = torch.eye(channels, dtype=torch.float64)
            if matrix.shape != unit.shape or not torch.allclose(matrix @ matrix.T, unit, atol=1e-6):
                raise ValueError(f"rotation: must be an orthonormal {channels}×{channels} matrix")

    @property
    def _octaves(self) -> int:
        """Temporal bands; a single frame is an image."""
        frames = self.shape[1] if len(self.shape) == 4 else 1
        return min(OCTAVES, (frames - 1).bit_length() + 1, self.rings)

    @property
    def _rings(self) -> int:
        return min(self.rings // self._octaves, max(self.shape[1:][-2:]))

    @property
    def bands(self) -> int:
        return self.shape[0] * self._octaves * self._rings

    def index(self) -> Tensor:
        channels, *axes = self.shape
        space = axes[-2:]
        longest = max(space)
        # Along a shorter axis frequencies are as many cycles per pixel apart as along the longest.
        k = [torch.arange(n, dtype=torch.float64) * (longest / n) for n in space]
        ring = torch.stack(torch.meshgrid(*k, indexing="ij")).amax(0)
        ring = (ring * self._rings / longest + 1e-9).long().clamp(max=self._rings - 1)
        if len(axes) == 3:
            octave = torch.tensor([min(k.bit_length(), self._octaves - 1) for k in range(axes[0])])
            ring = octave[:, None, None] * self._rings + ring
        return torch.arange(channels).reshape(-1, *[1] * len(axes)) * (self._octaves * self._rings) + ring

    def _left(self, x: Tensor) -> Tensor:
        """What acts on the first axis: on the rotated channels together, or on each channel alone."""
        n = self.shape[1] if len(self.shape) > 2 else 1
        return mixing_matrix(self.rotation or ((1.0,),), n, x.dtype, x.device)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self._left(x), dct_matrix(self.shape[-1], x.dtype, x.device)
        out = x @ right.T
        if len(self.shape) == 4:
            out = product(dct_matrix(self.shape[2], x.dtype, x.device), out).flatten(-2)
        return product(left, out).reshape(x.shape)

    def inverse(self, coefficients: Tensor) -> Tensor:
        x = coefficients
        left, right = self._left(x), dct_matrix(self.shape[-1], x.dtype, x.device)
        if len(self.shape) == 4:
            x = product(left.T, x.flatten(-2)).reshape(x.shape)
            left = dct_matrix(self.shape[2], x.dtype, x.device)
        return product(left.T, x) @ right


def product(left: Tensor, x: Tensor) -> Tensor:
    """`left`, `(n, n)`, times every n rows of `x`, `(B, *, W)`, in one batched product."""
    rows = x.reshape(-1, len(left), x.shape[-1])
    return torch.bmm(left.expand(len(rows), -1, -1), rows).reshape(x.shape)


@dataclass(frozen=True)
class Identity(Basis):
    """The coordinates themselves, one band: for plain vectors, or to correct the energy as a whole."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or any(n < 1 for n in self.shape):
            raise ValueError(f"shape must hold whole numbers >= 1, got {self.shape}")

    @property
    def bands(self) -> int:
        return 1

    def index(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.int64)

    def average(self, coefficients: Tensor) -> Tensor:
        return coefficients.flatten(1).mean(1, keepdim=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def inverse(self, coefficients: Tensor) -> Tensor:
        return coefficients


def natural_basis(shape: tuple[int, ...]) -> Basis:
    """The basis unless told otherwise: DCT for signals, images, videos and their latents, identity for vectors."""
    if len(shape) == 1:
        return Identity(shape)
    return DCT(shape, OPPONENT if shape[0] == 3 else ())


BASES: Registry[Basis] = Registry(__name__, Basis)
"""The kinds of bases a calibration may name."""
