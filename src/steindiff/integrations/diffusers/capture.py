r"""What a pipeline does between two states: which network it calls, how, and how it combines the outputs.

A pipeline is run for two steps and both are recorded. From the first its denoiser is rebuilt: guidance is not guessed
from a pipeline's name, it must reproduce what the pipeline made of the network's outputs. Then the rebuilt denoiser is
evaluated where the pipeline stood in its second step, and must give the pipeline's numbers there too. So conditions
that change from step to step, networks that take turns, or inputs that are not the state are noticed and refused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steindiff.denoisers.base import Denoiser
from steindiff.integrations.diffusers.families import Family, family_of
from steindiff.integrations.diffusers.layouts import Layout, Plain, Tokens
from steindiff.integrations.diffusers.networks import TIME, Call, Guidance, Guided, state_name
from steindiff.integrations.identity import uncompiled

NETWORKS = ("unet", "transformer", "unet_2", "transformer_2")
"""What pipelines call the component that is evaluated at every step."""


def network_of(pipe: Any) -> nn.Module:
    """The network a pipeline evaluates at every step.

    Raises:
        ValueError: if the pipeline has none, or several that take turns.
    """
    found = [name for name in NETWORKS if pipe.components.get(name) is not None]
    if len(found) != 1:
        raise ValueError(
            f"pipe = {type(pipe).__name__}: has the networks {found}, need exactly one of {', '.join(NETWORKS)}"
        )
    module: nn.Module = pipe.components[found[0]]
    return module


@dataclass(frozen=True)
class Recorded:
    """One step of a pipeline.

    Attributes:
        calls: of the network: arguments by name, and output.
        model_output: what the pipeline made of the outputs and handed to the scheduler.
        timestep: the scheduler's timestep.
        sample: the state.
    """

    calls: tuple[tuple[dict[str, Any], Tensor], ...]
    model_output: Tensor
    timestep: float
    sample: Tensor


@contextmanager
def recording(module: nn.Module, scheduler: Any) -> Iterator[list[Recorded]]:
    """Record the first two steps taken with `module` and `scheduler`."""
    steps: list[Recorded] = []
    calls: list[tuple[dict[str, Any], Tensor]] = []
    signature = inspect.signature(uncompiled(module).forward)
    plain = scheduler.step

    def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = dict(signature.bind(*args, **kwargs).arguments)
        calls.append((given, output[0] if isinstance(output, tuple) else output.sample))

    @functools.wraps(plain)
    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(steps) < 2:
            steps.append(Recorded(tuple(calls), model_output, float(timestep), sample))
        calls.clear()
        return plain(model_output, timestep, sample, *args, **kwargs)

    hook = module.register_forward_hook(called, with_kwargs=True)
    scheduler.step = step
    try:
        yield steps
    finally:
        hook.remove()
        del scheduler.step


@dataclass(frozen=True)
class Capture:
    """A pipeline's denoiser under the conditions of one call of the pipeline.

    Attributes:
        family: what the numbers mean.
        network: the network's calls and their guidance.
        shape: of one sample.
        device: where the pipeline keeps its state.
    """

    family: Family
    network: Guided
    shape: tuple[int, ...]
    device: torch.device

    def denoiser(self, seeds: Sequence[int]) -> Denoiser:
        """The denoiser of samples with these seeds; the conditions of the call are dealt out by seed."""
        samples = tuple(int(seed) for seed in seeds)
        network = Guided(self.network.calls, self.network.guidance, samples, self.network.layout)
        return self.family.denoiser(network)


def parts_of(outputs: Sequence[Tensor], rows: int, channels: int) -> list[Tensor]:
    """Outputs cut into parts of `rows` samples, without predicted variances."""
    return [
        part[:, :channels] if part.shape[1] == 2 * channels else part
        for output in outputs
        for part in output.float().split(rows)
    ]


def deviation(guidance: Guidance, parts: Sequence[Tensor], model_output: Tensor) -> float:
    """How far off a guidance is, in units of what rounding in the pipeline's dtype explains; below 1 is a match."""
    given = model_output.float()
    gap = float((guidance.combine(parts) - given).norm())
    added = guidance.weight * float((parts[0] - parts[1]).norm()) if guidance.copies == 2 else 0.0
    rounding = 4.0 * torch.finfo(model_output.dtype).eps * (float(given.norm()) + 2.0 * added)
    return gap / (rounding + 1e-3 * added + 1e-12)


