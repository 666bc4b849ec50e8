"""The embedded network as users run it: in eight bits, in bfloat16, guided, and with no way to a gradient.

Each is a `--model networks.variants:NAME` of `benchmarks/comparison.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from networks.labelled import labelled
from steindiff import Model, zoo


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


def int8(device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False) -> Model:
    """The embedded CIFAR-10 model with eight-bit weights; sums and scales in half precision, if asked for."""
    return _model("int8", device, quantise, half=half, compiled=compiled)


def bf16(device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False) -> Model:
    """The same with all weights and sums in bfloat16, whatever `half` says."""
    return _model("bf16", device, lambda network: network.bfloat16(), half=False, compiled=compiled)


def inference_only(device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False) -> Model:
    """The same inside `torch.inference_mode`, where no gradient can be taken; never compiled."""

    def wrap(network: nn.Module) -> Callable[..., Tensor]:
        def call(*args: Tensor, **kwargs: Tensor) -> Tensor:
            with torch.inference_mode():
                return network(*args, **kwargs)

        return call

    return _model("inference", device, half=half, compiled=False, wrap=wrap)


def guided_2(device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False) -> Model:
    """The same under classifier-free guidance of scale 2."""
    return _model("guidance-2", device, half=half, compiled=compiled, guidance=2.0)


def guided_4(device: torch.device | str = "cpu", *, half: bool = False, compiled: bool = False) -> Model:
    """The same of scale 4."""
    return _model("guidance-4", device, half=half, compiled=compiled, guidance=4.0)


def _model(
    kind: str,
    device: torch.device | str,
    change: Callable[[nn.Module], nn.Module] = lambda network: network,
    wrap: Callable[[nn.Module], Callable[..., Tensor]] = lambda network: network,
    guidance: float = 1.0,
    *,
    half: bool,
    compiled: bool,
) -> Model:
    network = zoo.load("cifar10", device)
    change(network)  # in place
    return labelled(network, f"cifar10-{kind}", device, wrap, guidance, half=half, compiled=compiled)
