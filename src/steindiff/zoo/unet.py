"""A compact class-conditional U-Net in plain PyTorch.

Every operation is an ordinary differentiable PyTorch function (attention goes through
`scaled_dot_product_attention`, without custom autograd functions or in-place updates), so the network
can be pulled back (VJP), pushed forward (JVP), vectorised (`torch.func.vmap`) and compiled (`torch.compile`).

References: Ronneberger et al. (2015), arXiv:1505.04597; Ho et al. (2020), arXiv:2006.11239.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class UNetConfig:
    """Shape of a `UNet`; every field is JSON-able.

    Attributes:
        shape: One sample (C, H, W); H and W are divisible by 2^(levels − 1).
        num_classes: Number of labels K; index K is the null label (unconditional).
        channels: Width of each resolution level, finest first.
        blocks: Residual blocks per level on the way down, and again on the way up.
        attention: Whether the blocks of each level are followed by self-attention.
        head: Width of one attention head.
        embedding: Width of the conditioning vector.
        groups: Groups of each group normalisation.
        octaves: Range (low, high) of the frequencies 2^octave that embed the noise level.
    """

    shape: tuple[int, int, int]
    num_classes: int
    channels: tuple[int, ...]
    blocks: int
    attention: tuple[bool, ...]
    head: int = 64
    embedding: int = 256
    groups: int = 32
    octaves: tuple[float, float] = (-2.0, 4.0)

    def __post_init__(self) -> None:
        stride = 2 ** (len(self.channels) - 1)
        if len(self.attention) != len(self.channels):
            raise ValueError(f"attention {self.attention}: need one entry per level of channels {self.channels}")
        if self.shape[1] % stride or self.shape[2] % stride:
            raise ValueError(f"shape {self.shape}: height and width must be divisible by {stride}")
        for width in self.channels:
            if width % self.groups:
                raise ValueError(f"channels {self.channels}: each must be divisible by groups={self.groups}")
        for width, attends in zip((*self.channels, self.channels[-1]), (*self.attention, True), strict=True):
            if attends and width % self.head:
                raise ValueError(f"channels {self.channels}: where attending, divisible by head={self.head}")


class Fourier(nn.Module):
    """Fourier features of a scalar: t ↦ √2 [cos 2πft, sin 2πft] for log-spaced frequencies f.

    The frequencies are made in the precision of t, not stored: casting the network to half precision leaves them.

    Shapes: t (B,) → (B, features).
    """

    def __init__(self, features: int, octaves: tuple[float, float]) -> None:
        super().__init__()
        self.features = features
        self.octaves = octaves

    def forward(self, t: Tensor) -> Tensor:
        """Embed t (B,)."""
        octaves = torch.linspace(*self.octaves, self.features // 2, dtype=t.dtype, device=t.device)
        phase = t[:, None] * (2 * math.pi * 2**octaves)
        return math.sqrt(2) * torch.cat([phase.cos(), phase.sin()], dim=1)


def _zero(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with weights and bias zero, so that the branch it ends starts as nothing."""
    nn.init.zeros_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """x ↦ x + conv(silu((1 + a) norm(conv(silu(norm x))) + b)), with (a, b) an affine map of the condition.

    Shapes: x (B, C, H, W), condition (B, E) → (B, C, H, W).
    """

    def __init__(self, channels: int, embedding: int, groups: int) -> None:
        super().__init__()
        self.norm_in = nn.GroupNorm(groups, channels)
        self.conv_in = nn.Conv2d(channels, channels, 3, padding=1)
        self.modulation = nn.Linear(embedding, 2 * channels)
        self.norm_out = nn.GroupNorm(groups, channels)
        self.conv_out = _zero(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Apply the block."""
        h = self.conv_in(F.silu(self.norm_in(x)))
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm_out(h) * (1 + scale) + shift)
        return x + self.conv_out(h)


class Attention(nn.Module):
    """x ↦ x + W softmax(qkᵀ/√head) v over the H·W positions, with q, k, v linear in norm(x).

    Shapes: (B, C, H, W) → (B, C, H, W).
    """

    def __init__(self, channels: int, head: int, groups: int) -> None:
        super().__init__()
        self.head = head
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = _zero(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        b, c, height, width = x.shape
        # Fused attention kernels need every head's features side by side; without them memory grows as (H·W)².
        tokens = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).contiguous()
        heads = tokens.reshape(b, height * width, 3, c // self.head, self.head)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        h = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.permute(0, 1, 3, 2).reshape(b, c, height, width))


class Block(nn.Module):
    """A residual block, followed by attention where the level attends."""

    def __init__(self, channels: int, attends: bool, config: UNetConfig) -> None:
        super().__init__()
        self.residual = Residual(channels, config.embedding, config.groups)
        self.attention = Attention(channels, config.head, config.groups) if attends else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map x (B, C, H, W) to the same shape."""
        return self.attention(self.residual(x, condition))


class Resolution(nn.Module):
    """One resolution of the U-Net: blocks down, the coarser levels (or the middle), blocks up.

    The state is averaged over 2×2 pixels and widened by a 1×1 convolution on the way down; on the way up it is
    narrowed and repeated. Each block of the way up first merges the output of its mirror block by a 1×1
    convolution of the concatenation, which keeps all 3×3 convolutions square.

    Shapes: x (B, C, H, W), condition (B, E) → (B, C, H, W).
    """

    def __init__(self, depth: int, config: UNetConfig) -> None:
        super().__init__()
        width, attends = config.channels[depth], config.attention[depth]
        self.down = nn.ModuleList(Block(width, attends, config) for _ in range(config.blocks))
        self.merge = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(config.blocks))
        self.up = nn.ModuleList(Block(width, attends, config) for _ in range(config.blocks))
        self.inner: Resolution | Block
        if depth + 1 < len(config.channels):
            inner_width = config.channels[depth + 1]
            self.pool: nn.Module = nn.AvgPool2d(2)
            self.widen: nn.Module = nn.Conv2d(width, inner_width, 1)
            self.inner = Resolution(depth + 1, config)
            self.narrow: nn.Module = nn.Conv2d(inner_width, width, 1)
            self.repeat: nn.Module = nn.Upsample(scale_factor=2, mode="nearest")
        else:
            self.pool = self.widen = self.narrow = self.repeat = nn.Identity()
            self.inner = Block(width, True, config)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Apply the level and everything below it."""
        skips = []
        for block in self.down:
            x = block(x, condition)
            skips.append(x)
        x = self.repeat(self.narrow(self.inner(self.widen(self.pool(x)), condition)))
        for merge, block in zip(self.merge, self.up, strict=True):
            x = block(merge(torch.cat([x, skips.pop()], dim=1)), condition)
        return x


class UNet(nn.Module):
    """Class-conditional U-Net F(x, c_noise, label).

    Shapes: x (B, C, H, W) in the network's dtype, c_noise (B,) in float32 or better, labels (B,) int64 in {0, …, K}
    or None → (B, C, H, W). Label K, or None, is the null label.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config = config
        width, embedding = config.channels[0], config.embedding
        self.fourier = Fourier(embedding // 2, config.octaves)
        self.noise = nn.Linear(2 * (embedding // 4), embedding)
        self.label = nn.Embedding(config.num_classes + 1, embedding)
        self.mix = nn.Linear(embedding, embedding)
        self.enter = nn.Conv2d(config.shape[0], width, 3, padding=1)
        self.levels = Resolution(0, config)
        self.norm = nn.GroupNorm(config.groups, width)
        self.leave = _zero(nn.Conv2d(width, config.shape[0], 3, padding=1))

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None = None) -> Tensor:
        """Evaluate the network."""
        if x.shape[1:] != self.config.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}: this network takes (B, {self.config.shape})")
        if labels is None:
            labels = torch.full(x.shape[:1], self.config.num_classes, device=x.device)
        embedded = self.fourier(c_noise).to(self.noise.weight.dtype)
        condition = F.silu(self.noise(embedded) + self.label(labels))
        condition = F.silu(self.mix(condition))
        x = self.levels(self.enter(x), condition)
        return self.leave(F.silu(self.norm(x)))
