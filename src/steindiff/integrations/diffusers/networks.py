r"""diffusers models as plain functions of state and time.

Also how pipelines keep a state, and which network a calibration belongs to, told from its architecture and a few
projections of its weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from steindiff._serialization import decode
from steindiff.denoisers.base import Denoiser
from steindiff.integrations.diffusers.families import family_of

SHARED = frozenset({"img_ids", "txt_ids", "position_ids", "control_hidden_states_scale"})
"""Arguments that are tables of positions or layers, the same for all samples, however many rows they have."""

Pick = Callable[[Tensor, Tensor, int], Tensor]
"""The rows of a tensor that belong to some of `batch` samples."""


def names(module: nn.Module) -> tuple[str, str]:
    """What a model calls its state, its first argument, and its time."""
    parameters = list(inspect.signature(uncompiled(module).forward).parameters)
    time = next((name for name in parameters if name == "t" or name.startswith("timestep")), "timestep")
    return parameters[0], time


def copied(value: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Arguments as they are now: copies of containers, which others empty or refill, and `leaf` of all else."""
    if isinstance(value, Mapping):
        return {key: copied(inner, leaf) for key, inner in value.items()}
    return type(value)(copied(inner, leaf) for inner in value) if type(value) in (list, tuple) else leaf(value)


