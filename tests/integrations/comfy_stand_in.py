"""A stand-in for what the nodes touch of ComfyUI, written from its behaviour.

It keeps ComfyUI's contract. Everything runs under inference mode with weights made in it. Blocks work in place, which
derivatives do not survive. A sampler function is called with the guider wrapped, its noise scaled, and unscaled
afterwards. The guider repeats its conditioning to whatever batch it is asked for, puts all conditions through the
network at once and says in `cond_or_uncond` which is which. A LoRA lives in the patcher's `patches`: added to the
weights, the originals kept in `backup`, or, in low memory, added while a layer runs.
"""

from __future__ import annotations

import importlib.util
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

PACK = Path(__file__).parents[2] / "comfyui"
SHAPE = (4, 8, 8)


class EPS:
    """Noise prediction: noise is added to the image."""

    sigma_min, sigma_max = torch.tensor(0.03), torch.tensor(14.6)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor, max_denoise: bool = False) -> Tensor:
        return latent + noise * ((1 + sigma**2).sqrt() if max_denoise else sigma)

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent


class CONST:
    """Rectified flow: noise and image are mixed."""

    sigma_min, sigma_max = torch.tensor(0.01), torch.tensor(1.0)

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor, max_denoise: bool = False) -> Tensor:
        return sigma * noise + (1 - sigma) * latent

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent / (1 - sigma)


class DiscreteEPS(EPS):
    """As loaders make it: a class of its own for every model."""


class FlowCONST(CONST):
    """Likewise."""


class Layer(nn.Conv2d):
    """A layer whose weight may be changed on the fly, and may be stored in 8 bits."""

    weight_function: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        weight = weight if self.weight_function is None else self.weight_function(weight)
        return nn.functional.conv2d(x, weight, self.bias.to(x.dtype), padding=1)


