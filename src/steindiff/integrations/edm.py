r"""NVIDIA's EDM and EDM2 checkpoints.

They are pickles of whole networks. Unpickling runs code the file brings along, so it happens only with
`trust_pickle=True`; `convert` writes the tensors to a safetensors file once, and from then on no pickle is needed. The
code of the networks comes from your own clone of NVlabs/edm or NVlabs/edm2 (`source`); none of it is part of this
library. Code and checkpoints are licensed CC BY-NC-SA 4.0 by NVIDIA: non-commercial use, share alike.

    net = load("edm-cifar10-32x32-uncond-vp.pkl", source="edm", trust_pickle=True)
    levels = Karras()(schedule_of(net), 18)

References: Karras et al. (2022), arXiv:2206.00364; Karras et al. (2024), arXiv:2312.02696.
"""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from steindiff import _weights as weights
from steindiff._serialization import decode, parse_json
from steindiff.denoisers import EDMDenoiser
from steindiff.schedules import EDM

MODULES = {"Precond": "training.networks_edm2"}
"""Where a class is defined in a clone, if not in `training.networks`; pickles bring their own copy and do not say."""

PACKAGES = {"training", "torch_utils", "dnnlib"}
"""What a clone has, under the same names in NVlabs/edm and NVlabs/edm2."""

LICENCE = "CC BY-NC-SA 4.0, NVIDIA Corporation: non-commercial use, share alike"
"""The licence of NVIDIA's EDM and EDM2 code and checkpoints."""


@contextmanager
def importable(source: str | Path | None, needed: Path) -> Iterator[None]:
    """Make the modules of a clone importable for a while; those of another clone, of the same names, are put aside.

    A module that `needed`, a file, asks for and the clone lacks is named.
    """
    before = list(sys.path)
    if source is not None:
        if not Path(source).is_dir():
            raise ValueError(f"source = {str(source)!r}: not a folder; give a clone of NVlabs/edm or NVlabs/edm2")
        root = Path(source).resolve()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in PACKAGES:
                place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
                if root not in Path(place).resolve().parents:
                    del sys.modules[name]
        sys.path.insert(0, str(root))
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"{needed.name} needs the module {error.name}"
        raise ValueError(f"source: {what}; give the folder of a clone of NVlabs/edm or edm2") from error
    finally:
        sys.path[:] = before


def _unpickle(path: Path, source: str | Path | None) -> nn.Module:
    with importable(source, path), path.open("rb") as file:
        try:
            content = pickle.load(file)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # readers of damaged files end in anything
            raise ValueError(f"path = {str(path)!r}: not a whole pickle ({error})") from error
    network = content.get("ema") if isinstance(content, dict) else None
    if not isinstance(network, nn.Module):
        raise ValueError(f"path = {str(path)!r}: holds no network under 'ema', so it is not an EDM or EDM2 checkpoint")
    return network


def load(
    path: str | Path,
    *,
    source: str | Path | None = None,
    trust_pickle: bool = False,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load a checkpoint: the network D(x, σ, class_labels), in evaluation mode, its parameters frozen.

    Args:
        path: NVIDIA's pickle, or a safetensors file written by `convert`.
        source: folder of a clone of NVlabs/edm or edm2; may be None if its modules can be imported already.
        trust_pickle: allow a pickle, which runs the code it brings along.
        device: where to put the network.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is a pickle and not trusted, if the network's code is missing, or if the file is something
            else.
        RuntimeError: if it is a damaged safetensors file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"path = {str(path)!r}: no such file")
    if path.suffix == ".safetensors":
        network = _rebuild(path, source)
    elif trust_pickle:
        network = _unpickle(path, source)
    else:
        what = f"{path.name} is a pickle, and unpickling runs the code it brings along"
        raise ValueError(f"trust_pickle = False: {what}; pass trust_pickle=True if you trust it, or convert it once")
    return network.to(device).eval().requires_grad_(False)


def _rebuild(path: Path, source: str | Path | None) -> nn.Module:
    """The network a converted file describes.

    The file chooses a network of the clone by name and gives its arguments; it has no say in what is imported.
    """
    header = weights.metadata(path)
    if not {"class", "arguments"} <= set(header):
        raise ValueError(f"path = {str(path)!r}: was not written by steindiff.integrations.edm.convert")
    name = header["class"]
    with importable(source, path):
        module = importlib.import_module(MODULES.get(name, "training.networks"))
    kind = getattr(module, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise ValueError(f"path = {str(path)!r}: class must be a network of {module.__name__}, got {name!r}")
    try:
        arguments = decode("arguments", parse_json(header["arguments"]), dict[str, Any])
        shapes = weights.shapes(path)
        with bounded(len(shapes)), torch.device("meta"):  # a network of any size, for nothing
            described = {name: tuple(value.shape) for name, value in kind(**arguments).state_dict().items()}
        if described != shapes:
            raise ValueError("the tensors are not those of the network its arguments describe")
        network = kind(**arguments)
        network.load_state_dict(weights.read(path))
    except Exception as error:  # arguments of the file's choice end in anything
        raise ValueError(f"path = {str(path)!r}: does not fit {module.__name__}.{name} ({error})") from error
    return network


@contextmanager
def bounded(most: int) -> Iterator[None]:
    """Inside, networks of this thread may have at most that many parameters."""
    count, thread = 0, get_ident()

    def registered(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count
        count += get_ident() == thread
        if count > most and get_ident() == thread:
            raise ValueError(f"the network has more parameters than the file has tensors, {most}")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def convert(
    path: str | Path, target: str | Path, *, source: str | Path | None = None, trust_pickle: bool = False
) -> None:
    """Write a checkpoint's tensors, and what is needed to rebuild its network, to a safetensors file.

    Arguments as in `load`; the licence goes into the file's header.
    """
    network = load(path, source=source, trust_pickle=trust_pickle)
    arguments = getattr(network, "init_kwargs", None)  # what NVIDIA's persistence keeps
    if arguments is None or getattr(network, "init_args", None):
        raise ValueError(f"path = {str(path)!r}: its network does not record the arguments it was built with")
    header = {"class": type(network).__name__, "arguments": json.dumps(dict(arguments)), "licence": LICENCE}
    weights.write(Path(target), network.state_dict(), header)


def schedule_of(network: Any) -> EDM:
    """The range of noise levels to sample a checkpoint on: EDM's 0.002 to 80, within what the network allows."""
    low = max(0.002, float(getattr(network, "sigma_min", 0.0)))
    high = min(80.0, float(getattr(network, "sigma_max", float("inf"))))
    return EDM(low, high)


def denoiser(network: Any, labels: Sequence[int] | None = None) -> EDMDenoiser:
    """A checkpoint as a denoiser.

    Args:
        network: from `load`.
        labels: one for each sample of a batch, for class-conditional networks.
    """
    classes = int(getattr(network, "label_dim", 0))
    if (labels is None) != (classes == 0):
        raise ValueError(f"labels = {labels}: the network has {classes} classes")
    if labels is None:
        return EDMDenoiser(network)
    if any(not 0 <= label < classes for label in labels):
        raise ValueError(f"labels must be from 0 to {classes - 1}, got {list(labels)}")
    onehot = torch.eye(classes)[list(labels)]
    return EDMDenoiser(partial(_labelled, network, onehot))


def _labelled(network: Any, onehot: Tensor, x: Tensor, sigma: Tensor) -> Tensor:
    return network(x, sigma, onehot.to(x.device))
