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
        index = band_index(self, coefficients.device).flatten()
        flat = coefficients.flatten(1).double()
        total = flat.new_zeros(len(flat), self.bands).index_add_(1, index, flat)
        return total / index.bincount(minlength=self.bands)

    def spread(self, gain: Tensor) -> Tensor:
        """Every coefficient's own factor, `(*)`, from one per band, `(K,)`."""
        return gain[band_index(self, gain.device)]

    def filter(self, x: Tensor, factors: Tensor) -> Tensor:
        """Multiply the coefficients of `x`, `(B, *)`, by `factors`, `(*)`."""
        return self.inverse(self.forward(x) * factors)


@lru_cache(maxsize=64)
def band_index(basis: Basis, device: torch.device) -> Tensor:
    """A basis's band index, made once per device."""
    return basis.index().to(device)


@lru_cache(maxsize=64)
def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    r"""Orthonormal DCT-II, `(n, n)`: row k is √(2/n) cos(π k (2j + 1)/(2n)), row 0 scaled by 1/√2."""
    k = torch.arange(n, dtype=torch.float64)
    matrix = torch.cos(math.pi * k[:, None] * (2 * k + 1) / (2 * n)) * (2 / n) ** 0.5
    matrix[0] *= 2**-0.5
    return matrix.to(device, dtype)


@lru_cache(maxsize=64)
def rotation_matrix(rows: tuple[tuple[float, ...], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A channel rotation as a tensor, made once per dtype and device."""
    return torch.tensor(rows, dtype=torch.float64).to(device, dtype)


@dataclass(frozen=True)
class DCT(Basis):
    r"""Cosine transform of each rotated channel; bands are rings of equal max(k) per channel.

    Matrix products: at the sizes of images and latents they beat an FFT, and they are exact transposes of each other.

    Args:
        shape: `(C, L)` or `(C, H, W)`.
        rotation: orthonormal C×C matrix mixing the channels; empty: leave them as they are (latents).
        rings: how many rings a channel has at most; neighbouring ones are merged.
    """

    shape: tuple[int, ...]
    rotation: tuple[tuple[float, ...], ...] = ()
    rings: int = 64

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3) or any(n < 1 for n in self.shape):
            raise ValueError(f"shape = {self.shape}: a DCT needs (channels, length) or (channels, height, width)")
        if self.rings < 1:
            raise ValueError(f"rings = {self.rings}: allowed are whole numbers >= 1")
        if self.rotation:
            matrix = torch.tensor(self.rotation, dtype=torch.float64)
            channels = self.shape[0]
            if matrix.shape != (channels, channels) or not torch.allclose(
                matrix @ matrix.T, torch.eye(channels, dtype=torch.float64), atol=1e-6
            ):
                raise ValueError(f"rotation: must be an orthonormal {channels}×{channels} matrix")

    @property
    def _rings(self) -> int:
        return min(self.rings, max(self.shape[1:]))

    @property
    def bands(self) -> int:
        return self.shape[0] * self._rings

    def index(self) -> Tensor:
        channels, *axes = self.shape
        longest = max(axes)
        # Along a shorter axis frequencies are as many cycles per pixel apart as along the longest.
        k = [torch.arange(n, dtype=torch.float64) * (longest / n) for n in axes]
        ring = torch.stack(torch.meshgrid(*k, indexing="ij")).amax(0)
        ring = (ring * self._rings / longest + 1e-9).long().clamp(max=self._rings - 1)
        return torch.arange(channels).reshape(-1, *[1] * len(axes)) * self._rings + ring

    def _mix(self, x: Tensor, *, back: bool) -> Tensor:
        if not self.rotation:
            return x
        matrix = rotation_matrix(self.rotation, x.dtype, x.device)
        return torch.einsum("dc,bc...->bd...", matrix.T if back else matrix, x)

    def _transform(self, x: Tensor, *, back: bool) -> Tensor:
        matrices = [dct_matrix(n, x.dtype, x.device) for n in self.shape[1:]]
        if back:
            matrices = [m.T for m in matrices]
        x = x @ matrices[-1].T
        return matrices[0] @ x if len(matrices) == 2 else x

    def forward(self, x: Tensor) -> Tensor:
        return self._transform(self._mix(x, back=False), back=False)

    def inverse(self, coefficients: Tensor) -> Tensor:
        return self._mix(self._transform(coefficients, back=True), back=True)


@dataclass(frozen=True)
class Identity(Basis):
    """The coordinates themselves, one band: for plain vectors, or to correct the energy as a whole."""

    shape: tuple[int, ...]

    @property
    def bands(self) -> int:
        return 1

    def index(self) -> Tensor:
        return torch.zeros(self.shape, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def inverse(self, coefficients: Tensor) -> Tensor:
        return coefficients


def natural_basis(shape: tuple[int, ...]) -> Basis:
    """The basis to use unless told otherwise: DCT for images, latents and signals, identity for vectors."""
    if len(shape) not in (2, 3):
        return Identity(shape)
    return DCT(shape, OPPONENT if shape[0] == 3 else ())
