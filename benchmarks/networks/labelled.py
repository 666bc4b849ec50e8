"""A network of the zoo's kinds as a model whose labels go by seed, as comparisons run it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from steindiff import Model
from steindiff.models import PARAMETERISATIONS, ByLabel
from steindiff.zoo import ZooNetwork


def labelled(
    network: ZooNetwork,
    name: str,
    device: torch.device | str,
    wrap: Callable[..., Callable[..., Tensor]] = lambda network: network,
    guidance: float = 1.0,
    *,
    half: bool,
    compiled: bool,
) -> Model:
    """The model of a network; `half` takes half precision (bfloat16 on a CPU), and `wrap` changes how it is called.

    In half precision, and on a CPU, channels lie last: that is faster.
    """
    predict, schedule = PARAMETERISATIONS[type(network)]
    process = schedule(network)
    cpu = torch.device(device).type == "cpu"
    if half:
        network = network.to(torch.bfloat16 if cpu else torch.float16)
    if half or cpu:
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    call = wrap(torch.compile(network) if compiled else network)
    denoiser = ByLabel(call, predict, network.num_classes, guidance, device)
    return Model(denoiser, process, network.shape, device=device, name=name, condition=denoiser.label)