def guidance_of(record: Recorded, settings: Mapping[str, Any]) -> tuple[Guidance, int]:
    """The guidance that reproduces a recorded step, and for how many samples the step was.

    Args:
        record: one step.
        settings: the arguments of the pipeline's call, defaults included.

    Raises:
        ValueError: if none does.
    """
    outputs = [output for _, output in record.calls]
    total, rows, channels = sum(map(len, outputs)), len(record.sample), record.sample.shape[1]
    embedded = record.calls[0][0].get("guidance")
    embedded = None if embedded is None else float(embedded.flatten()[0])
    rescale = float(settings.get("guidance_rescale") or 0.0)
    weights = [float(settings[name]) for name in ("guidance_scale", "true_cfg_scale") if settings.get(name) is not None]
    # Some pipelines keep every state twice, once for each condition.
    for samples in (rows, rows // 2):
        if samples == 0 or total % samples or total // samples > 2:
            continue
        parts = parts_of(outputs, samples, channels)
        guided = record.model_output[:samples]
        tried = [Guidance(embedded=embedded)]
        if len(parts) == 2:
            tried = [Guidance(2, k, weight, rescale, embedded) for weight in weights for k in (1, 0)]
        tried = [guidance for guidance in tried if guidance.copies == len(parts)]
        # In half precision several may come close: take the closest.
        best = min(tried, key=lambda guidance: deviation(guidance, parts, guided), default=None)
        if best is not None and deviation(best, parts, guided) < 1.0:
            return best, samples
    raise ValueError(
        f"pipe: its step cannot be rebuilt from {len(outputs)} network calls on {total} rows for {rows} states with "
        f"guidance weights {weights} and rescale {rescale}; allowed are no guidance and classifier-free guidance"
    )


def layout_from(record: Recorded) -> Layout:
    """How the recorded state stands for an image: as it is, or as 2×2 patches whose places the network was told."""
    shape = tuple(record.sample.shape[1:])
    places = record.calls[0][0].get("img_ids")
    if len(shape) != 2 or places is None:
        return Plain(shape)
    high, wide = (int(n) + 1 for n in places.reshape(-1, places.shape[-1])[:, 1:3].amax(0))
    return Tokens((shape[1] // 4, 2 * high, 2 * wide), 2)


def rebuild(module: nn.Module, record: Recorded, guidance: Guidance, samples: int) -> Guided:
    """The network's calls of a step as a function of state and time."""
    calls = []
    for given, output in record.calls:
        conditions = {name: value for name, value in given.items() if name != "return_dict"}
        state, time = conditions.pop(state_name(module)), torch.as_tensor(conditions.pop(TIME))
        # The model sees the scheduler's timestep itself, or a thousandth of it; half precision blurs which.
        unit = 10.0 ** round(math.log10(abs(float(time.flatten()[0]) / record.timestep)))
        precision = time.dtype if time.is_floating_point() else torch.float32
        calls.append(
            Call(module, conditions, len(output) // samples, samples, unit, state.device, state.dtype, precision)
        )
    return Guided(tuple(calls), guidance, layout=layout_from(record))


def check_rebuilt(network: Guided, record: Recorded, samples: int) -> None:
    """Refuse a rebuilt network that does not give what the pipeline had in another step.

    Raises:
        ValueError: naming what differs.
    """
    given = record.calls[0][0]
    inputs, state = given[state_name(network.calls[0].module)][:samples], record.sample[:samples]
    if inputs.shape != state.shape:
        raise ValueError(
            f"pipe: its network is given {tuple(inputs.shape[1:])} for a state of {tuple(state.shape[1:])}; "
            "allowed are networks of the state alone (no inpainting channels)"
        )
    layout = network.layout or Plain(tuple(state.shape[1:]))
    times = torch.full((samples,), record.timestep, dtype=torch.float64)
    with torch.no_grad():
        made = layout.pack(network(layout.unpack(inputs.float()), times))
    expected = record.model_output[:samples].float()
    eps = min(200.0 * torch.finfo(record.model_output.dtype).eps, 0.02)
    gap, size = float((made - expected).norm()), float(expected.norm())
    if not gap <= eps * (1.0 + 2.0 * abs(network.guidance.weight)) * max(size, 1e-12):
        raise ValueError(
            f"pipe: rebuilt from its first step, its network is off by {gap / max(size, 1e-12):.1%} in the second; "
            "allowed are conditions that stay the same from step to step, and networks in evaluation mode"
        )


def capture(pipe: Any, scheduler: Any, **call: Any) -> Capture:
    """Run two steps of a pipeline and rebuild its denoiser.

    Args:
        pipe: the pipeline; it is left as it was.
        scheduler: the scheduler to run it with, of the family of the pipeline's own.
        call: arguments of the pipeline's call.

    Raises:
        ValueError: if the pipeline has no network, or what it does with the network's outputs cannot be rebuilt.
    """
    module = network_of(pipe)
    signature = inspect.signature(pipe.__call__)
    defaults = {"num_inference_steps": 2, "output_type": "latent", "generator": torch.Generator().manual_seed(0)}
    call = {**{name: value for name, value in defaults.items() if name in signature.parameters}, **call}
    bound = signature.bind(**call)
    bound.apply_defaults()
    before = pipe.scheduler
    pipe.scheduler = scheduler
    try:
        with recording(module, scheduler) as steps:
            pipe(**call)
    finally:
        pipe.scheduler = before
    if len(steps) < 2 or not all(step.calls for step in steps):
        raise ValueError(
            f"pipe = {type(pipe).__name__}: did not call its network and its scheduler in each of two steps"
        )
    first, second = steps
    guidance, samples = guidance_of(first, bound.arguments)
    network = rebuild(module, first, guidance, samples)
    check_rebuilt(network, second, samples)
    assert network.layout is not None, "a recorded state has a layout"
    return Capture(family_of(scheduler), network, network.layout.shape, first.sample.device)
