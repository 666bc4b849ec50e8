"""The embedded networks as users run them: with weights of eight bits, and with no way to a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from steindiff import Model, zoo
from steindiff.models import PARAMETERISATIONS, ByLabel


class EightBit(nn.Module):
    """A layer's weight as int8 with one scale per output channel: w ≈ s q, s = max|w|/127; (O, *) → (O, *)."""

    quantised: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
        around = (-1, *[1] * (weight.ndim - 1))
        self.register_buffer("scale", scale.reshape(around))
        self.register_buffer("quantised", (weight / self.scale).round().to(torch.int8))

    def forward(self) -> Tensor:
        """The weight, dequantised at every use."""
        return self.quantised * self.scale


class EightBitConv2d(nn.Module):
    """A convolution with an eight-bit weight."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.stored, self.bias = EightBit(layer.weight), layer.bias
        self.options = {key: getattr(layer, key) for key in ("stride", "padding", "dilation", "groups")}

    @property
    def weight(self) -> Tensor:
        """The dequantised weight."""
        return self.stored()

    def forward(self, x: Tensor) -> Tensor:
        """Convolve."""
        return nn.functional.conv2d(x, self.weight, self.bias, **self.options)


class EightBitLinear(nn.Module):
    """A linear layer with an eight-bit weight."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.stored, self.bias = EightBit(layer.weight), layer.bias

    @property
    def weight(self) -> Tensor:
        """The dequantised weight."""
        return self.stored()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return nn.functional.linear(x, self.weight, self.bias)


LAYERS: dict[type[nn.Module], Callable[..., nn.Module]] = {nn.Conv2d: EightBitConv2d, nn.Linear: EightBitLinear}


def quantise(network: nn.Module) -> nn.Module:
    """The network with the weights of its convolutions and linear layers in eight bits, in place."""
    for name, layer in network.named_children():
        if type(layer) in LAYERS:
            setattr(network, name, LAYERS[type(layer)](layer))
        else:
            quantise(layer)
    return network


def int8(name: str = "cifar10", device: torch.device | str = "cpu") -> Model:
    """An embedded model with eight-bit weights."""
    network = zoo.load(name, device)
    quantise(network)
    return _model(network, network, name, f"{name}-int8", device)


def inference_only(name: str = "cifar10", device: torch.device | str = "cpu") -> Model:
    """An embedded model whose network runs inside `torch.inference_mode`: no gradient can be taken."""
    network = zoo.load(name, device)

    def call(*args: Tensor, **kwargs: Tensor) -> Tensor:
        with torch.inference_mode():
            return network(*args, **kwargs)

    return _model(network, call, name, f"{name}-inference", device)


def _model(
    network: zoo.ZooNetwork, call: Callable[..., Tensor], name: str, title: str, device: torch.device | str
) -> Model:
    wrap, schedule = PARAMETERISATIONS[type(network)]
    denoiser = ByLabel(call, wrap, network.num_classes)
    return Model(denoiser, schedule(network), network.shape, device=device, name=title, condition=denoiser.label)
