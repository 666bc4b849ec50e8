"""A class-conditional CIFAR-10 network made for few GPU minutes, and its loader.

An EDM denoiser like the embedded one, with more of its work at 16² and 8², where matrix units are busy, and a norm over
the channels of each pixel, which fuses with its neighbours into one pass over memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks import pieces
from networks.labelled import labelled
from steindiff import Model
from steindiff import _weights as weights
from steindiff.zoo import EDMPrecond
from steindiff.zoo.unet import Fourier

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class StrongConfig:
    """Shape of a `StrongUNet`.

    Attributes:
        shape: one sample (C, H, W); H and W are divisible by 2^(levels − 1).
        num_classes: number of labels K; index K is the null label.
        channels: width of each resolution level, finest first.
        blocks: residual blocks of each level on the way down, and again on the way up.
        attention: whether the blocks of each level are followed by self-attention.
        head: width of one attention head.
        embedding: width of the conditioning vector.
        dropout: inside residual blocks.
    """

    shape: tuple[int, int, int] = (3, 32, 32)
    num_classes: int = 10
    channels: tuple[int, ...] = (128, 256, 320)
    blocks: tuple[int, ...] = (2, 2, 2)
    attention: tuple[bool, ...] = (False, True, True)
    head: int = 64
    embedding: int = 256
    dropout: float = 0.0


class PixelNorm(nn.Module):
    """x ↦ g x / rms(x) over the channels of each pixel; (B, C, H, W) → (B, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in float32, return what came in."""
        inverse = (x.float().square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
        return x * (inverse * self.gain[:, None, None]).to(x.dtype)


def zero(layer: nn.Conv2d) -> nn.Conv2d:
    """The layer with weights zero, so that the branch it ends starts as nothing."""
    nn.init.zeros_(layer.weight)
    return layer


class Block(nn.Module):
    """x ↦ x + conv(silu((1 + a) norm(conv(silu(norm x))) + b)), then x + attention(norm x) where the level attends."""

    def __init__(self, channels: int, attends: bool, config: StrongConfig) -> None:
        super().__init__()
        self.norm_in, self.norm_out = PixelNorm(channels), PixelNorm(channels)
        self.conv_in = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.modulation = nn.Linear(config.embedding, 2 * channels)
        self.conv_out = zero(nn.Conv2d(channels, channels, 3, padding=1, bias=False))
        self.dropout = config.dropout
        self.attends, self.head = attends, config.head
        if attends:
            self.norm_attention = PixelNorm(channels)
            self.qkv = nn.Conv2d(channels, 3 * channels, 1, bias=False)
            self.attended = zero(nn.Conv2d(channels, channels, 1, bias=False))

    def attention(self, x: Tensor) -> Tensor:
        """Softmax attention over the H·W positions with queries and keys of unit rms."""
        b, c, height, width = x.shape
        tokens = self.qkv(self.norm_attention(x)).permute(0, 2, 3, 1)
        q, k, v = tokens.reshape(b, height * width, 3, c // self.head, self.head).permute(2, 0, 3, 1, 4).unbind()
        q, k = (F.rms_norm(z, (self.head,), eps=1e-6) for z in (q, k))
        h = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v)
        return self.attended(h.transpose(1, 2).reshape(b, height, width, c).permute(0, 3, 1, 2))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map x (B, C, H, W) to the same shape."""
        h = self.conv_in(F.silu(self.norm_in(x)))
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm_out(h) * (1 + scale) + shift)
        x = x + self.conv_out(F.dropout(h, self.dropout, self.training and self.dropout > 0))
        return x + self.attention(x) if self.attends else x


class StrongUNet(nn.Module):
    """Class-conditional U-Net F(x, c_noise, label).

    Shapes: x (B, C, H, W), c_noise (B,), labels (B,) in {0, …, K} or None → (B, C, H, W).
    """

    def __init__(self, config: StrongConfig) -> None:
        super().__init__()
        self.config = config
        widths, embedding = config.channels, config.embedding
        self.fourier = Fourier(embedding // 2, (-2.0, 4.0))
        self.noise = nn.Linear(2 * (embedding // 4), embedding)
        self.label = nn.Embedding(config.num_classes + 1, embedding)
        self.mix = nn.Linear(embedding, embedding)
        self.enter = nn.Conv2d(config.shape[0] + 1, widths[0], 3, padding=1, bias=False)
        levels = list(zip(widths, config.attention, config.blocks, strict=True))
        self.down = nn.ModuleList(nn.ModuleList(Block(w, a, config) for _ in range(n)) for w, a, n in levels)
        self.up = nn.ModuleList(nn.ModuleList(Block(w, a, config) for _ in range(n)) for w, a, n in levels)
        self.merge = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(2 * w, w, 1, bias=False) for _ in range(n)) for w, _, n in levels
        )
        pairs = list(pairwise(widths))
        self.widen = nn.ModuleList(nn.Conv2d(outer, inner, 1, bias=False) for outer, inner in pairs)
        self.narrow = nn.ModuleList(nn.Conv2d(inner, outer, 1, bias=False) for outer, inner in pairs)
        self.middle = Block(widths[-1], True, config)
        self.norm = PixelNorm(widths[0])
        self.leave = zero(nn.Conv2d(widths[0], config.shape[0], 3, padding=1, bias=False))

    def forward(self, x: Tensor, c_noise: Tensor, labels: Tensor | None = None) -> Tensor:
        """Evaluate the network."""
        if labels is None:
            labels = torch.full(x.shape[:1], self.config.num_classes, device=x.device)
        embedded = self.fourier(c_noise).to(self.noise.weight.dtype)
        condition = F.silu(self.mix(F.silu(self.noise(embedded) + self.label(labels))))
        # No layer at full width has a bias: a constant channel stands in for it.
        x = self.enter(torch.cat([x, torch.ones_like(x[:, :1])], dim=1))
        skips: list[list[Tensor]] = []
        for depth, blocks in enumerate(self.down):
            if depth:
                x = self.widen[depth - 1](F.avg_pool2d(x, 2))
            skips.append([])
            for block in blocks:
                x = block(x, condition)
                skips[-1].append(x)
        x = self.middle(x, condition)
        for depth in reversed(range(len(self.up))):
            for merge, block in zip(self.merge[depth], self.up[depth], strict=True):
                x = block(merge(torch.cat([x, skips[depth].pop()], dim=1)), condition)
            if depth:
                x = F.interpolate(self.narrow[depth - 1](x), scale_factor=2.0, mode="nearest")
        return self.leave(F.silu(self.norm(x)))


def strong(config: StrongConfig | None = None) -> EDMPrecond:
    """The network with fresh parameters."""
    return EDMPrecond(StrongUNet(config or StrongConfig()))  # type: ignore[arg-type]


def load(
    device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False, folder: Path = FOLDER
) -> Model:
    """The trained network as a model, labels by seed: a `--model networks.strong:load` of `comparison.py`.

    Raises:
        FileNotFoundError: if the pieces `strong-<i>of<n>.safetensors` are not all there.
        RuntimeError: if they do not fit the network.
    """
    network = strong()
    paths = pieces.found(folder, "strong")
    weights.assign(network, pieces.read(paths), str(paths[0]))
    network.to(device).eval().requires_grad_(False)
    return labelled(network, "strong", device, half=half, compiled=compiled)
