"""Autoguidance: a network guided by a worse one that knows the same labels.

Where both err in the same way, the difference of the two points away from the error.

Reference:
    | Guiding a Diffusion Model with a Bad Version of Itself (Karras et al., 2024)
    | https://arxiv.org/abs/2406.02507
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Network = Callable[..., Tensor]
"""D(x, σ, labels)."""


class Autoguided(nn.Module):
    """D = D_g + w (D_m − D_g): the network D_m beyond its guide D_g; w = 1 is the network alone.

    Shapes: x (B, C, H, W), sigma (B,), labels (B,) or None → (B, C, H, W).
    """

    def __init__(self, network: Network, guide: Network, scale: float) -> None:
        super().__init__()
        self.network, self.guide, self.scale = network, guide, scale

    def forward(self, x: Tensor, sigma: Tensor, labels: Tensor | None = None) -> Tensor:
        """Denoise x."""
        return self.guide(x, sigma, labels=labels).lerp(self.network(x, sigma, labels=labels), self.scale)
