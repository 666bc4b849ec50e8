r"""The shape a pipeline keeps its state in, and the image it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    r"""Transformers such as Flux keep a latent `(C, H, W)` as H·W/p² tokens, each a p×p patch of all channels.

    Args:
        shape: of the latent, `(C, H, W)`.
        patch: p.
    """

    shape: tuple[int, ...]
    patch: int

    def unpack(self, tokens: Tensor) -> Tensor:
        """Tokens `(B, H·W/p², C·p²)` to latents `(B, C, H, W)`."""
        (c, h, w), p = self.shape, self.patch
        grid = tokens.reshape(len(tokens), h // p, w // p, c, p, p)
        return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), c, h, w)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents `(B, C, H, W)` to tokens `(B, H·W/p², C·p²)`."""
        (c, h, w), p = self.shape, self.patch
        grid = latents.reshape(len(latents), c, h // p, p, w // p, p)
        return grid.permute(0, 2, 4, 1, 3, 5).reshape(len(latents), h * w // p**2, c * p**2)


@dataclass(frozen=True)
class Plain:
    """The state is what it stands for."""

    shape: tuple[int, ...]

    def unpack(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state

    def pack(self, state: Tensor) -> Tensor:
        """The state itself."""
        return state


Layout = Tokens | Plain


def layout_of(state: Sequence[int], shape: Sequence[int]) -> Layout:
    """How a state of shape `state` stands for samples of shape `shape`, both without the batch axis.

    Raises:
        ValueError: if it cannot.
    """
    state, shape = tuple(state), tuple(shape)
    if state == shape:
        return Plain(shape)
    if len(state) == 2 and len(shape) == 3:
        (n, k), (c, h, w) = state, shape
        p = round((k / c) ** 0.5)
        if p > 0 and k == c * p * p and h % p == w % p == 0 and n * p * p == h * w:
            return Tokens(shape, p)
    raise ValueError(f"sample: one has shape {state}, but the calibration is for {shape} (another resolution or model)")
