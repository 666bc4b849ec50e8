r"""The shape a pipeline keeps its state in, and the signal, image or video it stands for, channels first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    r"""Transformers such as Flux keep a latent `(C, *, H, W)` as tokens, each a p×p patch of all channels."""

    shape: tuple[int, ...]
    patch: int

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        """C, F and the number of patches in height and width."""
        c, *frames, h, w = self.shape
        return c, math.prod(frames), h // self.patch, w // self.patch

    def unpack(self, tokens: Tensor) -> Tensor:
        """Tokens `(B, F·H·W/p², C·p²)` to latents `(B, *shape)`."""
        (c, f, h, w), p = self._grid, self.patch
        grid = tokens.reshape(len(tokens), f, h, w, c, p, p)
        return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(len(tokens), *self.shape)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents `(B, *shape)` to tokens `(B, F·H·W/p², C·p²)`."""
        (c, f, h, w), p = self._grid, self.patch
        grid = latents.reshape(len(latents), c, f, h, p, w, p)
        return grid.permute(0, 2, 3, 5, 1, 4, 6).reshape(len(latents), f * h * w, c * p**2)


@dataclass(frozen=True)
class ChannelsAt:
    """The state's channels are not its first axis but axis `axis`, as where frames come first or channels last."""

    shape: tuple[int, ...]
    axis: int = 0

    def unpack(self, state: Tensor) -> Tensor:
        """The state with channels first; the state itself where they already are."""
        return state.movedim(1 + self.axis, 1)

    def pack(self, latents: Tensor) -> Tensor:
        """Undo `unpack`."""
        return latents.movedim(1, 1 + self.axis)


Layout = Tokens | ChannelsAt


def layout_of(state: Sequence[int], shape: Sequence[int]) -> Layout:
    """How a state of shape `state` stands for samples of shape `shape`, both without the batch axis."""
    state, shape = tuple(state), tuple(shape)
    for axis in range(len(state)):
        if (*shape[1 : axis + 1], shape[0], *shape[axis + 1 :]) == state:
            return ChannelsAt(shape, axis)
    if len(state) == 2 and len(shape) in (3, 4):
        (n, k), (c, *_, h, w) = state, shape
        p = round((k / c) ** 0.5)
        if p > 0 and k == c * p * p and h % p == w % p == 0 and n * k == math.prod(shape):
            return Tokens(shape, p)
    raise ValueError(f"sample: one has shape {state}, but the calibration is for {shape} (another resolution or model)")


def layout_from(
    state: Sequence[int], channels: Sequence[int], packed: Iterable[tuple[Tensor, Tensor]]
) -> Layout | None:
    """The layout of a recorded state, found by what the pipeline itself did; None if it cannot be told.

    `packed` are latents that the pipeline made tokens of, and the tokens; `channels` how many a sample may have.
    """
    state = tuple(state)
    for latents, tokens in packed:
        if tuple(tokens.shape[1:]) != state:
            continue
        for shape in (latents.shape[1:], [n for n in latents.shape[1:] if n > 1]):
            try:
                layout = layout_of(state, shape)
            except ValueError:
                continue
            if torch.equal(layout.pack(latents.reshape(len(latents), *shape)), tokens):
                return layout
    axes = [axis for axis, n in enumerate(state) if n in channels]
    if not axes and len(state) == 2:
        return None  # tokens or a signal: an image's tokens must never be taken for channels
    axis = axes[0] if axes else 0
    return layout_of(state, (state[axis], *state[:axis], *state[axis + 1 :]))
