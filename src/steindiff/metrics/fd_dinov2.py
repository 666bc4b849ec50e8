"""Fréchet distance on DINOv2 features: `frechet_distance` of moments gathered with `dinov2_features`.

References:
    | Exposing flaws of generative model evaluation metrics and their unfair treatment of diffusion models
    | (Stein et al., 2023), https://arxiv.org/abs/2306.04675

    | DINOv2: Learning Robust Visual Features without Supervision (Oquab et al., 2023)
    | https://arxiv.org/abs/2304.07193
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from steindiff.metrics.pretrained import ImageNetInput, pretrained


def _hub_dinov2() -> Any:
    return torch.hub.load("facebookresearch/dinov2", "dinov2_vitl14", trust_repo=True, verbose=False)


def dinov2_features(device: torch.device | str = "cpu", *, build: Callable[[], Any] = _hub_dinov2) -> ImageNetInput:
    """DINOv2 ViT-L/14 class-token features, on bytes: (B, 3, H, W) uint8 → (B, 1024).

    Args:
        device: Where to put it.
        build: What makes the network; the authors' own loader through torch.hub unless given.
    """
    return ImageNetInput(pretrained("DINOv2 ViT-L/14", build), size=224).to(device)
