"""What a calibration belongs to: the network, what is patched into it, and how the guider combines its answers.

Nothing here depends on the prompt, and nothing costs a call of the network.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steindiff._checks import shown
from steindiff._serialization import decode

SAMPLED = 16
"""How many matrices of a network are looked at, and how many of a LoRA."""
LENGTH = 4096
"""How many numbers of each."""
SAME = {"float": 0.02, "8 bit": 0.08, "packed": 0.0}
"""Relative difference up to which weights are the same, by how they are stored: 8 bits move them by 3 %."""
SAME_GUIDANCE = 0.005
"""Relative difference up to which guidance is the same."""
FLOW_LEVELS = (0.95, 0.75, 0.5, 0.25, 0.05)
OTHER_LEVELS = (10.0, 3.0, 1.0, 0.3, 0.1)
"""Noise levels at which guidance is looked at."""


def identify(model: Any, options: Mapping[str, Any], shape: Sequence[int], *, flow: bool) -> dict[str, Any]:
    """What is recorded in a calibration.

    Args:
        model: what a sampler function calls `model`, inside a run of its guider.
        options: the run's `model_options`.
        shape: of one sample.
        flow: whether it is a flow-matching model.
    """
    guider = model.inner_model
    base, patcher = guider.inner_model, guider.model_patcher
    return {
        "sampling": [kind.__name__ for kind in type(base.model_sampling).__mro__[1:-1]],
        "network": network(base.diffusion_model, getattr(patcher, "backup", {})),
        "patches": patches(patcher),
        "wrappers": sorted(wrappers(options)),
        "guidance": guidance(guider, options, shape, FLOW_LEVELS if flow else OTHER_LEVELS),
    }


RECORD = {
    "sampling": Sequence[str],
    "network": {"class": str, "weights": Sequence[float], "stored": Literal["float", "8 bit", "packed"]},
    "patches": {"count": int, "content": Sequence[float]},
    "wrappers": Sequence[str],
    "guidance": Sequence[float],
}
"""What `identify` makes."""


def checked(name: str, value: Any, kind: Any) -> Any:
    """A record from a file, once every field has its type.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(kind, Mapping):
        found = decode(name, value, kind)
        return list(found) if isinstance(found, tuple) else found
    if not isinstance(value, Mapping) or set(value) != set(kind):
        raise ValueError(f"{name} must have the fields {', '.join(kind)}, got {shown(value)}; calibrate again")
    return {key: checked(f"{name}.{key}", value[key], inner) for key, inner in kind.items()}


