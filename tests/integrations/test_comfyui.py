"""The ComfyUI nodes against a stand-in of what they touch: samplers, guiders, model sampling, folders.

The stand-in keeps ComfyUI's contract: everything runs under inference mode with weights made in it; a sampler function
is called with the guider wrapped, its noise scaled, and unscaled afterwards; the guider repeats its conditioning to
whatever batch it is asked for.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steindiff.integrations.kdiffusion import sample_steindiff, sigmas_of
from steindiff.solvers import SOLVERS, DPMSolverMultistep

FOLDER = Path(__file__).parents[2] / "comfyui"
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


class Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return torch.tanh(self.conv(x) + cond.reshape(-1, 1, 1, 1))


class BaseModel:
    """A loaded model: how it is sampled, and its network."""

    def __init__(self, sampling: Any, seed: int = 0) -> None:
        self.model_sampling = sampling
        self.diffusion_model = Network(seed)

    def apply(self, x: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        s = sigma.reshape(-1, 1, 1, 1)
        alpha = 1 - s if isinstance(self.model_sampling, CONST) else torch.ones_like(s)
        kept = alpha / (alpha**2 + 4 * s**2)
        return kept * x + 0.3 * self.diffusion_model(x / (alpha**2 + s**2).sqrt(), cond)


class CFGGuider:
    """Combines conditions; `sample` loads the model, scales the noise, and lets the sampler run."""

    def __init__(self, model: BaseModel, cfg: float = 3.0) -> None:
        self.model_patcher, self.cfg, self.calls = SimpleNamespace(model=model), cfg, 0

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, seed: int | None = None) -> Tensor:
        self.calls += 1
        conds = [torch.full((1,), value).expand(len(x)) for value in (0.4, 0.0)]
        positive, negative = (self.inner_model.apply(x, sigma, cond) for cond in conds)
        return negative + self.cfg * (positive - negative)

    def sample(
        self, noise, latent_image, sampler, sigmas, denoise_mask=None, callback=None, disable_pbar=False, seed=0
    ):
        self.inner_model = self.model_patcher.model
        extra_args = {"model_options": {}, "seed": seed}
        try:
            return sampler.sample(self, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)
        finally:
            del self.inner_model


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


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The node pack, imported as ComfyUI imports it, with the stand-in in place of ComfyUI."""
    parts = {
        "comfy.samplers": {"KSAMPLER": KSAMPLER, "CFGGuider": CFGGuider},
        "comfy.model_sampling": {"EPS": EPS, "CONST": CONST},
        "comfy.sample": {"fix_empty_latent_channels": lambda patcher, latent: latent},
        "folder_paths": {"get_output_directory": lambda: str(tmp_path)},
    }
    comfy = ModuleType("comfy")
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        if name.startswith("comfy."):
            setattr(comfy, name.removeprefix("comfy."), module)
    spec = importlib.util.spec_from_file_location(
        "steindiff_nodes", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    pack = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "steindiff_nodes", pack)
    spec.loader.exec_module(pack)
    yield pack
    sys.modules.pop("steindiff_nodes.nodes", None)