def leaves(value: Any) -> list[Tensor]:
    """The tensors in nested containers, in order."""
    found: list[Tensor] = []
    copied(value, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


@dataclass(frozen=True)
class FromSide:
    """Stands for a condition that another network makes from the state: tensor number `place` of its answer."""

    place: int


def with_side(value: Any, made: Any) -> Any:
    """Conditions with what the other network has `made` in its places."""
    tensors = leaves(made)
    return copied(value, lambda leaf: tensors[leaf.place] if isinstance(leaf, FromSide) else leaf)


def by_row(value: Tensor, rows: Tensor, batch: int) -> Tensor:
    """One row for each sample."""
    return value[rows] if value.ndim and len(value) == batch else value


def by_group(value: Tensor, rows: Tensor, batch: int) -> Tensor:
    """As many rows for each sample, one after the other, as where every frame has its own."""
    if value.ndim and len(value) > batch and len(value) % batch == 0:
        grouped: Tensor = value.unflatten(0, (batch, -1))
        return grouped[rows].flatten(0, 1)
    return by_row(value, rows, batch)


def by_column(value: Tensor, rows: Tensor, batch: int) -> Tensor:
    """One column for each sample, as where the layers of a text encoder come first."""
    if value.ndim > 2 and len(value) != batch and value.shape[1] == batch:
        return value[:, rows]
    return by_row(value, rows, batch)


PICKS: tuple[Pick, ...] = (by_row, by_group, by_column)
"""The ways in which conditions belong to samples; which one it is must be found by trying."""


def picked(value: Any, rows: Tensor, batch: int, pick: Pick, *, tables: bool = False, listed: bool = False) -> Any:
    """The rows of everything that has one for each of `batch` samples, in nested containers too.

    With `tables`, tensors in lists are tables of positions, which all samples share; with `listed`, lists are rows as
    well, since the model takes a list of samples.
    """
    if isinstance(value, Tensor):
        return pick(value, rows.to(value.device), batch)
    if isinstance(value, Mapping):
        return {
            key: inner if key in SHARED else picked(inner, rows, batch, pick, tables=tables, listed=listed)
            for key, inner in value.items()
        }
    if isinstance(value, list) and listed and len(value) == batch:
        return [value[row] for row in rows.tolist()]
    if isinstance(value, list | tuple) and not tables:
        return type(value)(picked(inner, rows, batch, pick, listed=listed) for inner in value)
    return value


def answer(output: Any) -> Any:
    """The first thing a model returned: a tensor, or a list of them where it takes a list of samples."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.sample


def fitted(output: Any, shape: Sequence[int]) -> Tensor:
    """A model's answer for states of `shape`: without variances, appended channels and tokens, and single axes."""
    out = torch.stack(list(output)) if isinstance(output, list | tuple) else output
    while out.ndim > 1 + len(shape) and 1 in out.shape[1:]:
        out = out.squeeze(1 + list(out.shape[1:]).index(1))
    for axis, n in enumerate(shape, 1):
        if axis < out.ndim and out.shape[axis] > n:
            out = out.narrow(axis, 0, n)
    if tuple(out.shape[1:]) != tuple(shape):
        raise ValueError(f"the network answers {tuple(out.shape[1:])} for a state of {tuple(shape)}")
    return out


@dataclass(frozen=True)
class Tokens:
    r"""Transformers such as Flux keep a latent `(C, *, H, W)` as tokens, each a p×p patch of all channels."""

    shape: tuple[int, ...]
    patch: int

    @property
    def _grid(self) -> tuple[int, int, int, int]:
        """C, F and the number of patches in height and width."""
        c, *frames, h, w = self.shape
        return c, math.prod(frames), h // self.patch, w // self.patch

    def unpack(self, tokens: Tensor) -> Tensor:
        """Tokens `(B, F·H·W/p², C·p²)` to latents `(B, *shape)`."""
        (c, f, h, w), p = self._grid, self.patch
        grid = tokens.reshape(len(tokens), f, h, w, c, p, p)
        return grid.permute(0, 4, 1, 2, 5, 3, 6).reshape(len(tokens), *self.shape)

    def pack(self, latents: Tensor) -> Tensor:
        """Latents `(B, *shape)` to tokens `(B, F·H·W/p², C·p²)`."""
        (c, f, h, w), p = self._grid, self.patch
        grid = latents.reshape(len(latents), c, f, h, p, w, p)
        return grid.permute(0, 2, 3, 5, 1, 4, 6).reshape(len(latents), f * h * w, c * p**2)


@dataclass(frozen=True)
class ChannelsAt:
    """The state's channels are not its first axis but axis `axis`, as where frames come first or channels last."""

    shape: tuple[int, ...]
    axis: int = 0

    def unpack(self, state: Tensor) -> Tensor:
        """The state with channels first; the state itself where they already are."""
        return state.movedim(1 + self.axis, 1)

    def pack(self, latents: Tensor) -> Tensor:
        """Undo `unpack`."""
        return latents.movedim(1, 1 + self.axis)


Layout = Tokens | ChannelsAt


def layout_of(state: Sequence[int], shape: Sequence[int]) -> Layout:
    """How a state of shape `state` stands for samples of shape `shape`, both without the batch axis."""
    state, shape = tuple(state), tuple(shape)
    for axis in range(len(state)):
        if (*shape[1 : axis + 1], shape[0], *shape[axis + 1 :]) == state:
            return ChannelsAt(shape, axis)
    if len(state) == 2 and len(shape) in (3, 4):
        (n, k), (c, *_, h, w) = state, shape
        p = round((k / c) ** 0.5)
        if p > 0 and k == c * p * p and h % p == w % p == 0 and n * k == math.prod(shape):
            return Tokens(shape, p)
    raise ValueError(f"sample: one has shape {state}, but the calibration is for {shape} (another resolution or model)")


def layout_from(
    state: Sequence[int], channels: Sequence[int], packed: Iterable[tuple[Tensor, Tensor]]
) -> Layout | None:
    """The layout of a recorded state, found by what the pipeline itself did; None if it cannot be told.

    `packed` are latents that the pipeline made tokens of, and the tokens; `channels` how many a sample may have.
    """
    state = tuple(state)
    for latents, tokens in packed:
        if tuple(tokens.shape[1:]) != state:
            continue
        for shape in (latents.shape[1:], [n for n in latents.shape[1:] if n > 1]):
            try:
                layout = layout_of(state, shape)
            except ValueError:
                continue
            if torch.equal(layout.pack(latents.reshape(len(latents), *shape)), tokens):
                return layout
    axes = [axis for axis, n in enumerate(state) if n in channels]
    if not axes and len(state) == 2:
        return None  # tokens or a signal: an image's tokens must never be taken for channels
    axis = axes[0] if axes else 0
    return layout_of(state, (state[axis], *state[:axis], *state[axis + 1 :]))


@dataclass(frozen=True)
class Inputs:
    """How a model is given the state.

    Args:
        shape: of what it is given, without the batch axis.
        extra: what is joined to the state, one row for each sample and copy; None: nothing.
        axis: along which.
        first: whether it comes before the state.
        listed: whether the model takes a list of samples.
    """

    shape: tuple[int, ...]
    extra: Tensor | None = None
    axis: int = 1
    first: bool = False
    listed: bool = False

    def __call__(self, x: Tensor, rows: Tensor) -> Any:
        """What the model is given for states `x`, whose rows these are."""
        if self.extra is not None:
            extra = self.extra[rows.to(self.extra.device)]
            x = torch.cat([extra, x] if self.first else [x, extra], self.axis)
        x = x.reshape(len(x), *self.shape)
        return list(x.unbind()) if self.listed else x


@dataclass(frozen=True)
class Time:
    """The time a model is told, from a scheduler's timestep: offset + unit · timestep; `shape` is one sample's.

    With `early` the timestep is rounded to `dtype` first, rather than the result.
    """

    unit: float = 1.0
    offset: float = 0.0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    early: bool = False

    def __call__(self, t: Tensor) -> Tensor:
        """What is told at timesteps `t`, of their shape."""
        return (self.offset + self.unit * (t.to(self.dtype) if self.early else t)).to(self.dtype)


@dataclass(frozen=True)
class Call:
    r"""A model with everything but state and time bound.

    Args:
        module: the model.
        conditions: its other arguments. A tensor with `copies · batch` rows has one for each sample and copy.
        copies: how many conditions a sample is evaluated under in one call: 2 where guidance stacks them.
        batch: for how many samples the conditions were made.
        time: what the model is told of the time.
        device: where the model's inputs must be; None: where its parameters are.
        dtype: of the state the model takes; None: that of its parameters.
        inputs: how it is given the state; None: as it is.
        pick: how conditions belong to samples.
        tables: whether lists of conditions belong to all samples.
        side: a network at the same state and time whose answer is among the conditions (a ControlNet).
    """

    module: nn.Module
    conditions: Mapping[str, Any]
    copies: int = 1
    batch: int = 1
    time: Time = Time()
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    inputs: Inputs | None = None
    pick: Pick = by_row
    tables: bool = False
    side: Call | None = None

    def arguments(self, x: Tensor, t: Tensor, samples: Sequence[int]) -> dict[str, Any]:
        """What the model is called with for states `x`, `(B, *)`, at timesteps `t`, `(B,)`."""
        parameter = next(self.module.parameters())
        device, dtype = self.device or parameter.device, self.dtype or parameter.dtype
        rows = torch.as_tensor(samples) % self.batch
        rows = torch.cat([rows + k * self.batch for k in range(self.copies)])
        states = torch.cat([x.to(device, dtype)] * self.copies)
        times = torch.cat([self.time(t).to(device)] * self.copies)
        state, time = names(self.module)
        listed = self.inputs is not None and self.inputs.listed
        total = self.copies * self.batch
        bound = picked(self.conditions, rows, total, self.pick, tables=self.tables, listed=listed)
        return {
            state: states if self.inputs is None else self.inputs(states, rows),
            time: times.reshape(-1, *[1] * len(self.time.shape)).expand(-1, *self.time.shape),
            **bound,
        }

    def answer(self, x: Tensor, t: Tensor, samples: Sequence[int]) -> Any:
        """All that the model returns."""
        arguments = self.arguments(x, t, samples)
        if self.side is not None:
            arguments = with_side(arguments, self.side.answer(x, t, samples))
        return self.module(**{**arguments, "return_dict": False})

    def __call__(self, x: Tensor, t: Tensor, samples: Sequence[int]) -> tuple[Tensor, ...]:
        """Evaluate states `x`, `(B, *)`, at timesteps `t`, `(B,)`, under the conditions of `samples`, once per copy."""
        out = answer(self.answer(x, t, samples))
        return fitted(out, x.shape[1:]).to(x.device, x.dtype).chunk(self.copies)

    def dealing(self, pick: Pick, *, tables: bool) -> Call:
        """The same with conditions that belong to samples in another way."""
        side = self.side and self.side.dealing(pick, tables=tables)
        return replace(self, pick=pick, tables=tables, side=side)


@dataclass(frozen=True)
class Guidance:
    r"""Classifier-free guidance on the model's outputs, as pipelines do it: o = ±(u + w (c − u)), then rescaled.

    Rescaling: o ← φ o std(c)/std(o) + (1 − φ) o, std per sample. Normalising: o ← o |c|/|o| along the last axis.

    Args:
        copies: under how many conditions a sample is evaluated: 1 (no guidance) or 2.
        conditional: which of them is c.
        weight: w.
        rescale: φ.
        embedded: a guidance weight the model takes as an input, if it does.
        normalised: whether o is given the norm of c.
        sign: −1 where the model's output is the negative of what the scheduler is handed.

    References: Ho & Salimans (2022), arXiv:2207.12598; Lin et al. (2024), arXiv:2305.08891.
    """

    copies: int = 1
    conditional: int = 0
    weight: float = 1.0
    rescale: float = 0.0
    embedded: float | None = None
    normalised: bool = False
    sign: float = 1.0

    def combine(self, outputs: Sequence[Tensor]) -> Tensor:
        """The guided output, `(B, *)`, from one output for each condition."""
        if self.copies == 1:
            return self.sign * outputs[0]
        c, u = outputs[self.conditional], outputs[1 - self.conditional]
        guided = u + self.weight * (c - u)
        if self.normalised:
            guided = guided * (c.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        if self.rescale != 0.0:
            dims = tuple(range(1, c.ndim))
            matched = guided * (c.std(dims, keepdim=True) / guided.std(dims, keepdim=True))
            guided = self.rescale * matched + (1.0 - self.rescale) * guided
        return self.sign * guided


@dataclass(frozen=True)
class Guided:
    """Calls of a model and how their outputs are combined: a function of state and time.

    Row k of a batch has the conditions of `samples[k]`, by default k; `layout` says how the model keeps the state.
    Below the timestep `below` the calls `later` of another model take over.
    """

    calls: tuple[Call, ...]
    guidance: Guidance = Guidance()
    samples: tuple[int, ...] | None = None
    layout: Layout | None = None
    later: Guided | None = None
    below: float = 0.0

    def at(self, t: float) -> Guided:
        """What is evaluated at timestep t, which pipelines compare in float32."""
        return self if self.later is None or not float(torch.tensor(t)) < self.below else self.later

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Evaluate states `x`, `(B, *)`, at timesteps `t`, `(B,)`, all of the same model."""
        if (here := self.at(float(t[0]))) is not self:
            return replace(here, samples=self.samples)(x, t)
        samples = range(len(x)) if self.samples is None else self.samples
        state = x if self.layout is None else self.layout.pack(x)
        out = self.guidance.combine([out for call in self.calls for out in call(state, t, samples)])
        return out if self.layout is None else self.layout.unpack(out)


@dataclass(frozen=True)
class Dealt:
    """Samples under the conditions of several calls of a pipeline, each made for a few prompts.

    Sample s has the conditions of prompt s mod their number; at most `batch` samples go into one call of the model.
    """

    parts: tuple[Guided, ...]
    samples: tuple[int, ...]
    batch: int

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        """Evaluate states `x`, `(B, *)`, at timesteps `t`, `(B,)`, part by part."""
        homes = [(k, row) for k, part in enumerate(self.parts) for row in range(part.calls[0].batch)]
        dealt = [homes[sample % len(homes)] for sample in self.samples]
        order: list[int] = []
        outputs = []
        for k, part in enumerate(self.parts):
            mine = [i for i, (home, _) in enumerate(dealt) if home == k]
            for places in (mine[j : j + self.batch] for j in range(0, len(mine), self.batch)):
                network = replace(part, samples=tuple(dealt[i][1] for i in places))
                outputs.append(network(x[places], t[places]))
                order += places
        return torch.cat(outputs)[torch.tensor(order, device=x.device).argsort()]


def denoiser(module: nn.Module, scheduler: Any, **conditions: Any) -> Denoiser:
    r"""The denoiser of a diffusers model: `UNet2DModel`, `UNet2DConditionModel`, a transformer.

    Args:
        module: the model, compiled or not.
        scheduler: any scheduler of the model's repository; its configuration says what the model predicts.
        conditions: further arguments of the model (`class_labels`, `encoder_hidden_states`, …), tensors with one row
            for all samples or one for each of a batch.
    """
    rows = {len(value) for value in conditions.values() if isinstance(value, Tensor) and value.ndim}
    return family_of(scheduler).denoiser(Guided((Call(module, conditions, batch=max(rows, default=1)),)))


SAMPLED = 16
"""How many of a network's parameters are looked at."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def weights_of(module: nn.Module, name: str) -> Tensor:
    """A parameter's values, also where they have been moved out of the module (sequential offload)."""
    *path, leaf = name.split(".")
    owner = module.get_submodule(".".join(path))
    value: Tensor = getattr(owner, leaf)
    if not value.is_meta:
        return value
    hook = getattr(owner, "_hf_hook", None)
    for candidate in (hook, *getattr(hook, "hooks", ())):
        store = getattr(candidate, "weights_map", None)
        if store is not None:
            kept: Tensor = store[leaf]
            return kept
    raise ValueError(f"network: its parameter {name} holds no values (meta device)")


def identify(module: nn.Module) -> dict[str, Any]:
    """Class and projections of a network, as a calibration records them.

    The projections (random signs on the first 4,096 numbers of 16 matrices) survive half precision, another device,
    compilation and offloading up to rounding.
    """
    module = uncompiled(module)
    # Matrices only: the weights of normalisations are near 1 in every network.
    names = [name for name, parameter in module.named_parameters() if parameter.ndim > 1]
    chosen = [names[k * (len(names) - 1) // max(1, SAMPLED - 1)] for k in range(min(SAMPLED, len(names)))]
    generator = torch.Generator().manual_seed(16)
    signs = torch.randint(0, 2, (4096,), generator=generator).double() * 2 - 1
    projections = []
    for name in chosen:
        values = weights_of(module, name).detach().flatten()[:4096].double().cpu()
        projections.append(float(f"{float(values @ signs[: len(values)]) / len(values) ** 0.5:.6g}"))
    return {"class": type(module).__name__, "weights": projections}


def check_identity(known: dict[str, Any], module: nn.Module, tolerance: float = 0.02) -> None:
    """Refuse a network that is not the one `identify` recorded, up to a relative `tolerance` for half precision."""
    found, fields = identify(module), decode("network", known, dict[str, Any])
    name = decode("network.class", fields.get("class"), str)
    weights = decode("network.weights", fields.get("weights"), tuple[float, ...])
    if found["class"] != name or len(found["weights"]) != len(weights):
        raise ValueError(f"network: the calibration was measured on {name}, the pipeline has {found['class']}")
    a, b = torch.tensor(found["weights"]), torch.tensor(weights)
    gap = float((a - b).norm() / b.norm().clamp(min=1e-12))
    if not gap <= tolerance:  # NaN is not close
        raise ValueError(f"network: its weights differ by {gap:.1%} from those the calibration was measured on")