def differences(known: Any, found: Mapping[str, Any]) -> list[str]:
    """What differs between two records, the first from a file, in words.

    Raises:
        ValueError: if a field of the first is not what `identify` makes.
    """
    known = checked("comfyui", known, RECORD)
    said = []
    if known["sampling"] != found["sampling"]:
        said.append(f"model sampling: measured with {known['sampling'][:1]}, this model has {found['sampling'][:1]}")
    before, now = known["network"], found["network"]
    if before["class"] != now["class"] or len(before["weights"]) != len(now["weights"]):
        said.append(f"network: measured on {before['class']}, this model is {now['class']}")
    elif "packed" in (before["stored"], now["stored"]) and before["stored"] != now["stored"]:
        said.append(f"network: measured with {before['stored']} weights, these are {now['stored']}")
    elif (off := gap(before["weights"], now["weights"])) > max(SAME[before["stored"]], SAME[now["stored"]]):
        said.append(f"network: its weights differ by {off:.1%} from those measured")
    if known["patches"]["count"] != found["patches"]["count"]:
        said.append(
            f"patches (LoRA): measured with {known['patches']['count']} patched weights, "
            f"this model has {found['patches']['count']}"
        )
    elif (off := gap(known["patches"]["content"], found["patches"]["content"])) > SAME["float"]:
        said.append(f"patches (LoRA): they differ by {off:.1%} from those measured, in content or strength")
    if known["wrappers"] != found["wrappers"]:
        said.append(f"wrappers: measured with {known['wrappers']}, this model has {found['wrappers']}")
    if known["guidance"] and found["guidance"] and (off := gap(known["guidance"], found["guidance"])) > SAME_GUIDANCE:
        said.append(f"guidance: predictions are combined differently, by {off:.1%}; CFG, Flux guidance, rescaling")
    return said


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Relative difference of two lists; infinite where they cannot be compared."""
    if len(one) != len(other):
        return math.inf
    off = math.dist(one, other)
    size = math.hypot(*one)
    return 0.0 if off == 0.0 else off / size if 0.0 < size < math.inf and math.isfinite(off) else math.inf


def signs(n: int) -> Tensor:
    """Fixed random signs, `(n,)`."""
    return torch.randint(0, 2, (LENGTH,), generator=torch.Generator().manual_seed(16))[:n].double() * 2 - 1


def few(names: Sequence[str]) -> list[str]:
    """At most `SAMPLED` of the names, evenly spread."""
    return [names[k * (len(names) - 1) // max(1, SAMPLED - 1)] for k in range(min(SAMPLED, len(names)))]


def network(module: nn.Module, backup: Mapping[str, Any]) -> dict[str, Any]:
    """Class and projections of a network's own weights.

    Where a LoRA has been added to the weights the patcher has kept the originals, in `backup`: those are looked at, for
    in low memory the LoRA is added only while a layer runs. Projections are relative to a matrix's size, since scaled
    8-bit weights keep their scale elsewhere.
    """
    module = getattr(module, "_orig_mod", module)
    parameters = {name: weight for name, weight in module.named_parameters() if weight.ndim > 1}
    projections, stored = [], "float"
    for name in few(list(parameters)):
        kept = backup.get(f"diffusion_model.{name}")
        values, how = numbers(parameters[name] if kept is None else kept.weight)
        stored = max(stored, how, key=["float", "8 bit", "packed"].index)
        projections.append(float(f"{float(values @ signs(len(values))) / max(float(values.norm()), 1e-30):.6g}"))
    return {"class": type(module).__name__, "weights": projections, "stored": stored}


def numbers(weight: Tensor) -> tuple[Tensor, str]:
    """The first numbers of a weight, float64, and how it is stored."""
    how = "float" if weight.dtype.itemsize > 1 else "8 bit"
    plain = weight.detach()
    if type(weight) not in (Tensor, nn.Parameter):  # a quantised tensor of the host or a node pack
        try:
            plain, how = weight.dequantize().detach(), "8 bit"
        except (RuntimeError, NotImplementedError, TypeError, AttributeError):
            how = "packed"
    if not plain.dtype.is_floating_point:
        how = "packed"
    values = plain.as_subclass(Tensor).flatten()[:LENGTH].to("cpu", torch.float64)
    if how == "float" and len(values) >= LENGTH // 4 and values.unique().numel() <= 256:
        how = "8 bit"  # rounded before they were stored in more
    return values, how


def patches(patcher: Any) -> dict[str, Any]:
    """How many weights are patched, and strengths and projections of some of the patches."""
    found = getattr(patcher, "patches", {})
    hooked = getattr(patcher, "hook_patches", {})
    content = []
    for key in few(sorted(found, key=str)):
        total = 0.0
        for strength, value, own, *_ in found[key]:
            for tensor in tensors(value):
                values = tensor.detach().flatten()[:LENGTH].to("cpu", torch.float64)
                total += float(strength) * float(values @ signs(len(values))) / max(1, len(values)) ** 0.5
            total += float(own) - 1.0
        content.append(float(f"{total:.6g}"))
    return {"count": len(found) + sum(map(len, hooked.values())), "content": content}


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a patch: tuples, and objects that keep them in `weights`."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)
    elif hasattr(value, "weights"):
        yield from tensors(value.weights)


def wrappers(options: Mapping[str, Any]) -> Iterator[str]:
    """Names of what is wrapped around the model: caches, context windows."""
    if "model_function_wrapper" in options:
        yield "model_function"
    for kind, named in options.get("transformer_options", {}).get("wrappers", {}).items():
        for name, functions in named.items():
            if functions:
                yield f"{kind}: {name}"


def guidance(guider: Any, options: Mapping[str, Any], shape: Sequence[int], levels: Sequence[float]) -> list[float]:
    r"""How a guider combines the network's answers: eight projections of what it makes of known ones, at some levels.

    The network is replaced for the while by D_k(x) = sin((k + 1) x + s), k the place of the condition in the guider's
    list and s whatever numbers, patches and controls come with it. The prompt does not matter, and everything does that
    changes the combination: weights of any guider, rescaling, thresholding, Flux guidance, perturbed attention.

    Returns:
        The projections; none where the guider cannot do without its network.
    """
    base = guider.inner_model
    device = next((p.device for p in base.diffusion_model.parameters()), torch.device("cpu"))
    x = torch.randn((1, *shape), generator=torch.Generator().manual_seed(8))
    directions = torch.randn(8, x.numel(), generator=torch.Generator().manual_seed(9)) / x.numel() ** 0.5
    device = getattr(guider.model_patcher, "load_device", device)
    # Caches keep answers from call to call: these must not get in.
    inner = {k: v for k, v in options.get("transformer_options", {}).items() if k not in ("wrappers", "callbacks")}
    bare = {**{k: v for k, v in options.items() if k != "model_function_wrapper"}, "transformer_options": inner}
    predict = getattr(guider, "predict_noise", guider)
    found: list[float] = []
    base.apply_model = stand_in
    try:
        for level in levels:
            sigma = torch.full((1,), level, device=device)
            d = predict(x.to(device), sigma, model_options=bare, seed=0)
            found += [float(f"{v:.6g}") for v in (directions @ d.float().cpu().flatten()).tolist()]
    except Exception as error:  # any third party's guidance may need what only a network leaves behind
        logging.warning(
            "SteinDiff: guidance cannot be compared beyond its weight (%s: %s)", type(error).__name__, error
        )
        return []
    finally:
        del base.apply_model
    return found


def stand_in(x: Tensor, t: Tensor, c_concat: Any = None, *_: Any, **given: Any) -> Tensor:
    """What stands in for the network while guidance is looked at."""
    options = given.pop("transformer_options", {})
    places = options.get("cond_or_uncond", [0])
    shift = 0.3 * (given.pop("control", None) is not None) + 0.2 * (c_concat is not None)
    for kind in ("patches", "patches_replace"):
        shift += 0.05 * sum(map(len, options.get(kind, {}).values()))
    parts = []
    for i, (place, part) in enumerate(zip(places, x.chunk(len(places)), strict=True)):
        own = shift
        for value in given.values():  # one number a sample, such as Flux guidance
            if isinstance(value, Tensor) and value.ndim == 1 and value.is_floating_point():
                own += 0.1 * float(value[i * len(value) // len(places)])
        parts.append(torch.sin((place + 1) * part + own))
    return torch.cat(parts)
