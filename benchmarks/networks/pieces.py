"""Half-precision weights cut into files that fit through size limits, and put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from steindiff import _weights as weights

LIMIT = 15 * 2**20
"""Bytes of tensors in one file."""


def cut(tensors: Mapping[str, Tensor], limit: int = LIMIT) -> list[dict[str, Tensor]]:
    """Consecutive groups of tensors of at most `limit` bytes each.

    Raises:
        ValueError: if one tensor alone is larger.
    """
    groups: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            raise ValueError(f"limit must hold the largest tensor, {name} with {tensor.nbytes} bytes, got {limit}")
        if tensor.nbytes > room:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= tensor.nbytes
    return groups


def write(folder: Path, name: str, tensors: Mapping[str, Tensor], limit: int = LIMIT) -> list[Path]:
    """Write `<name>-<i>of<n>.safetensors` in half precision; each file appears whole or not at all."""
    groups = cut({key: value.detach().to("cpu", torch.float16) for key, value in tensors.items()}, limit)
    paths = [folder / f"{name}-{i}of{len(groups)}.safetensors" for i in range(1, len(groups) + 1)]
    for path, group in zip(paths, groups, strict=True):
        weights.write(path, group)
    return paths


def found(folder: Path, name: str) -> list[Path]:
    """The files of a set of pieces.

    Raises:
        FileNotFoundError: if there are none, or some are missing.
    """
    paths = sorted(folder.glob(f"{name}-*of*.safetensors"))
    if not paths or {path.stem for path in paths} != {f"{name}-{i + 1}of{len(paths)}" for i in range(len(paths))}:
        raise FileNotFoundError(f"weights {folder / name}-*.safetensors: {len(paths)} pieces, not a whole set")
    return paths


def read(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of several weight files together."""
    return {name: tensor for path in paths for name, tensor in weights.read(path).items()}
