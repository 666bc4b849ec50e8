r"""diffusers models as plain functions of state and time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steindiff.denoisers.base import Denoiser
from steindiff.integrations.diffusers.families import family_of
from steindiff.integrations.diffusers.layouts import Layout
from steindiff.integrations.identity import uncompiled

TIME = "timestep"
"""What every diffusers model calls its time."""

SHARED = frozenset({"img_ids", "txt_ids"})
"""Arguments that are tables of positions, the same for all samples, however many rows they have."""


def state_name(module: nn.Module) -> str:
    """What a model calls its state: its first argument."""
    return next(iter(inspect.signature(uncompiled(module).forward).parameters))


def pick(value: Any, rows: Tensor, batch: int) -> Any:
    """The rows of everything that has one row for each of `batch` samples, in nested containers too."""
    if isinstance(value, Tensor):
        return value[rows.to(value.device)] if value.ndim and len(value) == batch else value
    if isinstance(value, Mapping):
        return {key: inner if key in SHARED else pick(inner, rows, batch) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(pick(inner, rows, batch) for inner in value)
    return value


@dataclass(frozen=True)
class Call:
    r"""A model with everything but state and time bound.

    Args:
        module: the model.
        conditions: its other arguments. A tensor with `copies · batch` rows has one for each sample and copy.
        copies: how many conditions a sample is evaluated under in one call: 2 where guidance stacks them.
        batch: for how many samples the conditions were made.
        unit: what a scheduler's timestep is multiplied with before the model sees it.
        device: where the model's inputs must be; None: where its parameters are.
        dtype: of the state the model takes; None: that of its parameters.
        time_dtype: of the time it takes.
    """

    module: nn.Module
    conditions: Mapping[str, Any]
    copies: int = 1
    batch: int = 1
    unit: float = 1.0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    time_dtype: torch.dtype = torch.float32

    def __call__(self, x: Tensor, t: Tensor, samples: Sequence[int]) -> tuple[Tensor, ...]:
        """Evaluate states `x`, `(B, *)`, at timesteps `t`, `(B,)`, under the conditions of `samples`, once per copy."""
        parameter = next(self.module.parameters())
        device, dtype = self.device or parameter.device, self.dtype or parameter.dtype
        rows = torch.as_tensor(samples) % self.batch
        rows = torch.cat([rows + k * self.batch for k in range(self.copies)])
        state = {
            state_name(self.module): torch.cat([x.to(device, dtype)] * self.copies),
            TIME: torch.cat([t.to(device, self.time_dtype) * self.unit] * self.copies),
        }
        bound = pick(self.conditions, rows, self.copies * self.batch)
        out = self.module(**state, **{**bound, "return_dict": False})[0]
        # A model that also predicts variances has twice the channels; the first half is what we need.
        if out.shape[1] == 2 * x.shape[1] and out.shape[2:] == x.shape[2:]:
            out = out[:, : x.shape[1]]
        return out.to(x.device, x.dtype).chunk(self.copies)


@dataclass(frozen=True)
class Guidance:
    r"""Classifier-free guidance on the model's outputs, as pipelines do it: o = u + w (c − u), then rescaled.

    Rescaling: o ← φ o std(c)/std(o) + (1 − φ) o, std per sample.

    Args:
        copies: under how many conditions a sample is evaluated: 1 (no guidance) or 2.
        conditional: which of them is c.
        weight: w.
        rescale: φ.
        embedded: a guidance weight the model takes as an input, if it does.

    References:
        Classifier-Free Diffusion Guidance (Ho & Salimans, 2022), arXiv:2207.12598;
        Common Diffusion Noise Schedules and Sample Steps are Flawed (Lin et al., 2024), arXiv:2305.08891.
    """

    copies: int = 1
    conditional: int = 0
    weight: float = 1.0
    rescale: float = 0.0
    embedded: float | None = None

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """The guided output, `(B, *)`, from one output for each condition."""
        if self.copies == 1:
            return outputs[0]
        c, u = outputs[self.conditional], outputs[1 - self.conditional]
        guided = u + self.weight * (c - u)
        if self.rescale == 0.0:
            return guided
        dims = tuple(range(1, c.ndim))
        matched = guided * (c.std(dims, keepdim=True) / guided.std(dims, keepdim=True))
        return self.rescale * matched + (1.0 - self.rescale) * guided

    def describe(self) -> dict[str, Any]:
        """What a calibration records."""
        return asdict(self)


@dataclass(frozen=True)
class Guided:
    """Calls of a model and how their outputs are combined: a function of state and time.

    Args:
        calls: made one after the other.
        guidance: combines all their outputs, in order.
        samples: whose conditions to use for the rows of a batch, which must be as many; None: 0, 1, …
        layout: how the model keeps what the state stands for; None: as it is.
    """

    calls: tuple[Call, ...]
    guidance: Guidance = Guidance()
    samples: tuple[int, ...] | None = None
    layout: Layout | None = None

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Evaluate states `x`, `(B, *)`, at timesteps `t`, `(B,)`."""
        samples = range(len(x)) if self.samples is None else self.samples
        state = x if self.layout is None else self.layout.pack(x)
        out = self.guidance.combine([out for call in self.calls for out in call(state, t, samples)])
        return out if self.layout is None else self.layout.unpack(out)


def denoiser(module: nn.Module, scheduler: Any, **conditions: Any) -> Denoiser:
    r"""The denoiser of a diffusers model: `UNet2DModel`, `UNet2DConditionModel`, a transformer.

    Args:
        module: the model, compiled or not.
        scheduler: any scheduler of the model's repository; its configuration says what the model predicts.
        conditions: further arguments of the model (`class_labels`, `encoder_hidden_states`, …), tensors with one row
            for all samples or one for each of a batch.

    Raises:
        ValueError: if the scheduler is of no known family or the prediction type of no known kind.
    """
    rows = {len(value) for value in conditions.values() if isinstance(value, Tensor) and value.ndim}
    return family_of(scheduler).denoiser(Guided((Call(module, conditions, batch=max(rows, default=1)),)))