class Network(nn.Module):
    """Blocks that work in place, a prompt and a number beside it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = Layer(4, 8, 3, padding=1), Layer(8, 4, 3, padding=1)

    def forward(self, x: Tensor, context: Tensor, guidance: Tensor | None = None) -> Tensor:
        frames = x.ndim == 5
        h = self.first(x.squeeze(2) if frames else x)
        h += context.mean((1, 2)).reshape(-1, 1, 1, 1)
        torch.tanh_(h)
        kept = h.sigmoid()
        h.mul_(kept)
        if guidance is not None:
            h *= (1 + 0.1 * guidance).reshape(-1, 1, 1, 1)
        out = self.last(h).tanh_()
        return out.unsqueeze(2) if frames else out


class BaseModel(nn.Module):
    """A loaded model: how it is sampled, and its network."""

    def __init__(self, sampling: Any, seed: int = 0) -> None:
        super().__init__()
        self.model_sampling = sampling
        self.diffusion_model = Network(seed)
        self.rows: list[int] = []

    def apply_model(
        self, x: Tensor, t: Tensor, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs
    ) -> Tensor:
        self.rows.append(len(x))
        s = t.reshape(-1, *[1] * (x.ndim - 1))
        alpha = 1 - s if isinstance(self.model_sampling, CONST) else torch.ones_like(s)
        kept = alpha / (alpha**2 + 4 * s**2)
        return kept * x + 0.5 * self.diffusion_model(x / (alpha**2 + s**2).sqrt(), c_crossattn, **kwargs)


class Patcher:
    """What a MODEL is: the model, the options of its runs, and what is patched into it."""

    def __init__(self, model: BaseModel, *, low_memory: bool = False) -> None:
        self.model, self.low_memory = model, low_memory
        self.load_device = torch.device("cpu")
        self.model_options: dict[str, Any] = {"transformer_options": {}}
        self.patches: dict[str, list[tuple]] = {}
        self.backup: dict[str, Any] = {}
        self.patches_uuid = uuid.uuid4()

    def add_lora(self, strength: float, seed: int = 7) -> Patcher:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.model.diffusion_model.named_parameters():
            if weight.ndim > 1:
                change = 0.3 * torch.randn(weight.shape, generator=generator)
                lora = SimpleNamespace(weights=(change, None, 1.0))
                self.patches.setdefault(f"diffusion_model.{name}", []).append((strength, lora, 1.0, None, None))
        self.patches_uuid = uuid.uuid4()
        return self

    def load(self) -> None:
        """Apply the patches, or arrange that layers do."""
        for key, found in self.patches.items():
            name = key.removeprefix("diffusion_model.").removesuffix(".weight")
            layer = self.model.diffusion_model.get_submodule(name)

            def patched(weight: Tensor, found: list[tuple] = found) -> Tensor:
                return weight + sum(strength * lora.weights[0] for strength, lora, *_ in found)

            if self.low_memory:
                layer.weight_function = patched
            else:
                self.backup[key] = SimpleNamespace(weight=layer.weight.clone())
                layer.weight.data = patched(layer.weight)

    def unload(self) -> None:
        """Undo it."""
        for key in self.patches:
            name = key.removeprefix("diffusion_model.").removesuffix(".weight")
            layer = self.model.diffusion_model.get_submodule(name)
            layer.weight_function = None
            if key in self.backup:
                layer.weight.data = self.backup.pop(key).weight


def prompt(value: float, length: int = 7, guidance: float | None = None) -> dict[str, Any]:
    """A condition: an encoded text, and what is set beside it."""
    return {"text": torch.full((1, length, 3), value), "guidance": guidance}


def predictions(model: BaseModel, conds: list[dict | None], x: Tensor, sigma: Tensor, options: dict) -> list[Tensor]:
    """All conditions through the network at once, in no particular order."""
    places = [k for k in reversed(range(len(conds))) if conds[k] is not None]
    length = max(conds[k]["text"].shape[1] for k in places)
    text = [conds[k]["text"].mean(1, keepdim=True).expand(len(x), length, 3) for k in places]
    given: dict[str, Any] = {"c_crossattn": torch.cat(text)}
    if all(conds[k]["guidance"] is not None for k in places):
        given["guidance"] = torch.cat([torch.full((len(x),), conds[k]["guidance"]) for k in places])
    inner = {**options.get("transformer_options", {}), "cond_or_uncond": places}
    joint = model.apply_model(
        torch.cat([x] * len(places)), torch.cat([sigma] * len(places)), transformer_options=inner, **given
    )
    answers = dict(zip(places, joint.chunk(len(places)), strict=True))
    return [answers.get(k, torch.zeros_like(x)) for k in range(len(conds))]


class CFGGuider:
    """Combines conditions; `sample` loads the model, scales the noise, and lets the sampler run."""

    def __init__(self, patcher: Patcher, cfg: float = 3.0, positive: dict | None = None) -> None:
        self.model_patcher, self.cfg, self.calls = patcher, cfg, 0
        self.positive, self.negative = positive or prompt(0.4), prompt(0.0)

    def predict_noise(self, x: Tensor, sigma: Tensor, model_options: dict, seed: int | None = None) -> Tensor:
        negative = None if self.cfg == 1.0 else self.negative
        c, u = predictions(self.inner_model, [self.positive, negative], x, sigma, model_options)
        if "sampler_cfg_function" in model_options:
            d = model_options["sampler_cfg_function"](c, u, self.cfg)
        else:
            d = u + self.cfg * (c - u)
        for function in model_options.get("sampler_post_cfg_function", []):
            d = function(self, d, c, x, sigma, model_options)
        return d

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, seed: int | None = None) -> Tensor:
        self.calls += 1
        return self.predict_noise(x, sigma, model_options or {}, seed)

    def sample(
        self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=0
    ):
        self.room = len(noise)
        self.inner_model = self.model_patcher.model
        self.model_patcher.load()
        extra_args = {"model_options": self.model_patcher.model_options, "seed": seed}
        try:
            return sampler.sample(self, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
        finally:
            self.model_patcher.unload()
            del self.inner_model


class DualCFGGuider(CFGGuider):
    """Three conditions, two weights; `cfg` stays what it was."""

    def __init__(self, patcher: Patcher, first: float, second: float) -> None:
        super().__init__(patcher, 1.0)
        self.first, self.second = first, second

    def predict_noise(self, x: Tensor, sigma: Tensor, model_options: dict, seed: int | None = None) -> Tensor:
        n, m, p = predictions(self.inner_model, [self.negative, prompt(0.2), self.positive], x, sigma, model_options)
        return n + self.second * (m - n) + self.first * (p - m)


def rescaled(multiplier: float) -> Callable[..., Tensor]:
    """Guidance whose spread is drawn back to that of the conditional prediction."""

    def combine(c: Tensor, u: Tensor, cfg: float) -> Tensor:
        d = u + cfg * (c - u)
        return multiplier * d * c.std() / d.std() + (1 - multiplier) * d

    return combine


def perturbed(scale: float) -> Callable[..., Tensor]:
    """Guidance away from what a network with replaced attention says."""

    def add(guider: CFGGuider, d: Tensor, c: Tensor, x: Tensor, sigma: Tensor, options: dict) -> Tensor:
        inner = {**options.get("transformer_options", {}), "patches_replace": {"attn1": {("middle", 0): len}}}
        (worse,) = predictions(guider.inner_model, [guider.positive], x, sigma, {"transformer_options": inner})
        return d + scale * (c - worse)

    return add


class Wrapped:
    """What a sampler function calls `model`: mixes in what a mask protects."""

    def __init__(self, guider: CFGGuider) -> None:
        self.inner_model = guider

    def __call__(
        self, x: Tensor, sigma: Tensor, denoise_mask: Any, model_options: Any = None, seed: Any = None
    ) -> Tensor:
        assert sigma.shape == x.shape[:1]
        return self.inner_model(x, sigma, model_options=model_options, seed=seed)


class KSAMPLER:
    def __init__(self, sampler_function, extra_options=None, inpaint_options=None) -> None:
        self.sampler_function, self.extra_options = sampler_function, extra_options or {}

    def sample(self, guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar):
        sampling = guider.inner_model.model_sampling
        x = sampling.noise_scaling(sigmas[0], noise, latent_image, False)
        steps = len(sigmas) - 1
        told = None if callback is None else lambda d: callback(d["i"], d["denoised"], d["x"], steps)
        out = self.sampler_function(
            Wrapped(guider),
            x,
            sigmas,
            extra_args={**extra_args, "denoise_mask": denoise_mask},
            callback=told,
            disable=disable_pbar,
            **self.extra_options,
        )
        return sampling.inverse_noise_scaling(sigmas[-1], out)


class InterruptProcessingException(Exception):
    pass


class Interruption:
    """The cancel button: `after` so many questions it has been pressed, once."""

    after: int | None = None

    def ask(self) -> None:
        if self.after is not None:
            self.after -= 1
            if self.after < 0:
                self.after = None
                raise InterruptProcessingException


class ProgressBar:
    """Remembers what it was told."""

    made: ClassVar[list[ProgressBar]] = []

    def __init__(self, total: int) -> None:
        self.total, self.seen = total, []
        self.made.append(self)

    def update_absolute(self, value: int, total: int | None = None) -> None:
        self.seen.append(value)


class FolderPaths:
    """Folders by kind, with the endings of their files."""

    def __init__(self, root: Path) -> None:
        self.root, self.models_dir = root, str(root / "models")
        self.folder_names_and_paths: dict[str, tuple[list[str], set[str]]] = {}

    def get_output_directory(self) -> str:
        return str(self.root / "output")

    def add_model_folder_path(self, kind: str, path: str, is_default: bool = False) -> None:
        self.folder_names_and_paths.setdefault(kind, ([], set()))[0].append(path)

    def get_filename_list(self, kind: str) -> list[str]:
        folders, endings = self.folder_names_and_paths[kind]
        found = (p.relative_to(f) for f in map(Path, folders) for p in f.rglob("*") if p.suffix in endings)
        return sorted(map(str, found))

    def get_full_path(self, kind: str, name: str) -> str | None:
        for folder in self.folder_names_and_paths[kind][0]:
            if (Path(folder) / name.lstrip("/")).is_file():
                return str(Path(folder) / name)
        return None


def modules(root: Path) -> tuple[dict[str, ModuleType], Interruption]:
    """The modules the nodes import, by name, and the cancel button."""
    folders, button = FolderPaths(root), Interruption()
    content: dict[str, dict[str, Any]] = {
        "comfy": {},
        "comfy.samplers": {"KSAMPLER": KSAMPLER, "CFGGuider": CFGGuider},
        "comfy.model_sampling": {"EPS": EPS, "CONST": CONST},
        "comfy.sample": {"fix_empty_latent_channels": lambda patcher, latent: latent},
        "comfy.utils": {"ProgressBar": ProgressBar},
        "comfy.model_management": {
            "InterruptProcessingException": InterruptProcessingException,
            "throw_exception_if_processing_interrupted": button.ask,
        },
        "folder_paths": {
            name: getattr(folders, name)
            for name in (
                "models_dir",
                "folder_names_and_paths",
                "get_output_directory",
                "add_model_folder_path",
                "get_filename_list",
                "get_full_path",
            )
        },
    }
    made = {}
    for name, parts in content.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(parts)
        if "." in name:
            setattr(made["comfy"], name.removeprefix("comfy."), made[name])
    return made, button


@contextmanager
def imported(root: Path) -> Iterator[ModuleType]:
    """The node pack as ComfyUI imports it, with the stand-in in place of ComfyUI."""
    made, button = modules(root)
    spec = importlib.util.spec_from_file_location("steindiff_nodes", PACK / "__init__.py")
    pack = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in {**made, "steindiff_nodes": pack}.items():
            patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(pack)
        pack.button, pack.output, pack.folder_paths = button, root / "output" / "steindiff", made["folder_paths"]
        ProgressBar.made.clear()
        yield pack
    for part in ("nodes", "identity"):
        sys.modules.pop(f"steindiff_nodes.{part}", None)
