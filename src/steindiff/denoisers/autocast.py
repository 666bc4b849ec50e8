r"""A network in half precision under a state that stays in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.levels import Level


class Autocast(Wrapper):
    """Another denoiser, its network computing in `dtype` where torch's autocast deems that safe.

    Convolutions and matrix products are in `dtype`; normalisation, preconditioning and everything outside the network
    stay as they are.

    Args:
        denoiser: the denoiser.
        dtype: `torch.bfloat16` or `torch.float16`.
    """

    def __init__(self, denoiser: Denoiser, dtype: torch.dtype = torch.bfloat16) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
        self.denoiser = denoiser
        self.dtype = dtype

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        with torch.autocast(x.device.type, self.dtype):
            return self.denoiser(x, level)
