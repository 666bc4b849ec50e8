"""Weight files: written atomically, read without pickle, checked against a SHA-256."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from steindiff._files import atomic, sha256


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, atomically, and read the header back before the file takes its place."""
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(plain, temporary, metadata=dict(metadata or {}))
        with safe_open(temporary, framework="pt") as file:
            if set(file.keys()) != set(plain):
                raise OSError(f"weights {path}: what was written does not read back")


def read(path: Path, *, digest: str | None = None, trust_pickle: bool = False) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or, only if trusted, of a pickled state dict, whose code then runs."""
    if not path.is_file():
        raise FileNotFoundError(f"weights {path}: no such file")
    if digest is not None and (found := sha256(path)) != digest:
        raise RuntimeError(f"weights {path}: truncated or altered (SHA-256 {found[:12]}…, not {digest[:12]}…)")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        except Exception as error:  # readers of damaged files end in anything
            raise RuntimeError(f"weights {path}: not a whole safetensors file ({error})") from error
    if not trust_pickle:
        raise RuntimeError(f"weights {path}: not safetensors; unpickling runs code, allow it by trust_pickle=True")
    try:
        state = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        raise RuntimeError(f"weights {path}: not a whole pickle ({error})") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise RuntimeError(f"weights {path}: holds no state dict (a mapping of names to tensors)")
    return state


def metadata(path: Path) -> dict[str, str]:
    """Text stored in the header of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except Exception as error:  # readers of damaged files end in anything
        raise RuntimeError(f"weights {path}: not a whole safetensors file ({error})") from error


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors file, from its header alone."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # readers of damaged files end in anything
        raise RuntimeError(f"weights {path}: not a whole safetensors file ({error})") from error


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Make sure that tensors have these names and shapes; `source` says in the message where they come from."""
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise RuntimeError(f"weights {source}: holds no state dict (a mapping of names to tensors)")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            wanted, given = expected.get(name, "nothing"), found.get(name, "nothing")
            raise RuntimeError(f"weights {source}: {name} is {given}, the network needs {wanted}")


def assign(net: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Give a network these parameters, in float32."""
    check(tensors, {name: tuple(p.shape) for name, p in net.named_parameters()}, source)
    net.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
