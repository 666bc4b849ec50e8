r"""What a pipeline does between two states: which network it calls, how, and how it combines the outputs.

A pipeline is run for two steps, and the first is recorded. What its network was given and what it answered is compared
with what the pipeline then handed to the scheduler: guidance is not guessed from a pipeline's name, it is rebuilt and
must reproduce the pipeline's own numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from steindiff.denoisers.base import Denoiser
from steindiff.integrations.diffusers.families import Family, family_of
from steindiff.integrations.diffusers.layouts import Layout, Plain, Tokens
from steindiff.integrations.diffusers.networks import TIME, Call, Guidance, Guided, state_name
from steindiff.integrations.identity import uncompiled

NETWORKS = ("unet", "transformer")
"""What pipelines call the component that is evaluated at every step."""


def network_of(pipe: Any) -> nn.Module:
    """The network a pipeline evaluates at every step.

    Raises:
        ValueError: if the pipeline has none.
    """
    for name in NETWORKS:
        module = pipe.components.get(name)
        if module is not None:
            found: nn.Module = module
            return found
    raise ValueError(f"pipe = {type(pipe).__name__}: has none of the components {', '.join(NETWORKS)}")


@dataclass
class Recording:
    """One step of a pipeline: the network's calls, as (arguments by name, output), and what the scheduler was given."""

    calls: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)
    model_output: Tensor | None = None
    timestep: float = 0.0
    sample: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the scheduler has been reached; later calls belong to another step."""
        return self.model_output is not None


@contextmanager
def recording(module: nn.Module, scheduler: Any) -> Iterator[Recording]:
    """Record the first step taken with `module` and `scheduler`."""
    record = Recording()
    signature = inspect.signature(uncompiled(module).forward)
    plain = scheduler.step

    def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not record.complete:
            given = dict(signature.bind(*args, **kwargs).arguments)
            record.calls.append((given, output[0] if isinstance(output, tuple) else output.sample))

    @functools.wraps(plain)
    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not record.complete:
            record.model_output, record.timestep, record.sample = model_output, float(timestep), sample
        return plain(model_output, timestep, sample, *args, **kwargs)

    hook = module.register_forward_hook(called, with_kwargs=True)
    scheduler.step = step
    try:
        yield record
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
    """How far off a guidance is, relative to what it adds and to what the dtype resolves; below 1 is a match."""
    given = model_output.float()
    gap = float((guidance.combine(parts) - given).norm())
    size = max(float(part.norm()) for part in parts)
    allowed = 8.0 * torch.finfo(model_output.dtype).eps * size * (1.0 + 2.0 * abs(guidance.weight)) + 1e-12
    if guidance.copies == 2:
        allowed += 1e-3 * guidance.weight * float((parts[0] - parts[1]).norm())
    return gap / allowed


def guidance_of(record: Recording, settings: Mapping[str, Any]) -> tuple[Guidance, int]:
    """The guidance that reproduces a recorded step, and for how many samples the step was.

    Args:
        record: one step.
        settings: the arguments of the pipeline's call, defaults included.

    Raises:
        ValueError: if none does.
    """
    assert record.model_output is not None, "the scheduler was not reached"
    assert record.sample is not None, "the scheduler was not reached"
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
        for guidance in tried:
            if guidance.copies == len(parts) and deviation(guidance, parts, guided) < 1.0:
                return guidance, samples
    raise ValueError(
        f"pipe: its step cannot be rebuilt from {len(outputs)} network calls on {total} rows for {rows} states with "
        f"guidance weights {weights} and rescale {rescale}; allowed are no guidance and classifier-free guidance"
    )


def layout_from(record: Recording) -> Layout:
    """How the recorded state stands for an image: as it is, or as 2×2 patches whose places the network was told."""
    assert record.sample is not None, "the scheduler was not reached"
    shape = tuple(record.sample.shape[1:])
    places = record.calls[0][0].get("img_ids")
    if len(shape) != 2 or places is None:
        return Plain(shape)
    high, wide = (int(n) + 1 for n in places.reshape(-1, places.shape[-1])[:, 1:3].amax(0))
    return Tokens((shape[1] // 4, 2 * high, 2 * wide), 2)


def capture(pipe: Any, scheduler: Any, **call: Any) -> Capture:
    """Run one step of a pipeline and rebuild its denoiser.

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
        with recording(module, scheduler) as record:
            pipe(**call)
    finally:
        pipe.scheduler = before
    if not record.complete or not record.calls:
        raise ValueError(f"pipe = {type(pipe).__name__}: did not call its network and its scheduler")
    guidance, samples = guidance_of(record, bound.arguments)
    calls = []
    for given, output in record.calls:
        state = given.pop(state_name(module))
        time = torch.as_tensor(given.pop(TIME)).flatten()[0]
        given.pop("return_dict", None)
        calls.append(Call(module, given, len(output) // samples, samples, float(time) / record.timestep, state.device))
    layout = layout_from(record)
    family = family_of(scheduler)
    assert record.sample is not None, "the scheduler was not reached"
    network = Guided(tuple(calls), guidance, layout=layout)
    return Capture(family, network, layout.shape, record.sample.device)
