r"""What a pipeline does between two states: which network it calls, how, and how it combines the outputs.

A pipeline is run for a few steps and all of them are recorded. From the first its denoiser is rebuilt; nothing is
guessed from a pipeline's name: layout, guidance, sign and time are whatever reproduces the pipeline's own numbers. Then
the rebuilt denoiser must fit every other step:

* each argument of the network is the one that was rebuilt: conditions bitwise, the state up to a cast, the time up to
  two units in its last place;
* the network's outputs combine to what the scheduler was handed, up to rounding in the pipeline's precision;
* the next step begins with the state the scheduler returned;
* in the first and the last step the network, asked again, gives the same answer, up to its own repeatability; asked
  about other numbers of samples, it gives each of them its own.

No tolerance grows with the guidance weight or hides a wrong network in half precision: what could differ is compared
before it goes through the network.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from steindiff.denoisers.base import Denoiser, Wrapper
from steindiff.integrations.diffusers import networks
from steindiff.integrations.diffusers.families import Family, VariancePreserving, family_of
from steindiff.integrations.diffusers.networks import Call, Dealt, FromSide, Guidance, Guided, Inputs, Layout, Time
from steindiff.levels import Level
from steindiff.model import Model

NETWORKS = ("unet", "transformer", "unet_2", "transformer_2")
"""What pipelines call the component that is evaluated at every step."""

STEPS = 4
"""Steps of the recorded run."""

CHANGING: dict[str, tuple[Any, ...]] = {
    "callback": (None,),
    "callback_on_step_end": (None,),
    "skip_guidance_layers": (None,),
    "use_dynamic_cfg": (False,),
    "cfg_trunc_ratio": (1.0,),
    "cfg_truncation": (1.0,),
    "denoising_start": (None,),
    "denoising_end": (None,),
}
"""Arguments that change what a step does in the middle of a run, and the values with which they do not."""


class Unfit(ValueError):
    """Why a pipeline cannot be calibrated."""


def network_of(pipe: Any) -> nn.Module:
    """The network a pipeline evaluates at every step, or at the first ones."""
    later = later_of(pipe)
    found = [name for name in NETWORKS if pipe.components.get(name) not in (None, later)]
    if len(found) != 1:
        name = type(pipe).__name__
        raise ValueError(f"pipe = {name}: has the networks {found}, need exactly one of {', '.join(NETWORKS)}")
    return pipe.components[found[0]]


def later_of(pipe: Any) -> nn.Module | None:
    """The network that takes over below a timestep (Wan2.2-A14B), if a pipeline has one."""
    if getattr(pipe, "config", {}).get("boundary_ratio") is None:
        return None
    found = pipe.components.get("transformer_2")
    return found if isinstance(found, nn.Module) else None


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """All networks a pipeline evaluates in its steps, by what a calibration calls them.

    The answers of a ControlNet, if there is one, are conditions of the network.
    """
    side = pipe.components.get("controlnet")
    found = {"network": network_of(pipe), "network_later": later_of(pipe), "controlnet": side}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, tensors bitwise."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a is b or bool(a == b)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether `a` differs from `b` by no more than `tolerance` of it, in norm."""
    return a.shape == b.shape and bool((a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-12)


@dataclass(frozen=True)
class Asked:
    """One call of a network: its other arguments, state `(rows, *)`, whether that was a list, time and answer.

    `side` is the call of another network that made some of the conditions.
    """

    module: nn.Module
    conditions: dict[str, Any]
    state: Tensor
    listed: bool
    time: Tensor
    output: Any
    side: Asked | None = None

    def arguments(self) -> dict[str, Any]:
        """The call's arguments by name."""
        state, time = networks.names(self.module)
        given = self.conditions if self.side is None else networks.with_side(self.conditions, self.side.output)
        return {state: list(self.state) if self.listed else self.state, time: self.time, **given}


@dataclass(frozen=True)
class Recorded:
    """One step of a pipeline: the network's calls, what was made of them and handed to the scheduler, and the states.

    `scaled` is the state as the scheduler would have it given to the network, `result` the state after the step.
    """

    calls: tuple[Asked, ...]
    model_output: Tensor
    timestep: float
    sample: Tensor
    scaled: Tensor
    result: Tensor


class Recording:
    """The steps a pipeline takes with its networks and a scheduler, and what it makes tokens of."""

    def __init__(self, pipe: Any) -> None:
        self.steps: list[Recorded] = []
        self.packed: list[tuple[Tensor, Tensor]] = []
        self._pipe = pipe
        self._modules = modules_of(pipe)
        self._given: list[dict[str, Any]] = []
        self._calls: list[Asked] = []
        self._side: Asked | None = None

    def asked(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A network is called."""
        given: dict[str, Any] = {}
        signature = inspect.signature(networks.uncompiled(module).forward)
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind = signature.parameters[name].kind
            given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        made = [] if self._side is None or module is self._side.module else networks.leaves(self._side.output)

        def kept(value: Any) -> Any:
            place = next((k for k, tensor in enumerate(made) if tensor is value), None)
            if place is not None:
                return FromSide(place)
            # Of the first step, which is kept, tensors have memory of their own, which nobody else writes to.
            return value.clone() if isinstance(value, Tensor) and not self.steps else value

        self._given.append(networks.copied(given, kept))

    def answered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A network has answered."""
        given, (state, time) = self._given.pop(), networks.names(module)
        x, told = given.pop(state), torch.as_tensor(given.pop(time))
        given.pop("return_dict", None)
        listed = not isinstance(x, Tensor)
        x = torch.stack(list(x)) if listed else x.clone()
        asked = Asked(module, given, x, listed, told.clone(), output)
        if module is self._modules.get("controlnet"):
            self._side = asked
        else:
            self._calls.append(replace(asked, output=networks.answer(output), side=self._side))

    @contextmanager
    def of(self, scheduler: Any) -> Iterator[None]:
        """Record while the pipeline runs with this scheduler."""
        pipe, step = self._pipe, scheduler.step
        pack: Any = getattr(pipe, "_pack_latents", None)

        @functools.wraps(step)
        def stepped(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            scaled = scheduler.scale_model_input(sample, timestep).clone()
            before, handed = sample.clone(), model_output.clone()
            output = step(model_output, timestep, sample, *args, **kwargs)
            result = (output[0] if isinstance(output, tuple) else output.prev_sample).clone()
            self.steps.append(Recorded(tuple(self._calls), handed, float(timestep), before, scaled, result))
            self._calls.clear()
            self._side = None
            return output

        def packing(latents: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            tokens: Tensor = pack(latents, *args, **kwargs)
            self.packed.append((latents, tokens))
            return tokens

        hooks = [module.register_forward_pre_hook(self.asked, with_kwargs=True) for module in self._modules.values()]
        hooks += [module.register_forward_hook(self.answered, with_kwargs=True) for module in self._modules.values()]
        scheduler.step = stepped
        if pack is not None:
            pipe._pack_latents = packing
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            del scheduler.step
            if pack is not None:
                del pipe._pack_latents


class Captured(Wrapper):
    """A pipeline's denoiser; it says what a calibration of it depends on beside the network."""

    def __init__(self, denoiser: Denoiser, conditions: Mapping[str, Any]) -> None:
        self.denoiser, self._conditions = denoiser, conditions

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        return self.denoiser(x, level)

    @property
    def conditions(self) -> Mapping[str, Any]:
        return self._conditions


@dataclass(frozen=True)
class Capture:
    """A pipeline's denoiser under the conditions of one call of the pipeline, or of several for a few prompts each.

    `parts` are the network's calls and their guidance for each; `shape` is one sample's, `batch` the most in one call;
    `conditions` what a calibration must agree on: pipeline, guidance and, where there are any, ControlNets.
    """

    family: Family
    parts: tuple[Guided, ...]
    shape: tuple[int, ...]
    device: torch.device
    batch: int
    conditions: Mapping[str, Any]

    @property
    def network(self) -> Guided:
        """The first prompts' calls; guidance and layout are those of all."""
        return self.parts[0]

    def denoiser(self, seeds: Sequence[int]) -> Denoiser:
        """The denoiser of samples with these seeds; the conditions of the call are dealt out by seed."""
        dealt = Dealt(self.parts, tuple(map(int, seeds)), self.batch)
        return Captured(self.family.denoiser(dealt), self.conditions)

    def model(self, name: str = "") -> Model:
        """What was captured as a model; the pipeline's own scheduler says what the network predicts."""
        prompts, name = sum(part.calls[0].batch for part in self.parts), name or self.conditions["pipeline"]
        plain = Model(self.denoiser, self.family.schedule, self.shape, device=self.device, name=name)
        return replace(plain, condition=lambda seed: seed % prompts).trust()


def strengths(arguments: Mapping[str, Any]) -> list[float]:
    """How strongly ControlNets act, as their arguments say."""
    given = arguments.get("conditioning_scale", 1.0)
    return [float(scale) for scale in (given if isinstance(given, list | tuple) else [given])]


def parts_of(outputs: Sequence[Any], rows: int, shape: Sequence[int]) -> list[Tensor]:
    """Outputs for states of `shape`, cut into parts of `rows` samples."""
    return [part for output in outputs for part in networks.fitted(output, shape).float().split(rows)]


def deviation(guidance: Guidance, parts: Sequence[Tensor], model_output: Tensor) -> float:
    """How far off a guidance is, in units of what rounding in the pipeline's dtype explains; below 1 is a match."""
    given = model_output.float()
    gap = float((guidance.combine(parts) - given).norm())
    added = abs(guidance.weight) * float((parts[0] - parts[1]).norm()) if guidance.copies == 2 else 0.0
    # Three operations, each off by no more than half a unit; normalising adds a few in single precision.
    eps = torch.finfo(model_output.dtype).eps
    rounding = (2.0 if eps > 1e-4 else 16.0) * eps * (float(given.norm()) + added)
    return gap / (rounding + 1e-12)


def guidances(parts: Sequence[Tensor], guided: Tensor, settings: Mapping[str, Any]) -> Iterator[list[Guidance]]:
    """What a pipeline may have done with the outputs: first with the weights of its call, then with those that fit."""
    signs = (1.0, -1.0)
    if len(parts) == 1:
        yield [Guidance(sign=sign) for sign in signs]
        return
    rescale = float(settings.get("guidance_rescale") or 0.0)
    stated = [float(settings[name]) for name in ("guidance_scale", "true_cfg_scale") if settings.get(name) is not None]
    stated += [1.0 + weight for weight in stated]  # some pipelines write c + w (c − u)
    forms = [
        Guidance(2, k, 1.0, 0.0 if normalised else rescale, normalised=normalised, sign=sign)
        for sign in signs
        for k in (1, 0)
        for normalised in (False, True)
    ]
    yield [replace(form, weight=weight) for form in forms for weight in stated]

    def fit(form: Guidance) -> Guidance:
        c, u = parts[form.conditional], parts[1 - form.conditional]
        weight = float(((form.sign * guided.float() - u) * (c - u)).sum() / (c - u).square().sum().clamp(min=1e-30))
        return replace(form, weight=float(f"{weight:.4g}"))

    # With c and u exchanged 1 − w fits as well as w.
    yield [found for found in map(fit, forms) if found.weight >= 0.5]


def guidance_of(record: Recorded, settings: Mapping[str, Any]) -> tuple[Guidance, int]:
    """The guidance that reproduces a recorded step, and for how many samples the step was."""
    total, rows = sum(len(call.state) for call in record.calls), len(record.sample)
    embedded = record.calls[0].conditions.get("guidance")
    embedded = float(embedded.flatten()[0]) if isinstance(embedded, Tensor) else None
    # Some pipelines keep every state twice, once for each condition.
    for samples in (rows, rows // 2):
        if samples == 0 or total % samples or total // samples > 2:
            continue
        try:
            parts = parts_of([call.output for call in record.calls], samples, record.sample.shape[1:])
        except ValueError as error:
            raise Unfit(f"{error} (given frames or tokens)") from None
        guided = networks.fitted(record.model_output[:samples], record.sample.shape[1:])
        for tried in guidances(parts, guided, settings):
            # In half precision several may come close: take the closest.
            distances = [deviation(guess, parts, guided) for guess in tried]
            if distances and min(distances) < 1.0:
                return replace(tried[distances.index(min(distances))], embedded=embedded), samples
    made = f"{len(record.calls)} network calls on {total} rows for {rows} states"
    raise Unfit(f"what it makes of {made} is neither the network's output nor classifier-free guidance")


def time_of(steps: Sequence[Recorded], calls: Sequence[Asked]) -> Time:
    """The time a network is told, in one call a step, as a function of the scheduler's timesteps."""
    t = torch.tensor([step.timestep for step in steps], dtype=torch.float64)
    told = torch.stack([call.time.double().flatten()[0].cpu() for call in calls])
    for call in calls:
        if not bool((call.time == call.time.flatten()[0]).all()):
            raise Unfit("its network is told several times at once (frames or tokens that are given, not made)")
    slope = float((told[0] - told[-1]) / (t[0] - t[-1]))
    power = math.copysign(10.0 ** round(math.log10(abs(slope))), slope) if slope else 0.0
    time = calls[0].time
    dtype = time.dtype if time.is_floating_point() else torch.float32
    eps = torch.finfo(dtype).eps
    for unit in (power, slope):
        for offset in (0.0, 1.0, round(float(told[0] - unit * t[0]), 6)):
            made = offset + unit * t
            if bool(((made - told).abs() <= 2.0 * eps * torch.maximum(told.abs(), (unit * t).abs())).all()):
                late, early = (Time(unit, offset, tuple(time.shape[1:]), dtype, early) for early in (False, True))
                # In half precision a unit in the last place is several timesteps: what fits bitwise goes first.
                return early if torch.equal(early(t).double(), told) else late
    times, steps_told = ([f"{x:.4g}" for x in row.tolist()] for row in (told, t))
    raise Unfit(f"its network is told the times {times} at the timesteps {steps_told}, which no affine function gives")


def inputs_of(call: Asked, scaled: Tensor, copies: int) -> Inputs:
    """How a call was given the state."""
    given, states = call.state, torch.cat([scaled.to(call.state.dtype)] * copies)
    shape = tuple(given.shape[1:])
    tolerance = 2.0 * torch.finfo(given.dtype).eps
    if given.numel() == states.numel() and close(given.reshape(states.shape), states, tolerance):
        return Inputs(shape, listed=call.listed)
    for axis in range(1, states.ndim):
        n = states.shape[axis]
        if given.ndim != states.ndim or given.shape[axis] <= n:
            continue
        rest = given.shape[axis] - n
        for first in (False, True):
            part = given.narrow(axis, rest if first else 0, n)
            if close(part, states, tolerance):
                return Inputs(shape, given.narrow(axis, 0 if first else n, rest).clone(), axis, first, call.listed)
    state = tuple(scaled.shape[1:])
    raise Unfit(f"its network is not given the state, {state}, but {shape} made from it (frames, masks, patches)")


def rebuild(steps: Sequence[Recorded], settings: Mapping[str, Any], layout: Layout | None) -> Guided:
    """The network's calls of a step as a function of state and time."""
    if len(steps) < 2:
        raise Unfit(f"one of its networks is asked in {len(steps)} recorded steps, need 2; move the boundary")
    guidance, samples = guidance_of(steps[0], settings)
    if layout is None:
        shape = tuple(steps[0].sample.shape[1:])
        raise Unfit(f"its state has shape {shape} and cannot be told to be a signal or tokens; leave out latents")

    def call(calls: Sequence[Asked | None]) -> Call | None:
        asked = [found for found in calls if found is not None]
        if len(asked) < len(calls):
            return None
        copies = len(asked[0].state) // samples
        return Call(
            asked[0].module,
            asked[0].conditions,
            copies,
            samples,
            time_of(steps, asked),
            asked[0].state.device,
            asked[0].state.dtype,
            inputs_of(asked[0], steps[0].scaled[:samples], copies),
            side=call([found.side for found in asked]),
        )

    made = (call(each) for each in zip(*(step.calls for step in steps), strict=False))
    return Guided(tuple(found for found in made if found is not None), guidance, layout=layout)


def check_step(network: Guided, i: int, steps: Sequence[Recorded]) -> None:
    """Refuse a rebuilt network whose arguments or outputs are not what the pipeline had in step i."""
    record, samples = steps[i], network.calls[0].batch
    if i and not torch.equal(steps[i - 1].result[:samples].to(record.sample.dtype), record.sample[:samples]):
        raise Unfit(
            "changes the state between steps (blends in an image, adds noise); use a network that takes the image"
        )
    if any(call.module is not asked.module for call, asked in zip(network.calls, record.calls, strict=False)):
        raise Unfit("its networks take turns otherwise than by the time")
    if len(record.calls) != len(network.calls):
        first, here = len(network.calls), len(record.calls)
        raise Unfit(f"it calls its network {first} times in the first step and {here} times in step {i + 1}")
    for call, asked in with_sides(zip(network.calls, record.calls, strict=True)):
        known, given = call.conditions, asked.conditions
        keys = sorted(known.keys() | given.keys())
        changed = [key for key in keys if key not in given or not same(known.get(key), given[key])]
        if changed:
            why = "a ControlNet that guesses or acts in some steps, or a condition that depends on the time"
            raise Unfit(f"the network's argument {changed[0]} changes from step to step ({why})")
        made = inputs_of(asked, record.scaled[:samples], call.copies)
        assert call.inputs is not None, "recorded calls have inputs"
        if not same(made.extra, call.inputs.extra):
            raise Unfit("what it joins to the state changes from step to step")
    shape = record.sample.shape[1:]
    parts = parts_of([asked.output for asked in record.calls], samples, shape)
    guided = networks.fitted(record.model_output[:samples], shape)
    if len(parts) != network.guidance.copies or deviation(network.guidance, parts, guided) >= 1.0:
        raise Unfit(f"its guidance changes from step to step (in step {i + 1} it is not that of the first)")


def with_sides(calls: Iterable[tuple[Call, Asked]]) -> Iterator[tuple[Call, Asked]]:
    """Calls, as rebuilt and as recorded, each followed by that of the other network that made conditions of it."""
    for call, asked in calls:
        yield call, asked
        if call.side is not None and asked.side is not None:
            yield call.side, asked.side


def check_network(network: Guided, record: Recorded) -> None:
    """Refuse a network that answers differently when it is asked again."""
    for call, asked in with_sides(zip(network.calls, record.calls, strict=True)):
        arguments = asked.arguments()

        def flat(output: Any) -> Tensor:
            return torch.cat([tensor.flatten().float() for tensor in networks.leaves(output)])

        recorded, dtype = flat(asked.output), networks.leaves(asked.output)[0].dtype
        with torch.no_grad():
            outputs = [call.module(**{**networks.copied(arguments), "return_dict": False}) for _ in "ab"]
        again, once_more = (flat(output)[: len(recorded)] for output in outputs)
        noise = float((again - once_more).norm() / recorded.norm().clamp(min=1e-12))
        gap = float((again - recorded).norm() / recorded.norm().clamp(min=1e-12))
        if not gap <= 4.0 * noise + max(torch.finfo(dtype).eps, 1e-5) or noise > 0.05:
            off = f"its network, asked again, is off by {max(gap, noise):.1%}"
            raise Unfit(f"{off}; it must be in evaluation mode, and stay as it is while the pipeline runs")


def dealing(network: Guided, record: Recorded, batch: int) -> Guided:
    """The rebuilt network with its conditions dealt out so that each sample gets its own in batches of any size."""
    samples = network.calls[0].batch
    rows = (samples - 1,) if samples > 1 or batch == 1 else (0, 0)
    x = record.scaled[list(rows)]
    t = torch.full((len(rows),), record.timestep, dtype=torch.float64)
    calls: list[Call] = []
    for call, asked in zip(network.calls, record.calls, strict=True):
        expected = torch.cat([part[list(rows)] for part in parts_of([asked.output], samples, x.shape[1:])])
        # Batches of another size round differently; the conditions of another sample are far off.
        tolerance = max(256.0 * torch.finfo(networks.fitted(asked.output, x.shape[1:]).dtype).eps, 1e-3)
        for tables, pick in itertools.product((False, True), networks.PICKS):
            chosen = call.dealing(pick, tables=tables)
            try:
                with torch.no_grad():
                    made = torch.cat(chosen(x, t, rows))
            except Exception:  # a model that is given what does not fit may raise anything
                continue
            if close(made, expected, min(tolerance, 0.1)):
                calls.append(chosen)
                break
        else:
            raise Unfit("its network's conditions cannot be dealt out to batches of other sizes")
    return replace(network, calls=tuple(calls))


def channels_of(pipe: Any, module: nn.Module) -> list[int]:
    """How many channels a sample has, as its autoencoder says; where there is none, as the network does."""

    def found(part: Any, *keys: str) -> list[int]:
        config = getattr(part, "config", {})
        return [config[key] for key in keys if isinstance(config.get(key), int)]

    autoencoders = [pipe.components.get(name) for name in ("vae", "movq", "vqvae")]
    latent = [n for part in autoencoders for n in found(part, "latent_channels", "z_dim")]
    return latent or found(networks.uncompiled(module), "in_channels", "out_channels")


def chunks(call: Mapping[str, Any], batch: int) -> list[dict[str, Any]]:
    """A pipeline's call as several, for at most `batch` samples each; what has an entry for each prompt is cut."""
    if isinstance(call.get("batch_size"), int):
        n = call["batch_size"]
        return [{**call, "batch_size": min(batch, n - k)} for k in range(0, n, batch)]
    counted = [
        len(value)
        for name, value in call.items()
        if (isinstance(value, list | tuple) and name in ("prompt", "class_labels"))
        or (isinstance(value, list | Tensor) and name.endswith("_embeds"))
    ]
    n, per_prompt = max(counted, default=1), int(call.get("num_images_per_prompt") or 1)
    batch = max(1, batch // per_prompt)

    def part(name: str, value: Any, k: int) -> Any:
        rows = isinstance(value, list | tuple) and name not in ("timesteps", "sigmas")
        rows = rows or (isinstance(value, Tensor) and (value.ndim in (2, 4, 5) or name.endswith(("_embeds", "_mask"))))
        return value[k : k + batch] if rows and len(value) == n and n > 1 else value

    return [{name: part(name, value, k) for name, value in call.items()} for k in range(0, n, batch)]


def record(pipe: Any, scheduler: Any, call: Mapping[str, Any]) -> Recording:
    """Run a pipeline once and record it."""
    recording = Recording(pipe)
    before = pipe.scheduler
    pipe.scheduler = scheduler
    try:
        with recording.of(scheduler):
            pipe(**call)
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        raise Unfit(f"does not run with {type(scheduler).__name__} and these arguments ({why})") from error
    finally:
        pipe.scheduler = before
    if len(recording.steps) < 2 or not all(step.calls for step in recording.steps):
        raise Unfit("did not call its network and its scheduler in each of at least two steps")
    return recording


def capture(pipe: Any, scheduler: Any, *, batch: int = 16, **call: Any) -> Capture:
    """Run a few steps of a pipeline and rebuild its denoiser."""
    try:
        return captured(pipe, scheduler, batch, call)
    except Unfit as error:
        raise ValueError(f"pipe = {type(pipe).__name__} cannot be calibrated: {error}") from error


def captured(pipe: Any, scheduler: Any, batch: int, call: Mapping[str, Any]) -> Capture:
    """As `capture`; what is wrong with the pipeline is said without its name."""
    module = network_of(pipe)
    for key, still in CHANGING.items():
        if call.get(key, still[0]) not in still:
            raise ValueError(f"{key} = {call[key]!r}: changes what a step does within a run; leave it out to calibrate")
    signature = inspect.signature(pipe.__call__)
    unknown = sorted(call.keys() - signature.parameters.keys())
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()):
        raise ValueError(f"{unknown[0]}: {type(pipe).__name__} takes no such argument")
    below = 0.0 if later_of(pipe) is None else pipe.config["boundary_ratio"] * scheduler.config["num_train_timesteps"]
    defaults = {"num_inference_steps": 2 * STEPS if below else STEPS, "output_type": "latent"}
    call = {**{key: value for key, value in defaults.items() if key in signature.parameters}, **call}
    parts: list[Guided] = []
    first: Recorded | None = None
    for part in chunks(call, batch):
        if "generator" in signature.parameters and "generator" not in call:
            part["generator"] = torch.Generator().manual_seed(0)
        recording = record(pipe, scheduler, part)
        steps = recording.steps
        settings = {key: p.default for key, p in signature.parameters.items()} | part
        layout = networks.layout_from(steps[0].sample.shape[1:], channels_of(pipe, module), recording.packed)
        stages = [(steps, settings)]
        if below:
            second = {**settings, "guidance_scale": settings.get("guidance_scale_2") or settings.get("guidance_scale")}
            stages = [([step for step in steps if step.timestep >= below], settings)]
            stages += [([step for step in steps if step.timestep < below], second)]
        rebuilt = [rebuild(stage, given, layout) for stage, given in stages]
        for i, step in enumerate(steps):
            check_step(rebuilt[-1 if below > step.timestep else 0], i, steps)
        if first is None:
            first = steps[0]
            check_network(rebuilt[0], steps[0])
            check_network(rebuilt[-1], steps[-1])
        rebuilt = [dealing(one, stage[-1], batch) for one, (stage, _) in zip(rebuilt, stages, strict=True)]
        network = replace(rebuilt[0], later=rebuilt[1], below=below) if below else rebuilt[0]
        if parts and any(
            (a.guidance, a.layout) != (b.guidance, b.layout)
            for a, b in ((network, parts[0]), (network.at(-1.0), parts[0].at(-1.0)))
        ):
            raise Unfit("guidance or resolution differ from prompt to prompt; calibrate them apart")
        parts.append(network)
    assert first is not None, "a call has at least one part"
    assert parts[0].layout is not None, "a recorded state has a layout"
    family, network = family_of(scheduler), parts[0]
    facts: dict[str, Any] = {"pipeline": type(pipe).__name__, "guidance": asdict(network.guidance)}
    if isinstance(family, VariancePreserving):
        facts["prediction"] = family.config["prediction_type"]  # hosts that ask for σ must know it
    if network.later is not None:
        facts |= {"guidance_later": asdict(network.later.guidance), "boundary": pipe.config["boundary_ratio"]}
    if side := network.calls[0].side:
        facts["controlnet_scale"] = strengths(side.conditions)
    return Capture(family, tuple(parts), parts[0].layout.shape, first.sample.device, batch, facts)
