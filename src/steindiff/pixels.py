"""From images in [−1, 1] to what is saved and judged: bytes."""

from __future__ import annotations

from torch import Tensor


def to_uint8(x: Tensor) -> Tensor:
    """Images in [−1, 1], `(*)`, as bytes 0 to 255; what lies outside is clipped."""
    return ((x.clamp(-1, 1) + 1) * 127.5).round().byte()