def noise(shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def node(nodes: ModuleType, name: str) -> Any:
    return nodes.NODE_CLASS_MAPPINGS[name]()


def calibrate(nodes: ModuleType, guider: CFGGuider, name: str = "mine") -> tuple[Any, Tensor]:
    latent = {"samples": torch.zeros(3, *SHAPE)}
    return node(nodes, "SteinDiffCalibrate").calibrate(guider, latent, "dpmpp-2m", 4, samples=6, batch=3, name=name)


def test_node_contract(nodes: ModuleType):
    assert set(nodes.NODE_CLASS_MAPPINGS) == set(nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for cls in nodes.NODE_CLASS_MAPPINGS.values():
        inputs = cls.INPUT_TYPES()
        assert set(inputs) <= {"required", "optional", "hidden"}
        assert isinstance(cls.RETURN_TYPES, tuple)
        assert callable(getattr(cls, cls.FUNCTION))
        assert cls.CATEGORY.startswith("sampling/custom_sampling")
        for group in inputs.values():
            for kind in group.values():
                assert isinstance(kind, tuple)
                assert isinstance(kind[0], str | list)


def test_registry_metadata():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    assert "comfyui" not in project["project"]["name"].lower()
    assert {"name", "version", "license", "urls", "dependencies"} <= set(project["project"])
    assert "Repository" in project["project"]["urls"]
    assert {"PublisherId", "DisplayName"} <= set(project["tool"]["comfy"])
    assert (FOLDER / project["project"]["license"]["file"]).is_file()


@pytest.mark.parametrize("sampling", [EPS, CONST])
@pytest.mark.parametrize("solver", ["ddim", "dpmpp-2m", "unipc-bh2-2", "heun", "ipndm-3"])
def test_sampler_node(nodes: ModuleType, sampling: type, solver: str):
    with torch.inference_mode():
        guider = CFGGuider(BaseModel(sampling()))
        (sampler,) = node(nodes, "SteinDiffSampler").get_sampler(solver)
        high = 0.98 if sampling is CONST else 10.0
        sigmas = torch.cat([torch.linspace(high, 0.05, 6), torch.zeros(1)])
        told = []
        out = guider.sample(
            noise(),
            torch.zeros(2, *SHAPE),
            sampler,
            sigmas,
            callback=lambda *a: told.append(a),
            disable_pbar=True,
            seed=1,
        )
        assert [(i, steps) for i, _, _, steps in told] == [(i, 6) for i in range(6)]
        guider.inner_model = guider.model_patcher.model
        expected = sample_steindiff(
            lambda x, sigma: guider(x, sigma),
            noise() * sigmas[0],
            sigmas,
            solver=SOLVERS[solver],
            flow=sampling is CONST,
        )
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("sampling", [EPS, CONST])
def test_calibrate_load_sample(nodes: ModuleType, sampling: type, tmp_path: Path):
    """Calibrate under inference mode, load the file, sample: no call more than plain, and a different image."""
    with torch.inference_mode():
        guider = CFGGuider(BaseModel(sampling()))
        calibration, sigmas = calibrate(nodes, guider)
        assert calibration.settings["guidance"] == 3.0
        assert calibration.settings["backward_passes"] > 0
        assert (tmp_path / "steindiff" / "mine.json").is_file()
        loader = nodes.NODE_CLASS_MAPPINGS["SteinDiffLoadCalibration"]
        assert loader.INPUT_TYPES()["required"]["file"] == (["mine.json"],)
        assert loader.IS_CHANGED("mine.json") > 0
        (loaded,) = loader().load("mine.json")
        (given,) = node(nodes, "SteinDiffSigmas").get_sigmas(loaded)
        assert torch.equal(given, sigmas)
        assert torch.equal(given, sigmas_of(calibration))
        (corrected,) = node(nodes, "SteinDiffSampler").get_sampler("ddim", loaded)
        (plain,) = node(nodes, "SteinDiffSampler").get_sampler("dpmpp-2m")
        ends = []
        for sampler in (corrected, plain):
            guider.calls = 0
            ends.append(guider.sample(noise(), torch.zeros(2, *SHAPE), sampler, given, disable_pbar=True))
            assert guider.calls == 4
    assert loaded.solver == DPMSolverMultistep(2)
    assert ends[0].isfinite().all()
    assert not torch.allclose(*ends, rtol=1e-3)


def test_misuse_is_refused(nodes: ModuleType):
    with torch.inference_mode():
        guider = CFGGuider(BaseModel(EPS()))
        calibration, sigmas = calibrate(nodes, guider)
        (sampler,) = node(nodes, "SteinDiffSampler").get_sampler("ddim", calibration)
        run = {"disable_pbar": True}
        zeros = torch.zeros(2, *SHAPE)
        with pytest.raises(ValueError, match=r"guidance: measured with 3\.0, asked for 7\.0"):
            CFGGuider(guider.model_patcher.model, 7.0).sample(noise(), zeros, sampler, sigmas, **run)
        with pytest.raises(ValueError, match="network: its weights differ by"):
            CFGGuider(BaseModel(EPS(), seed=1)).sample(noise(), zeros, sampler, sigmas, **run)
        with pytest.raises(ValueError, match=r"sigmas: 3 steps, .*the calibration is for 4 steps"):
            guider.sample(noise(), zeros, sampler, sigmas[1:], **run)
        with pytest.raises(ValueError, match=r"shape: measured for \(4, 8, 8\), asked for \(4, 16, 16\)"):
            guider.sample(noise((4, 16, 16)), torch.zeros(2, 4, 16, 16), sampler, sigmas, **run)
        with pytest.raises(ValueError, match=r"name = '\.\./mine': allowed are file names"):
            calibrate(nodes, guider, "../mine")
        with pytest.raises(ValueError, match=r"file = '\.\./mine\.json': allowed are files of"):
            node(nodes, "SteinDiffLoadCalibration").load("../mine.json")
