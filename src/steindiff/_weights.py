"""Weight files: written atomically, read without pickle, checked against a SHA-256."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file, open; whatever a damaged one raises becomes a RuntimeError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:  # readers of damaged files end in anything
        raise RuntimeError(f"weights {path}: not a whole safetensors file ({error})") from error


def read(path: Path, *, digest: str | None = None) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, once its SHA-256 is `digest`, if one is given."""
    if not path.is_file():
        raise FileNotFoundError(f"weights {path}: no such file")
    if digest is not None and (found := sha256(path)) != digest:
        raise RuntimeError(f"weights {path}: truncated or altered (SHA-256 {found[:12]}…, not {digest[:12]}…)")
    with opened(path) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)


def metadata(path: Path) -> dict[str, str]:
    """Text stored in the header of a safetensors file."""
    with opened(path) as file:
        return dict(file.metadata() or {})


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a safetensors file, from its header alone."""
    with opened(path) as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (not a mapping)


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
